"""Looking up embeddings in packed weights, and the rotary step that fills the KV cache."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from minserve.backend.numba_backend.jit import Kernel, inlined, kernel
from minserve.backend.numba_backend.layout import GROUP, TOKEN_IDS
from minserve.backend.numba_backend.mathlib import F, share
from minserve.backend.numba_backend.simd import (
    bf16,
    f16,
    f64,
    i8,
    i32,
    i64,
    set_f32,
    u8,
)

# -- one weight of row `lane` of a row block: k = 32 g + j


@inlined
def nibble(w, lane, j):
    byte = u8(w, j % 16 // 4 * 64 + lane * 4 + j % 4)
    return byte >> 4 if j >= 16 else byte & 15


@inlined
def fifth_bit(w, lane, j):
    return (u8(w, 256 + lane * 4 + j % 4) >> (j // 4) & 1) << 4


@inlined
def weight_bf16(w, groups, lane, g, j):
    return bf16(w, (g * 16 + j // 2) * 32 + lane * 2 + j % 2)


@inlined
def weight_q4_0(w, groups, lane, g, j):
    return f16(w + groups * 256, g * 16 + lane) * F(nibble(w + g * 256, lane, j) - 8)


@inlined
def weight_q4_1(w, groups, lane, g, j):
    scales = w + groups * 256
    return f16(scales, g * 16 + lane) * F(nibble(w + g * 256, lane, j)) + f16(scales, (groups + g) * 16 + lane)


@inlined
def weight_q5_0(w, groups, lane, g, j):
    v = w + g * 320
    return f16(w + groups * 320, g * 16 + lane) * F((nibble(v, lane, j) | fifth_bit(v, lane, j)) - 16)


@inlined
def weight_q5_1(w, groups, lane, g, j):
    v, scales = w + g * 320, w + groups * 320
    q = F(nibble(v, lane, j) | fifth_bit(v, lane, j))
    return f16(scales, g * 16 + lane) * q + f16(scales, (groups + g) * 16 + lane)


@inlined
def weight_q8_0(w, groups, lane, g, j):
    return f16(w + groups * 512, g * 16 + lane) * F(u8(w, g * 512 + j // 4 * 64 + lane * 4 + j % 4) - 128)


@inlined
def k_affine(scales, groups, lane, g, q):
    factors = scales + groups * 32
    scale = F(u8(scales, g * 16 + lane)) * f16(factors, g // 8 * 16 + lane)
    minimum = F(u8(scales, (groups + g) * 16 + lane)) * f16(factors, (groups + g) // 8 * 16 + lane)
    return scale * F(q) + minimum


@inlined
def weight_q4_k(w, groups, lane, g, j):
    return k_affine(w + groups * 256, groups, lane, g, nibble(w + g * 256, lane, j))


@inlined
def weight_q5_k(w, groups, lane, g, j):
    v = w + g * 320
    return k_affine(w + groups * 320, groups, lane, g, nibble(v, lane, j) | fifth_bit(v, lane, j))


@inlined
def weight_q6_k(w, groups, lane, g, j):
    v, scales = w + g * 384, w + groups * 384
    high = u8(v, 256 + j // 16 * 64 + lane * 4 + j % 4) >> (j % 16 // 4 * 2) & 3
    scale = F(i8(scales, (2 * g + j // 16) * 16 + lane)) * f16(scales + groups * 32, g // 8 * 16 + lane)
    return scale * F((nibble(v, lane, j) | high << 4) - 32)


@inlined
def embed(tid, threads, rows, p, weight):
    """out[m] = scale * row ids[m] of the table."""
    out, table, block_bytes, padded = i64(p, 0), i64(p, 1), i64(p, 2), i64(p, 3)
    scale, ids = F(f64(p, 4)), i64(i64(p, 5), TOKEN_IDS)
    m0, m1 = share(rows, tid, threads)
    groups = padded // GROUP
    for m in range(m0, m1):
        token = i32(ids, m)
        block, lane, at = table + token // 16 * block_bytes, token % 16, m * padded
        for g in range(groups):
            for j in range(GROUP):
                set_f32(out, at + g * GROUP + j, weight(block, groups, lane, g, j) * scale)


FIELDS = "out table block_bytes padded scale batch"


@kernel(FIELDS)
def embed_bf16(tid, threads, rows, p):
    embed(tid, threads, rows, p, weight_bf16)


@kernel(FIELDS)
def embed_q4_0(tid, threads, rows, p):
    embed(tid, threads, rows, p, weight_q4_0)


@kernel(FIELDS)
def embed_q4_1(tid, threads, rows, p):
    embed(tid, threads, rows, p, weight_q4_1)


@kernel(FIELDS)
def embed_q5_0(tid, threads, rows, p):
    embed(tid, threads, rows, p, weight_q5_0)


@kernel(FIELDS)
def embed_q5_1(tid, threads, rows, p):
    embed(tid, threads, rows, p, weight_q5_1)


@kernel(FIELDS)
def embed_q8_0(tid, threads, rows, p):
    embed(tid, threads, rows, p, weight_q8_0)


@kernel(FIELDS)
def embed_q4_k(tid, threads, rows, p):
    embed(tid, threads, rows, p, weight_q4_k)


@kernel(FIELDS)
def embed_q5_k(tid, threads, rows, p):
    embed(tid, threads, rows, p, weight_q5_k)


@kernel(FIELDS)
def embed_q6_k(tid, threads, rows, p):
    embed(tid, threads, rows, p, weight_q6_k)


_EMBEDS = (embed_bf16, embed_q4_0, embed_q4_1, embed_q5_0, embed_q5_1, embed_q8_0, embed_q4_k, embed_q5_k, embed_q6_k)
EMBED: dict[str, Kernel] = {k.name.removeprefix("embed_"): k for k in _EMBEDS}
