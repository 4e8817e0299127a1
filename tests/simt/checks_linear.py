"""Checks of weights and of products with them: packing, a handful of rows, many rows through cuBLAS, gated outputs."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from minserve.backend.base import Activation
from minserve.backend.cuda_backend import ops
from minserve.backend.cuda_backend.blas import Output
from minserve.backend.cuda_backend.weights import FACTORS, FLOAT16_MAX, LAYOUTS, Matrix, Uploader
from minserve.backend.tensor import BLOCKS, Encoding, HostTensor
from tests.simt import reference
from tests.simt.kit import Check, Kit, host_tensor, normal, quantized_weights, step_of
from tests.simt.reference import Float64

F32, Q8_0, Q5_0, Q4_0 = Encoding.F32, Encoding.Q8_0, Encoding.Q5_0, Encoding.Q4_0
Q4_1, Q5_1 = Encoding.Q4_1, Encoding.Q5_1
Q4_K, Q5_K, Q6_K = Encoding.Q4_K, Encoding.Q5_K, Encoding.Q6_K


def unpacked(kit: Kit, matrix: Matrix) -> tuple[npt.NDArray[np.int64], Float64, Float64]:
    """Integers [n, k], scales [n, k / their group] and minima [n, k / 32] of a matrix, by the words of weights.cuh."""
    layout, n, k = LAYOUTS[matrix.format], matrix.n, matrix.k
    low = 8 if layout.bits == 8 else 4
    chunks = kit.cp.asnumpy(matrix.data).reshape(n, -1, 64 * layout.bits // low)
    units = chunks[..., :64].reshape(n, -1, 4, 16 // low, low).swapaxes(2, 3)  # [n, chunk, group, lane, bytes of 8]
    if low == 8:
        q = units.astype(np.int64) - 128
    else:
        words = np.ascontiguousarray(units).view("<u4").astype(np.int64)  # [n, chunk, group, lane, 1]
        q = np.concatenate([words >> 4 * (i // 2 + i % 2 * 4) & 15 for i in range(8)], -1)
        q -= 8 if matrix.format == "Int4" else 0
    if layout.bits == 5:
        words = np.ascontiguousarray(chunks[..., 64:]).view("<u4").astype(np.int64)[:, :, None, :, None]
        group, i = np.arange(4)[:, None, None], np.arange(8)  # [.., group, lane, number]
        q |= (words >> 4 * group + i % 2 * 16 + i // 2 & 1) << 4
    if layout.bits == 6:
        pairs = chunks[..., 64:].reshape(n, -1, 4, 2, 2, 2)  # [n, chunk, lane, word, even or odd, unit of the word]
        pairs = pairs.transpose(0, 1, 3, 5, 2, 4).reshape(n, -1, 4, 4, 2).astype(np.int64)  # [.., group, lane, ..]
        q |= np.concatenate([pairs[..., i % 2 : i % 2 + 1] >> i // 2 * 2 & 3 for i in range(8)], -1) << 4
        q -= 32
    if layout.group == 16:  # a lane has four numbers of each half
        q = q.reshape(n, -1, 4, 2, 4).swapaxes(2, 3)
    scales = kit.cp.asnumpy(matrix.scales)[:, : k // layout.group].astype(np.float64)
    minima = np.zeros((n, k // 32)) if matrix.minima is None else kit.cp.asnumpy(matrix.minima)[:, : k // 32]
    return q.reshape(n, -1)[:, :k], scales, minima.astype(np.float64)


def packing(kit: Kit, encodings: tuple[Encoding, ...], cols: int, format: str) -> None:
    """The very integers, scales and minima of the file, of all tensors one after the other; those of K encodings,
    whatever their factors, within half a float16's last place."""
    tensors = [any_blocks(i, 3 + i, cols, encoding) for i, encoding in enumerate(encodings)]
    matrix = Uploader(kit.cp, kit.compute).matrix(tensors)
    assert matrix.format == format
    arrays, first = unpacked(kit, matrix), 0
    for tensor in tensors:
        groups, zeros = tensor.groups(), np.zeros((tensor.rows, cols // 32))
        offset = {Q4_0: 8, Q5_0: 16}.get(tensor.encoding, 0)
        scale = np.repeat(groups.scale, groups.size // LAYOUTS[format].group, 1)
        minimum = zeros if groups.minimum is None or offset else groups.minimum
        q, *halves = (array[first : first + tensor.rows] for array in arrays)
        assert (q == groups.q.astype(np.int64) - offset).all()
        for got, want in zip(halves, (scale, minimum), strict=True):
            exact = np.asarray(want, np.float64)
            rounding = 2.0**-11 if tensor.encoding in FACTORS else 0
            assert (np.abs(got - exact) <= rounding * np.abs(exact)).all()
        first += tensor.rows


def any_blocks(seed: int, rows: int, cols: int, encoding: Encoding) -> HostTensor:
    """As host_tensor; a K encoding with factors from 0 over subnormal ones to the largest that float16 allows."""
    tensor = host_tensor(seed, rows, cols, encoding)
    if encoding not in FACTORS:
        return tensor
    (where, largest), rng = FACTORS[encoding], np.random.default_rng(seed)
    blocks = tensor.data.reshape(rows, -1, BLOCKS[encoding].nbytes)
    floats = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)  # all that are finite
    limit = int(np.flatnonzero(floats * largest <= FLOAT16_MAX)[-1])
    factors = rng.integers(0, limit + 1, (*blocks.shape[:2], (where.stop - where.start) // 2), np.uint16)
    blocks[..., where] = (factors | rng.integers(0, 2, factors.shape, np.uint16) << 15).view(np.uint8)
    blocks[0, 0] = 255  # the largest integers
    blocks[0, 0, where] = np.array([limit, 1], np.uint16)[: factors.shape[2]].view(np.uint8)
    return tensor


def large_product(kit: Kit, encodings: tuple[Encoding, ...], k: int) -> None:
    """cuBLAS into some columns of a wider array, from dequantized rows where the weight is quantized."""
    linear(kit, encodings, 40, 37, k, "")
    m, x, w = kit.machine(), normal(1, 5, 24), normal(2, 7, 24)
    out = kit.result(5, 16, "float")
    a, b = kit.array(x), kit.array(w)
    kit.run(m, lambda _: m.blas.linear(Output(out.array, "float", 16, 4), a, b, 5, 7, 24, kit.compute), step_of(5))
    kit.compare(kit.host(out.array)[:, 4:11], kit.host(a) @ kit.host(b).T, "float", scale=5)
    assert np.isnan(kit.host(out.array)[:, [*range(4), *range(11, 16)]]).all()


def sums_in_float(kit: Kit) -> None:
    """Parts of a sum are beyond float16, the whole is not."""
    m, out = kit.machine(), kit.result(5, 16)
    a, b = kit.array(np.repeat([[4096.0, -4064.0]], 32, 1).repeat(5, 0)), kit.array(np.ones((16, 64)))
    kit.run(m, lambda _: m.blas.linear(Output(out.array, out.type, 16), a, b, 5, 16, 64, kit.compute), step_of(5))
    assert (kit.host(out.array) == 32 * 32).all()


def linear(kit: Kit, encodings: tuple[Encoding, ...], rows: int, n: int, k: int, out_type: str) -> None:
    """x @ weight.T for every format; quantized weights act as the file's exact numbers (rounded, through cuBLAS)."""
    m, tensors = kit.machine(), [host_tensor(i, n, k, e) for i, e in enumerate(encodings)]
    matrix = Uploader(kit.cp, kit.compute).matrix(tensors)
    x, out = kit.buffer(normal(3, rows, k, scale=k**-0.5)), kit.result(rows, matrix.n, out_type or kit.compute)
    kit.run(m, ops.Linear(m, out, x, matrix), step_of(rows))
    kit.compare(out.array, kit.host(x.array) @ exact(kit, tensors, matrix, rows).T, out.type, scale=2)


def gated(kit: Kit, encodings: tuple[Encoding, ...], activation: Activation, rows: int, width: int, k: int) -> None:
    m, tensors = kit.machine(), [host_tensor(i, width, k, e) for i, e in enumerate((*encodings, *encodings)[:2])]
    matrix = Uploader(kit.cp, kit.compute).matrix(tensors, pairs=True)
    x, out = kit.buffer(normal(3, rows, k, scale=k**-0.5)), kit.result(rows, width)
    wide = kit.result(rows, 2 * width)
    kit.run(m, ops.Linear(m, out, x, matrix, activation, wide), step_of(rows))
    product = kit.host(x.array) @ exact(kit, tensors, matrix, rows).T
    large = rows > ops.SKINNY_ROWS[matrix.format]  # then gate and up are rounded once more
    kit.compare(out.array, reference.glu(product, activation), scale=4 if large else 2)


def exact(kit: Kit, tensors: list[HostTensor], matrix: Matrix, rows: int) -> Float64:
    """The weights that a product of so many rows works with."""
    weights: Any = np.concatenate([t.float32() if matrix.format == "Dense" else quantized_weights(t) for t in tensors])
    if matrix.format == "Dense" or rows > ops.SKINNY_ROWS[matrix.format]:
        weights = kit.rounded(weights)
    return np.asarray(weights, np.float64)


FORMATS = {  # of what, and a number of columns
    "Dense": ((F32,), 160),
    "Int8": ((Q8_0,), 160),
    "Int4": ((Q4_0,), 160),
    "Int4Min": ((Q4_1,), 160),
    "Int5Min": ((Q5_1,), 160),
    "Int6Min": ((Q6_K,), 256),
    "Int8Min": ((Q8_0, Q6_K), 256),
}
SHAPES = [  # rows, n, k: one, a whole tile, one more, many; n and k with tails
    (1, 16, 32),
    (1, 37, 160),
    (3, 5, 1056),
    (8, 48, 2080),
    (9, 17, 96),
    (16, 32, 160),
    (17, 33, 160),
]
TAILS = {"Dense": (F32,), "Int8": (Q8_0,), "Int4": (Q4_0,), "Int4Min": (Q4_1,), "Int5Min": (Q5_1,), "Int6Min": (Q5_0,)}
PACKED = {  # encodings -> format
    (Q4_0,): "Int4",
    (Q4_1,): "Int4Min",
    (Q5_1, Q4_1): "Int5Min",
    (Q5_0,): "Int6Min",
    (Q5_1, Q4_1, Q4_0, Q5_0): "Int6Min",
    (Q8_0,): "Int8",
    (Q8_0, Q5_0, Q4_0): "Int8",
    (Q5_1, Q8_0, Q4_1): "Int8Min",
}
PACKED_K = {
    (Q4_K, Q4_1): "Int4Min",
    (Q5_K, Q4_K, Q5_1): "Int5Min",
    (Q4_K, Q4_K, Q6_K): "Int6Min",
    (Q5_K, Q6_K, Q5_1): "Int6Min",
    (Q4_K, Q5_K, Q6_K, Q8_0, Q5_0, Q4_0): "Int8Min",
}
CHECKS: dict[str, Check] = {
    **{f"packing {'+'.join(encodings)} {cols} as {format}":
       partial(packing, encodings=encodings, cols=cols, format=format)
       for (encodings, format), cols in [*product(PACKED.items(), (32, 96, 256)), *product(PACKED_K.items(), (768,))]},
    **{f"linear {name} {r}x{n}x{k}": partial(linear, encodings=e, rows=r, n=n, k=k, out_type="")
       for (name, e), (r, n, k) in product(TAILS.items(), SHAPES)},
    **{f"linear {name} {r}x{n}x{k}": partial(linear, encodings=FORMATS[name][0], rows=r, n=n, k=k, out_type="")
       for name, (r, n, k) in product(("Int6Min", "Int8Min"), ((1, 16, 256), (3, 5, 1280), (9, 17, 768)))},
    **{f"linear {name} to float": partial(linear, encodings=e, rows=2, n=19, k=k, out_type="float")
       for name, (e, k) in FORMATS.items()},
    "linear Dense 1x19x200": partial(linear, encodings=(F32,), rows=1, n=19, k=200, out_type=""),
    "linear of mixed tensors": partial(linear, encodings=(Q4_0, Q8_0, Q5_1), rows=2, n=20, k=96, out_type=""),
    **{f"gated {name} {a} {rows} rows": partial(gated, encodings=e, activation=a, rows=rows, width=24, k=k)
       for (name, (e, k)), a, rows in product(FORMATS.items(), get_args(Activation), (1, 9, 20))},
    "large product whose parts overflow": sums_in_float,
    **{f"large product {name}": partial(large_product, encodings=e, k=k) for name, (e, k) in FORMATS.items()},
}  # fmt: skip
