"""Checks of the kernels that work row by row: embedding, norms, sums, activations, rotation and cache writes."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import get_args

import numpy as np

from minserve.backend.base import Activation, Heads
from minserve.backend.cuda_backend import ops
from minserve.backend.cuda_backend.ops import NormWeight
from minserve.backend.cuda_backend.weights import Rope, Uploader
from minserve.backend.tensor import Encoding
from tests.simt import reference
from tests.simt.kit import Check, Kit, host_tensor, normal, quantized_weights, step_of

ROWS_COLS = [(1, 8), (5, 264), (3, 2048)]


def norm(kit: Kit, rows: int, cols: int, kind: str) -> None:
    """Alone, on a float32 residual stream or on a branch."""
    m, x, weight = kit.machine(), normal(1, rows, cols), normal(2, cols)
    out, source = kit.result(rows, cols), kit.buffer(x, kind or kit.compute)
    kit.run(m, ops.Norm(m, out, source, NormWeight(kit.array(weight, "float"), 1e-5)), step_of(rows))
    kit.compare(out.array, reference.rms_norm(kit.host(source.array), weight, 1e-5))


def norm_of_sum(kit: Kit, rows: int, cols: int, post: bool, gather: bool) -> None:
    """With a branch added first, which may be normed itself; for all rows or for the sampled ones."""
    m, x, branch = kit.machine(), normal(1, rows, cols, scale=3), normal(2, rows, cols)
    weight, post_weight = normal(3, cols), normal(4, cols)
    picked = np.array([rows - 1, 0, rows // 2], np.int32) if gather else np.arange(rows)
    residual, b = kit.buffer(x, "float"), kit.buffer(branch)
    out = kit.result(len(picked), cols, sampled=gather)
    posts = NormWeight(kit.array(post_weight, "float"), 1e-2) if post else None
    instruction = ops.Norm(m, out, residual, NormWeight(kit.array(weight, "float"), 1e-3), b, posts)
    kit.run(m, instruction, step_of(rows, len(picked), inputs={"logit_rows": kit.ints(picked)}))
    addend = kit.host(b.array)
    total = x + (reference.rms_norm(addend, post_weight, 1e-2) if post else addend)
    kit.compare(out.array, reference.rms_norm(total, weight, 1e-3)[picked])
    kit.compare(residual.array, x if gather else total, "float")


def embed(kit: Kit, encoding: Encoding, cols: int) -> None:
    m, table = kit.machine(), host_tensor(1, 11, cols, encoding)
    ids, out = np.array([3, 10, 0, 3], np.int32), kit.result(4, cols, "float")
    matrix = Uploader(kit.cp, kit.compute).matrix([table])
    kit.run(m, ops.Embed(m, out, matrix, 1.5), step_of(4, inputs={"token_ids": kit.ints(ids)}))
    want = kit.rounded(table.float32()) if matrix.format == "Dense" else quantized_weights(table)
    kit.compare(out.array, want[ids] * 1.5, "float")


def take(kit: Kit, kind: str) -> None:
    m, x, rows = kit.machine(), kit.buffer(normal(1, 5, 1032), kind), np.array([4, 0, 0], np.int32)
    out = kit.result(3, 1032, kind, sampled=True)
    kit.run(m, ops.Take(m, out, x), step_of(5, 3, inputs={"logit_rows": kit.ints(rows)}))
    assert (kit.host(out.array) == kit.host(x.array)[rows]).all()


def add(kit: Kit, kinds: tuple[str, str], rows: int, cols: int) -> None:
    m, (a, b) = kit.machine(), (kit.buffer(normal(seed, rows, cols), kind) for seed, kind in enumerate(kinds))
    out = kit.result(rows, cols, "float")
    kit.run(m, ops.Add(m, out, a, b), step_of(rows))
    kit.compare(out.array, kit.host(a.array) + kit.host(b.array), "float")
    if kinds[0] == "float":  # in place, as in the residual stream
        want = kit.host(out.array)
        kit.run(m, ops.Add(m, a, a, b), step_of(rows))
        assert (kit.host(a.array) == want).all()


def cast(kit: Kit, rows: int, cols: int) -> None:
    m, x, out = kit.machine(), normal(1, rows, cols), kit.result(rows, cols)
    kit.run(m, ops.Cast(m, out, kit.buffer(x, "float")), step_of(rows))
    assert (kit.host(out.array) == kit.rounded(x)).all()


def add_bias(kit: Kit, kind: str) -> None:
    m, bias = kit.machine(), normal(2, 264)
    x = kit.buffer(normal(1, 3, 264), kind)
    want = kit.host(x.array) + bias
    kit.run(m, ops.AddBias(m, x, kit.array(bias, "float")), step_of(3))
    kit.compare(x.array, want, x.type)


def glu(kit: Kit, activation: Activation, rows: int, width: int) -> None:
    m, x = kit.machine(), normal(1, rows, 2 * width, scale=3)
    x[0, 0], x[-1, 7] = 60, -90  # where exp overflows or vanishes
    source, out = kit.buffer(x), kit.result(rows, width)
    kit.run(m, ops.Glu(m, out, source, activation), step_of(rows))
    kit.compare(out.array, reference.glu(kit.host(source.array), activation))


def rope_kv(kit: Kit, heads: Heads, half: int, block_size: int, bias: bool, norms: str) -> None:
    """Rotation of all or some dimensions, bias and per-head norms, padding; nothing else in the cache changes."""
    m, tokens, blocks = kit.machine(block_size=block_size), 6, 5
    x, cache = normal(1, tokens, heads.cols), np.full((blocks, heads.kv, 2, block_size, heads.dim), 7, np.float32)
    angles = np.outer(np.arange(50), 100.0 ** (-np.arange(half) / half))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    slots = np.random.default_rng(3).permutation(blocks * block_size)[:tokens].astype(np.int32)
    slots[2], positions = -1, np.array([0, 49, 7, 1, 30, 12], np.int32)
    b, weights = normal(4, heads.cols), {name: normal(5 + i, heads.dim) for i, name in enumerate("qk")}

    qkv, pages = kit.buffer(x), kit.array(cache)
    before = kit.host(qkv.array)
    rope = Rope(kit.array(cos, "float"), kit.array(sin, "float"), half)
    vectors = {f"{n}_norm": kit.array(weights[n], "float") for n in norms}
    instruction = ops.RopeKV(
        m, qkv, heads, rope, pages, bias=kit.array(b, "float") if bias else None, eps=1e-3, **vectors
    )
    kit.run(m, instruction, step_of(tokens, inputs={"positions": kit.ints(positions), "slots": kit.ints(slots)}))

    values = (before + b if bias else before).reshape(tokens, -1, heads.dim)
    q, k, v = np.split(values, [heads.q, heads.q + heads.kv], axis=1)
    q = reference.rms_norm(q, weights["q"].astype(np.float64), 1e-3) if "q" in norms else q
    k = reference.rms_norm(k, weights["k"].astype(np.float64), 1e-3) if "k" in norms else k
    tables = cos[positions].astype(np.float64), sin[positions].astype(np.float64)
    real = slots >= 0
    got = kit.host(qkv.array)
    kit.compare(got[real, : heads.q * heads.dim], reference.rotate(q, *tables).reshape(tokens, -1)[real])
    assert (got[~real] == before[~real]).all()
    want = cache.astype(np.float64).transpose(2, 0, 3, 1, 4).reshape(2, -1, heads.kv, heads.dim)
    want[0, slots[real]], want[1, slots[real]] = reference.rotate(k, *tables)[real], v[real]
    rows = kit.host(pages).transpose(2, 0, 3, 1, 4).reshape(want.shape)
    kit.compare(rows, want)
    untouched = np.setdiff1d(np.arange(blocks * block_size), slots)
    assert (rows[:, untouched] == 7).all()


def copy_blocks(kit: Kit) -> None:
    """Several pairs, in caches of different sizes."""
    m = kit.machine()
    shapes = [(5, 1, 2, 16, 16), (5, 3, 2, 16, 80)]
    hosts = [normal(i, *shape) for i, shape in enumerate(shapes)]
    caches = [kit.array(host) for host in hosts]
    pairs = np.array([[0, 3], [4, 1]], np.int32)
    pools = kit.cp.asarray(np.array([c.data.ptr for c in caches], np.uint64))
    sizes = kit.ints([c.nbytes // 5 for c in caches])
    kernel = m.kernels.get("copy_blocks", "copy_blocks")
    kit.run(m, lambda step: kernel((2, 2), 256, pools, sizes, kit.ints(pairs)), step_of(1))
    for host, cache in zip(hosts, caches, strict=True):
        want = kit.rounded(host)
        want[[3, 1]] = want[[0, 4]]
        assert (kit.host(cache) == want).all()


HEADS = [  # heads, rotated half, block size, bias, norms
    (Heads(4, 2, 64, 1.0), 32, 16, False, ""),
    (Heads(3, 1, 80, 1.0), 20, 32, True, "qk"),
    (Heads(1, 1, 16, 1.0), 8, 8, True, ""),
    (Heads(16, 1, 256, 1.0), 128, 16, False, "qk"),
    (Heads(2, 2, 96, 1.0), 48, 16, False, "q"),
    (Heads(2, 1, 128, 1.0), 64, 16, False, "k"),
]
CHECKS: dict[str, Check] = {
    **{f"norm {r}x{c} of {kind or 'a branch'}": partial(norm, rows=r, cols=c, kind=kind)
       for (r, c), kind in product(ROWS_COLS, ("float", ""))},
    **{f"norm of sum {r}x{c}, post={p}, gather={g}": partial(norm_of_sum, rows=r, cols=c, post=p, gather=g)
       for (r, c), p, g in product(ROWS_COLS, (False, True), (False, True))},
    **{f"embed {e} {c}": partial(embed, encoding=e, cols=c)
       for e, c in product(map(Encoding, ("F32", "Q8_0", "Q4_0", "Q4_1", "Q5_1")), (32, 160, 2048))},
    "embed Q6_K 768": partial(embed, encoding=Encoding.Q6_K, cols=768),
    "embed F32 40": partial(embed, encoding=Encoding.F32, cols=40),
    **{f"take {kind or 'a branch'}": partial(take, kind=kind) for kind in ("float", "")},
    **{f"add {r}x{c}": partial(add, kinds=("float", ""), rows=r, cols=c) for r, c in ROWS_COLS},
    "add two branches": partial(add, kinds=("", ""), rows=3, cols=264),
    "cast": partial(cast, rows=3, cols=264),
    **{f"add_bias {kind or 'to a branch'}": partial(add_bias, kind=kind) for kind in ("float", "")},
    **{f"glu {a} {r}x{w}": partial(glu, activation=a, rows=r, width=w)
       for a, (r, w) in product(get_args(Activation), ((1, 8), (7, 712)))},
    **{f"rope_kv {h.q}/{h.kv} D={h.dim} half={half} block={b} bias={bias} norms={n or 'none'}":
       partial(rope_kv, heads=h, half=half, block_size=b, bias=bias, norms=n) for h, half, b, bias, n in HEADS},
    "copy_blocks": copy_blocks,
}  # fmt: skip
