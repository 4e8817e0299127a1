"""Which kernels are timed at which shapes: Llama-3.1-8B's, and what must be moved and computed there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from minserve.backend.base import Activation, Heads
from minserve.backend.cuda_backend import ops
from minserve.backend.cuda_backend.attention import Attention, Scratch
from minserve.backend.cuda_backend.kernels import cdiv
from minserve.backend.cuda_backend.weights import LAYOUTS, Rope
from minserve.backend.tensor import BLOCKS, Encoding
from tests.gpu.bench import COMPUTE, Bench, Case, launch, step


def products(b: Bench) -> Iterator[Case]:
    """Products of a layer and of the head, for few rows and for many."""
    d, f, v = (64, 96, 80) if b.tiny else (4096, 14336, 128256)
    shapes = (("qkv", 3 * d // 2, d), ("o", d, d), ("gate+up", 2 * f, d), ("down", d, f), ("head", v, d))
    for format in ("Dense", *LAYOUTS):
        for rows in (1, 8, 16) if format != "Dense" else (1, 8, 64):
            for name, n, k in shapes:
                yield product(b, name, format, rows, n, k)
    for rows in (9,) if b.tiny else (256, 512, 2048):
        for name, n, k in shapes[:4]:
            yield product(b, name, "Dense", rows, n, k)
    for format in ("Int8", "Int6Min", "Int5Min", "Int4"):
        yield product(b, "gate+up", format, 17 if b.tiny else 512, 2 * f, d)


def product(b: Bench, name: str, format: str, rows: int, n: int, k: int) -> Case:
    glu, head = name == "gate+up", name == "head"
    weights = [b.matrix(format, n, k, pairs=glu)]
    weights += [b.matrix(format, n, k, pairs=glu) for _ in range(1, b.copies(weights[0].nbytes))]
    x, wide = b.buffer(rows, k), b.buffer(rows, n) if glu else None
    out = b.buffer(rows, n // 2 if glu else n, "float" if head else COMPUTE)
    activation: Activation | None = "silu" if glu else None
    launches = [launch(ops.Linear(b.m, out, x, weight, activation, wide), step(rows, {})) for weight in weights]
    moved = weights[0].nbytes + 2 * rows * k + rows * out.cols * (4 if head else 2)
    kind = "skinny_gemm" if rows <= ops.SKINNY_ROWS[format] else "cuBLAS"
    return Case(kind, f"{name} {format}, {rows} rows", moved, 2 * rows * n * k, launches)


def attention(b: Bench) -> Iterator[Case]:
    """Decode: batches and contexts. Prefill: whole prompts, and a chunk on a long prefix."""
    full, small = Heads(32, 8, 128, 0.088), Heads(32, 8, 64, 0.125)
    if b.tiny:
        full = small = Heads(4, 2, 64, 0.125)
    decodes = ((2, 40),) if b.tiny else ((1, 1024), (1, 8192), (1, 65536), (8, 8192), (64, 1024), (64, 8192))
    for heads in (full, small):
        for batch, context in decodes:
            yield attend(b, heads, [1] * batch, [context] * batch)
    prompts = ((20, 20), (20, 60)) if b.tiny else ((512, 512), (2048, 2048), (8192, 8192), (2048, 32768))
    for heads in (full, small):
        for count, context in prompts:
            yield attend(b, heads, [count], [context])


def attend(b: Bench, h: Heads, counts: list[int], contexts: list[int]) -> Case:
    blocks = [-(-context // 16) for context in contexts]
    ends = np.cumsum(blocks)
    inputs = {
        "block_tables": b.ints(np.random.default_rng(1).permutation(ends[-1])),
        "table_starts": b.ints(ends - blocks),
        "context_lens": b.ints(contexts),
        "query_starts": b.ints(np.cumsum([0, *counts])),
    }
    tokens, size = sum(counts), int(ends[-1]) * 16 * h.kv * h.dim * 4
    qkv, out = b.buffer(tokens, h.cols), b.buffer(tokens, h.q * h.dim)
    scratch = Scratch.make(b.m, [h], len(counts))
    at = step(tokens, inputs, max(counts), len(counts))
    copies = b.copies(size) if max(counts) == 1 else 1
    caches = [b.bytes(size).view(np.uint16) for _ in range(copies)]
    launches = [launch(Attention(b.m, out, qkv, h, cache, scratch), at) for cache in caches]
    pairs = sum((2 * context - count + 1) * count // 2 for count, context in zip(counts, contexts, strict=True))
    moved = sum(contexts) * h.kv * h.dim * 4 + 4 * tokens * h.q * h.dim
    name = "decode_attention" if max(counts) == 1 else "prefill_attention"
    shape = f"{len(counts)} x {contexts[0]}" if max(counts) == 1 else f"{counts[0]} new of {contexts[0]}"
    return Case(name, f"D={h.dim}, {shape}", moved, 4 * h.q * h.dim * pairs, launches)


def row_by_row(b: Bench) -> Iterator[Case]:
    """Norms, rotation, activation, embedding."""
    d, f, v = (64, 96, 80) if b.tiny else (4096, 14336, 128256)
    h = Heads(4, 2, 16, 1.0) if b.tiny else Heads(32, 8, 128, 1.0)
    weight = ops.NormWeight(b.bytes(4 * d).view(np.float32), 1e-5)
    table, angles = b.matrix("Dense", v, d), b.bytes(4 * 8192 * h.dim // 2).view(np.float32).reshape(8192, h.dim // 2)
    cache = b.bytes(8192 * h.kv * h.dim * 4).view(np.uint16)
    for rows in (1, 3) if b.tiny else (1, 64, 4096):
        x, branch, out = b.buffer(rows, d, "float"), b.buffer(rows, d), b.buffer(rows, d)
        add_norm = launch(ops.Norm(b.m, out, x, weight, branch), step(rows, {}))
        yield Case("rms_norm", f"{rows} rows", rows * d * 12, 0, [add_norm] * 8)
        ids = {"token_ids": b.ints(np.arange(rows) % v)}
        yield Case(
            "embed", f"{rows} rows", rows * d * 6, 0, [launch(ops.Embed(b.m, x, table, 1.0), step(rows, ids))] * 8
        )
        wide, gated = b.buffer(rows, 2 * f), b.buffer(rows, f)
        yield Case(
            "glu", f"{rows} rows", rows * f * 6, 0, [launch(ops.Glu(b.m, gated, wide, "silu"), step(rows, {}))] * 8
        )
        qkv, at = b.buffer(rows, h.cols), b.ints(np.arange(rows))
        rotate = ops.RopeKV(b.m, qkv, h, Rope(angles, angles, h.dim // 2), cache)
        places = step(rows, {"positions": at, "slots": at})
        yield Case("rope_kv", f"{rows} rows", rows * h.cols * 4, 0, [launch(rotate, places)] * 8)


def rest(b: Bench) -> Iterator[Case]:
    """What few models need, once for a model, or once for a request."""
    d, f, v = (64, 96, 300) if b.tiny else (4096, 14336, 128256)
    rows = 3 if b.tiny else 8192  # more than the L2 cache holds
    wide, narrow, out = b.buffer(rows, d, "float"), b.buffer(rows, d), b.buffer(rows, d, "float")
    bias = b.bytes(4 * d).view(np.float32)
    every = step(rows, {"logit_rows": b.ints(np.arange(rows))}, rows=rows)
    for name, moved, instruction in (
        ("take", 8, ops.Take(b.m, out, wide)),
        ("add", 10, ops.Add(b.m, out, wide, narrow)),
        ("add_bias", 4, ops.AddBias(b.m, narrow, bias)),
        ("cast", 6, ops.Cast(b.m, narrow, wide)),
    ):
        yield Case(name, f"{rows} rows", rows * d * moved, 0, [launch(instruction, every)] * 8)
    for source, format in (("Q8_0", "Int8"), ("Q4_K", "Int4Min"), ("Q5_K", "Int5Min"), ("Q6_K", "Int6Min")):
        yield repack(b, source, format, 2 * f, max(d, 256))
    counts, tokens = b.bytes(2 * v).view(np.uint16), b.ints(np.arange(1000) % v)
    reset = b.m.kernels.get("seats", "reset_seat")
    lengths = np.int32(900), np.int32(1000), np.int32(v)
    yield Case("reset_seat", "1000 tokens", 2 * v, 0, [lambda: reset((1,), 1024, counts, tokens, *lengths)] * 8)


def repack(b: Bench, source: str, format: str, n: int, k: int) -> Case:
    kernel, block = b.m.kernels.get("repack", "repack", source, format), BLOCKS[Encoding(source)]
    w, blocks = b.matrix(format, n, k), b.bytes(n * k // block.weights * block.nbytes)
    arrays, sizes = (w.data, w.scales, w.minima, blocks), (np.int32(0), np.int32(n), np.int32(k))
    launches = [lambda: kernel((cdiv(n * k, 32 * 256),), 256, *arrays, *sizes)] * 8
    return Case("repack", f"{source} to {format}, {n} x {k}", w.nbytes + blocks.nbytes, 0, launches)
