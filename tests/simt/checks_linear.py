"""Checks of weights and of products with them: packing, a handful of rows, many rows through cuBLAS, gated outputs."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from minserve.backend.cuda_backend import ops
from minserve.backend.cuda_backend.blas import Output
from minserve.backend.cuda_backend.weights import BITS, Matrix, Uploader, chunks
from minserve.backend.tensor import BLOCKS, Encoding, HostTensor
from tests.simt import reference
from tests.simt.kit import Check, Kit, host_tensor, normal, step_of
from tests.simt.reference import Float64

F32, Q8_0, Q5_0, Q4_0 = Encoding.F32, Encoding.Q8_0, Encoding.Q5_0, Encoding.Q4_0
Q4_1, Q4_K = Encoding.Q4_1, Encoding.Q4_K


def unpacked(kit: Kit, matrix: Matrix) -> tuple[npt.NDArray[np.int64], Float64, Float64]:
    """Integers [n, k], scales and minima [n, k / 32] of a quantized matrix, by the words of weights.cuh."""
    bits, n, groups = BITS[matrix.format], matrix.n, matrix.k // 32
    units = kit.cp.asnumpy(matrix.data).reshape(n, chunks(matrix.format, matrix.k), 4, 16 // bits, bits)
    rows = units.transpose(0, 1, 3, 2, 4).reshape(n, -1, 4, bits)[:, :groups]  # [n, group, lane, bytes of 8 numbers]
    if bits == 8:
        q = rows.astype(np.int64) - 128
    else:
        words = np.ascontiguousarray(rows).view("<u4").astype(np.int64)  # [n, group, lane, 1]
        nibbles = [words >> 4 * (i // 2 + i % 2 * 4) & 15 for i in range(8)]
        q = np.concatenate(nibbles, -1) - (8 if matrix.format == "Int4" else 0)
    scales = kit.cp.asnumpy(matrix.scales)[:, :groups].astype(np.float64)
    minima = np.zeros_like(scales) if matrix.minima is None else kit.cp.asnumpy(matrix.minima)[:, :groups]
    return q.reshape(n, -1), scales, minima.astype(np.float64)


def packing(kit: Kit, encodings: tuple[Encoding, ...], cols: int, format: str) -> None:
    """Nothing is rounded: the very integers, scales and minima of the file, of all tensors one after the other."""
    tensors = [host_tensor(i, 3 + i, cols, encoding) for i, encoding in enumerate(encodings)]
    matrix = Uploader(kit.cp, kit.compute).matrix(tensors)
    assert matrix.format == format
    q, scales, minima = unpacked(kit, matrix)
    want = np.concatenate([tensor.float32().astype(np.float64) for tensor in tensors])
    got = q * np.repeat(scales, 32, 1) + np.repeat(minima, 32, 1)
    assert np.abs(got - want).max() < 1e-6  # the float32 of the specification's own sum
    groups = [tensor.groups() for tensor in tensors]
    assert (scales == np.concatenate([g.scale for g in groups])).all()


def packing_k(kit: Kit) -> None:
    """Q4_K: the very integers; scales and minima, whatever their factors, within half a float16's last place."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (5, 3, BLOCKS[Q4_K].nbytes), np.uint8)
    factors = rng.integers(0, 0x6410, (5, 3, 2), np.uint16)  # float16s from 0 over subnormals to 1039
    blocks[..., :4] = (factors | rng.integers(0, 2, factors.shape, np.uint16) << 15).view(np.uint8)
    blocks[0, 0] = 255
    blocks[0, 0, :4] = np.array([0x640F, 0x0001], np.uint16).view(np.uint8)  # the largest and the smallest, times 63
    tensors = [HostTensor("weight", (5, 768), Q4_K, blocks.reshape(5, -1)), host_tensor(1, 2, 768, Q4_1)]
    matrix = Uploader(kit.cp, kit.compute).matrix(tensors)
    assert matrix.format == "Int4Min"
    groups = tensors[0].groups()
    q, scales, minima = (array[:5] for array in unpacked(kit, matrix))
    assert (q == groups.q).all()
    for got, want in (scales, groups.scale), (minima, groups.minimum):
        exact = np.asarray(want, np.float64)
        assert (np.abs(got - exact) <= 2.0**-11 * np.abs(exact)).all()


