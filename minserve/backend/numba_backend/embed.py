"""Looking up embeddings in packed weights, one number at a time.

Owns the kernel, once per format. It must not know how linear layers read the same weights, 16 rows at once.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, name-defined"

from __future__ import annotations

from minserve.backend.numba_backend.jit import Kernel, inlined, variant
from minserve.backend.numba_backend.layout import GROUP, TOKEN_IDS
from minserve.backend.numba_backend.mathlib import F, share
from minserve.backend.numba_backend.simd_memory import bf16, f16, f64, i8, i32, i64, set_f32, u8
from minserve.backend.numba_backend.unpack import group_at, k_group_at

# -- one weight of row `lane` of a row block: k = 32 g + j


@inlined
def nibble(w, lane, j):
    byte = u8(w, j % 16 // 4 * 64 + lane * 4 + j % 4)
    return byte >> 4 if j >= 16 else byte & 15


@inlined
def fifth_bit(w, lane, j):
    return (u8(w, 256 + lane * 4 + j % 4) >> (j // 4) & 1) << 4


@inlined
def weight_bf16(w, lane, g, j):
    return bf16(w, (g * 16 + j // 2) * 32 + lane * 2 + j % 2)


@inlined
def weight_q4_0(w, lane, g, j):
    v, s = group_at(w, g, 256, 32)
    return f16(s, lane) * F(nibble(v, lane, j) - 8)


@inlined
def weight_q4_1(w, lane, g, j):
    v, s = group_at(w, g, 256, 64)
    return f16(s, lane) * F(nibble(v, lane, j)) + f16(s, 16 + lane)


@inlined
def weight_q5_0(w, lane, g, j):
    v, s = group_at(w, g, 320, 32)
    return f16(s, lane) * F((nibble(v, lane, j) | fifth_bit(v, lane, j)) - 16)


@inlined
def weight_q5_1(w, lane, g, j):
    v, s = group_at(w, g, 320, 64)
    return f16(s, lane) * F(nibble(v, lane, j) | fifth_bit(v, lane, j)) + f16(s, 16 + lane)


@inlined
def weight_q8_0(w, lane, g, j):
    v, s = group_at(w, g, 512, 32)
    return f16(s, lane) * F(u8(v, j // 4 * 64 + lane * 4 + j % 4) - 128)


@inlined
def k_affine(s, factors, lane, q):
    scale, minimum = F(u8(s, lane)) * f16(factors, lane), F(u8(s, 16 + lane)) * f16(factors, 16 + lane)
    return scale * F(q) + minimum


@inlined
def weight_q4_k(w, lane, g, j):
    v, s, factors = k_group_at(w, g, 256)
    return k_affine(s, factors, lane, nibble(v, lane, j))


@inlined
def weight_q5_k(w, lane, g, j):
    v, s, factors = k_group_at(w, g, 320)
    return k_affine(s, factors, lane, nibble(v, lane, j) | fifth_bit(v, lane, j))


@inlined
def weight_q6_k(w, lane, g, j):
    v, s, factors = k_group_at(w, g, 384)
    high = u8(v, 256 + j // 16 * 64 + lane * 4 + j % 4) >> (j % 16 // 4 * 2) & 3
    return F(i8(s, j // 16 * 16 + lane)) * f16(factors, lane) * F((nibble(v, lane, j) | high << 4) - 32)


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
                set_f32(out, at + g * GROUP + j, weight(block, lane, g, j) * scale)


FIELDS = "out table block_bytes padded scale batch"


def _embed(tid, threads, rows, p):
    embed(tid, threads, rows, p, WEIGHT)  # noqa: F821  (bound by variant)


_WEIGHTS = {
    "bf16": weight_bf16,
    "q4_0": weight_q4_0,
    "q4_1": weight_q4_1,
    "q5_0": weight_q5_0,
    "q5_1": weight_q5_1,
    "q8_0": weight_q8_0,
    "q4_k": weight_q4_k,
    "q5_k": weight_q5_k,
    "q6_k": weight_q6_k,
}
EMBED: dict[str, Kernel] = {
    form: variant(_embed, FIELDS, f"embed_{form}", WEIGHT=weight) for form, weight in _WEIGHTS.items()
}
