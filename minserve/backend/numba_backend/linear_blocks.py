"""One block of 16 rows of packed weights, in each format, against a tile of n tokens: acc[m][16] += w . x[m].

Owns what differs between formats: where scales and minima come from, and how far ahead weights are fetched. It must not
know activation modes (`dots`, from linear_groups.py, does) or what becomes of the sums (linear.py).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from minserve.backend.numba_backend.dot import bf16_tile
from minserve.backend.numba_backend.jit import inlined
from minserve.backend.numba_backend.linear_groups import affine, symmetric
from minserve.backend.numba_backend.simd_memory import load_bytes, load_f16, load_signed, load_u8, prefetch
from minserve.backend.numba_backend.tile import tile_store, zeros_f32
from minserve.backend.numba_backend.unpack import five_bits, group_at, k_group_at, nibbles, six_bits, whole_bytes

AHEAD = 6400  # bytes; from 1 to 16 KB hardly different
FEW, FEW_BF16 = 2, 4  # tokens up to which memory is what limits: fetching ahead then costs more than it saves


@inlined
def parts(x, groups, mode, n):
    """Addresses of q, d, s, p and p of the half groups in a tile of activations."""
    d = x + groups * n * mode
    step = groups * n * 4
    return x, d, d + step, d + 2 * step, d + 3 * step


@inlined
def fetch_ahead(w, g, n, nbytes):
    """Weights go by once a tile, and the processor's own prefetching is late for the first level of its caches. nbytes:
    of a group."""
    if n > FEW:
        for i in range(0, nbytes, 64):
            prefetch(w + g * nbytes + AHEAD + i)


@inlined
def block_q4_0(dots, mode, w, groups, n, x, acc):
    q, d, _, p, _ = parts(x, groups, mode, n)
    for g in range(groups):
        fetch_ahead(w, g, n, 288)
        v, s = group_at(w, g, 256, 32)
        i = g * n
        symmetric(dots, nibbles(v), load_f16(s, 0), 3, 0, n, q + i * mode, d + i * 4, p + i * 4, 0, acc)


@inlined
def block_q4_1(dots, mode, w, groups, n, x, acc):
    q, d, sums, _, _ = parts(x, groups, mode, n)
    for g in range(groups):
        fetch_ahead(w, g, n, 320)
        v, s = group_at(w, g, 256, 64)
        scale, minimum, i = load_f16(s, 0), load_f16(s, 16), g * n
        affine(dots, nibbles(v), scale, minimum, n, q + i * mode, d + i * 4, sums + i * 4, acc)


@inlined
def block_q5_0(dots, mode, w, groups, n, x, acc):
    q, d, _, p, _ = parts(x, groups, mode, n)
    for g in range(groups):
        fetch_ahead(w, g, n, 352)
        v, s = group_at(w, g, 320, 32)
        i = g * n
        symmetric(dots, five_bits(v), load_f16(s, 0), 4, 0, n, q + i * mode, d + i * 4, p + i * 4, 0, acc)


@inlined
def block_q5_1(dots, mode, w, groups, n, x, acc):
    q, d, sums, _, _ = parts(x, groups, mode, n)
    for g in range(groups):
        fetch_ahead(w, g, n, 384)
        v, s = group_at(w, g, 320, 64)
        scale, minimum, i = load_f16(s, 0), load_f16(s, 16), g * n
        affine(dots, five_bits(v), scale, minimum, n, q + i * mode, d + i * 4, sums + i * 4, acc)


@inlined
def block_q8_0(dots, mode, w, groups, n, x, acc):
    q, d, _, p, _ = parts(x, groups, mode, n)
    for g in range(groups):
        fetch_ahead(w, g, n, 544)
        v, s = group_at(w, g, 512, 32)
        i = g * n
        symmetric(dots, whole_bytes(v), load_f16(s, 0), 7, 0, n, q + i * mode, d + i * 4, p + i * 4, 0, acc)


@inlined
def block_q4_k(dots, mode, w, groups, n, x, acc):
    q, d, sums, _, _ = parts(x, groups, mode, n)
    for g in range(groups):
        fetch_ahead(w, g, n, 288)
        v, s, f = k_group_at(w, g, 256)
        scale, minimum = load_bytes(s, 0) * load_f16(f, 0), load_bytes(s, 16) * load_f16(f, 16)
        i = g * n
        affine(dots, nibbles(v), scale, minimum, n, q + i * mode, d + i * 4, sums + i * 4, acc)


@inlined
def block_q5_k(dots, mode, w, groups, n, x, acc):
    q, d, sums, _, _ = parts(x, groups, mode, n)
    for g in range(groups):
        fetch_ahead(w, g, n, 352)
        v, s, f = k_group_at(w, g, 320)
        scale, minimum = load_bytes(s, 0) * load_f16(f, 0), load_bytes(s, 16) * load_f16(f, 16)
        i = g * n
        affine(dots, five_bits(v), scale, minimum, n, q + i * mode, d + i * 4, sums + i * 4, acc)


@inlined
def block_q6_k(dots, mode, w, groups, n, x, acc):
    """Groups of 16: two scales per 32 k, whose dot products stay apart."""
    q, d, _, p, half = parts(x, groups, mode, n)
    for g in range(groups):
        fetch_ahead(w, g, n, 416)
        w6, s, f = k_group_at(w, g, 384)
        v, factor = nibbles(w6), load_f16(f, 0)
        scale, i = load_signed(s, 0) * factor, g * n * 4
        qg, dg = q + g * n * mode, d + i
        w16 = six_bits(v[0], v[1], v[2], v[3], load_u8(w6, 256))
        symmetric(dots, w16, scale, 5, 0, n, qg, dg, half + i, 0, acc)
        scale, w16 = load_signed(s, 16) * factor, six_bits(v[4], v[5], v[6], v[7], load_u8(w6, 320))
        symmetric(dots, w16, scale, 5, 16, n, qg, dg, p + i, half + i, acc)


@inlined
def block_bf16(dots, mode, w, groups, n, x, acc):
    """Tokens in tiles of 16, 8, 4, 2 and 1, whose sums stay in registers. x: [K/2][n][2] bfloat16."""
    m = 0
    while m + 16 <= n:
        tile_store(bf16_dots(w, groups * 16, x + m * 4, n * 4, zeros_f32(16)), acc, m * 16, 16)
        m += 16
    if m + 8 <= n:
        tile_store(bf16_dots(w, groups * 16, x + m * 4, n * 4, zeros_f32(8)), acc, m * 16, 16)
        m += 8
    if m + 4 <= n:
        tile_store(bf16_dots(w, groups * 16, x + m * 4, n * 4, zeros_f32(4)), acc, m * 16, 16)
        m += 4
    if m + 2 <= n:
        tile_store(bf16_dots(w, groups * 16, x + m * 4, n * 4, zeros_f32(2)), acc, m * 16, 16)
        m += 2
    if m < n:
        tile_store(bf16_dots(w, groups * 16, x + m * 4, n * 4, zeros_f32(1)), acc, m * 16, 16)


@inlined
def bf16_dots(w, pairs, x, step, tile):
    for k in range(pairs):
        if len(tile) > FEW_BF16:
            prefetch(w + k * 64 + AHEAD)
        tile = bf16_tile(tile, load_u8(w, k * 64), x, k * step, 1)
    return tile


BLOCKS = {  # of integers, by format
    "q4_0": block_q4_0,
    "q4_1": block_q4_1,
    "q5_0": block_q5_0,
    "q5_1": block_q5_1,
    "q8_0": block_q8_0,
    "q4_k": block_q4_k,
    "q5_k": block_q5_k,
    "q6_k": block_q6_k,
}