def large_product(kit: Kit, encoding: Encoding) -> None:
    """cuBLAS into some columns of a wider array, from dequantized rows where the weight is quantized."""
    linear(kit, (encoding,), 40, 37, 160, "")
    m, x, w = kit.machine(), normal(1, 5, 24), normal(2, 7, 24)
    out = kit.result(5, 16, "float")
    a, b = kit.array(x), kit.array(w)
    kit.run(m, lambda _: m.blas.linear(Output(out.array, "float", 16, 4), a, b, 5, 7, 24, kit.compute), step_of(5))
    kit.compare(kit.host(out.array)[:, 4:11], kit.host(a) @ kit.host(b).T, "float", scale=5)
    assert np.isnan(kit.host(out.array)[:, [*range(4), *range(11, 16)]]).all()


def linear(kit: Kit, encodings: tuple[Encoding, ...], rows: int, n: int, k: int, out_type: str) -> None:
    """x @ weight.T for every format; quantized weights act as the file's exact numbers (rounded, through cuBLAS)."""
    m, tensors = kit.machine(), [host_tensor(i, n, k, e) for i, e in enumerate(encodings)]
    matrix = Uploader(kit.cp, kit.compute).matrix(tensors)
    x, out = kit.buffer(normal(3, rows, k, scale=k**-0.5)), kit.result(rows, matrix.n, out_type or kit.compute)
    kit.run(m, ops.Linear(m, out, x, matrix), step_of(rows))
    kit.compare(out.array, kit.host(x.array) @ exact(kit, tensors, matrix, rows).T, out.type, scale=2)


def gated(kit: Kit, encoding: Encoding, activation: str, rows: int, width: int, k: int) -> None:
    m, tensors = kit.machine(), [host_tensor(i, width, k, encoding) for i in range(2)]
    matrix = Uploader(kit.cp, kit.compute).matrix(tensors, pairs=True)
    x, out = kit.buffer(normal(3, rows, k, scale=k**-0.5)), kit.result(rows, width)
    wide = kit.result(rows, 2 * width)
    kit.run(m, ops.Linear(m, out, x, matrix, activation, wide), step_of(rows))
    product = kit.host(x.array) @ exact(kit, tensors, matrix, rows).T
    large = rows > ops.SKINNY_ROWS[matrix.format]  # then gate and up are rounded once more
    kit.compare(out.array, reference.glu(product, activation), scale=4 if large else 2)


def exact(kit: Kit, tensors: list[HostTensor], matrix: Matrix, rows: int) -> Float64:
    """The weights that a product of so many rows works with."""
    weights: Any = np.concatenate([tensor.float32() for tensor in tensors])
    if matrix.format == "Dense" or rows > ops.SKINNY_ROWS[matrix.format]:
        weights = kit.rounded(weights)
    return np.asarray(weights, np.float64)


FORMATS = {"Dense": (F32,), "Int8": (Q8_0,), "Int4": (Q4_0,), "Int4Min": (Q4_1,)}
SHAPES = [  # rows, n, k: one, a whole tile, one more, many; n and k with tails
    (1, 16, 32),
    (1, 37, 160),
    (3, 5, 1056),
    (8, 48, 2080),
    (9, 17, 96),
    (16, 32, 160),
    (17, 33, 160),
]
CHECKS: dict[str, Check] = {
    **{f"packing {'+'.join(encodings)} {cols} as {format}":
       partial(packing, encodings=encodings, cols=cols, format=format)
       for encodings, format in [((Q8_0,), "Int8"), ((Q4_0,), "Int4"), ((Q4_1,), "Int4Min"), ((Q4_0, Q8_0), "Int8"),
                                 ((Q4_1, Q4_0, Q4_1), "Int4Min"), ((Q5_0,), "Int8"), ((Q8_0, Q5_0, Q4_0), "Int8")]
       for cols in (32, 96, 256)},
    "packing Q4_K+Q4_1 768 as Int4Min": packing_k,
    **{f"linear {name} {r}x{n}x{k}": partial(linear, encodings=e, rows=r, n=n, k=k, out_type="")
       for (name, e), (r, n, k) in product(FORMATS.items(), SHAPES)},
    **{f"linear {name} to float": partial(linear, encodings=e, rows=2, n=19, k=96, out_type="float")
       for name, e in FORMATS.items()},
    "linear Dense 1x19x200": partial(linear, encodings=(F32,), rows=1, n=19, k=200, out_type=""),
    "linear of mixed tensors": partial(linear, encodings=(Q4_0, Q8_0), rows=2, n=20, k=96, out_type=""),
    **{f"gated {name} {a} {rows} rows": partial(gated, encoding=e[0], activation=a, rows=rows, width=24, k=160)
       for (name, e), a, rows in product(FORMATS.items(), ("silu", "gelu"), (1, 9, 20))},
    **{f"large product {name}": partial(large_product, encoding=e[0]) for name, e in FORMATS.items()},
}  # fmt: skip
