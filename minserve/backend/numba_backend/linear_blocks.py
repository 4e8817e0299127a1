"""One block of 16 rows of packed weights, in each format, against a tile of n tokens: acc[m][16] += w . x[m].

Owns which formats there are, what differs between them, and how far ahead weights are fetched. It must not know the
arithmetic (linear_groups.py) or what becomes of the sums (linear.py). Functions for integers are templates for `bound`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, name-defined"
# ruff: noqa: F821  (names in capitals are bound by `bound`)

from __future__ import annotations

from typing import Any

from minserve.backend.numba_backend.dot import bf16_tile
from minserve.backend.numba_backend.jit import bound, inlined, is_zen
from minserve.backend.numba_backend.linear_groups import DOTS_BY_MODE, affine, symmetric
from minserve.backend.numba_backend.simd_memory import load_u8, prefetch
from minserve.backend.numba_backend.tile import tile_store, zeros_f32
from minserve.backend.numba_backend.unpack import q4_0, q4_1, q4_k, q5_0, q5_1, q5_k, q6_k, q8_0

# How far weights are fetched ahead, in bytes, and beside more than how many tokens. Up to FEW, memory is what limits a
# Zen 4, and fetching ahead costs more than it saves; an Intel's own prefetching stops at every page of 4 KB.
AHEAD, FEW, FEW_BF16 = (6400, 2, 4) if is_zen() else (10240, 0, 0)


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


def affine_block(w, groups, n, x, acc):
    """Formats with minima."""
    q, d, sums, _, _ = parts(x, groups, MODE, n)
    for g in range(groups):
        fetch_ahead(w, g, n, NBYTES)
        v, scale, minimum = GROUP(w, g)
        i = g * n
        affine(DOTS, v, scale, minimum, n, q + i * MODE, d + i * 4, sums + i * 4, acc)


def symmetric_block(w, groups, n, x, acc):
    q, d, _, p, _ = parts(x, groups, MODE, n)
    for g in range(groups):
        fetch_ahead(w, g, n, NBYTES)
        v, scale = GROUP(w, g)
        i = g * n
        symmetric(DOTS, v, scale, SHIFT, 0, n, q + i * MODE, d + i * 4, p + i * 4, 0, acc)


def halves_block(w, groups, n, x, acc):
    """Groups of 16: two scales per 32 k, whose dot products stay apart."""
    q, d, _, p, half = parts(x, groups, MODE, n)
    for g in range(groups):
        fetch_ahead(w, g, n, NBYTES)
        v, scale, v2, scale2 = GROUP(w, g)
        i = g * n * 4
        qg, dg = q + g * n * MODE, d + i
        symmetric(DOTS, v, scale, SHIFT, 0, n, qg, dg, half + i, 0, acc)
        symmetric(DOTS, v2, scale2, SHIFT, 16, n, qg, dg, p + i, half + i, acc)


@inlined
def bf16_block(w, groups, n, x, acc):
    """Tokens in tiles of 16, 8, 4, 2 and 1, whose sums stay in registers. x: [K/32][n][32] bfloat16."""
    m = 0
    while m + 16 <= n:
        tile_store(bf16_dots(w, groups, n, x + m * 64, zeros_f32(16)), acc, m * 16, 16)
        m += 16
    if m + 8 <= n:
        tile_store(bf16_dots(w, groups, n, x + m * 64, zeros_f32(8)), acc, m * 16, 16)
        m += 8
    if m + 4 <= n:
        tile_store(bf16_dots(w, groups, n, x + m * 64, zeros_f32(4)), acc, m * 16, 16)
        m += 4
    if m + 2 <= n:
        tile_store(bf16_dots(w, groups, n, x + m * 64, zeros_f32(2)), acc, m * 16, 16)
        m += 2
    if m < n:
        tile_store(bf16_dots(w, groups, n, x + m * 64, zeros_f32(1)), acc, m * 16, 16)


@inlined
def bf16_dots(w, groups, n, x, tile):
    for _ in range(groups):
        for k in range(16):
            if len(tile) > FEW_BF16:
                prefetch(w + k * 64 + AHEAD)
            tile = bf16_tile(tile, load_u8(w, k * 64), x, k * 4, 16)
        w += 16 * 64
        x += n * 64
    return tile


KINDS = {"affine": affine_block, "symmetric": symmetric_block, "halves": halves_block}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {  # of integers: the kind, how a group is read, its bytes, its offset
    "q4_0": ("symmetric", {"GROUP": q4_0, "NBYTES": 288, "SHIFT": 3}),
    "q4_1": ("affine", {"GROUP": q4_1, "NBYTES": 320}),
    "q5_0": ("symmetric", {"GROUP": q5_0, "NBYTES": 352, "SHIFT": 4}),
    "q5_1": ("affine", {"GROUP": q5_1, "NBYTES": 384}),
    "q8_0": ("symmetric", {"GROUP": q8_0, "NBYTES": 544, "SHIFT": 7}),
    "q4_k": ("affine", {"GROUP": q4_k, "NBYTES": 288}),
    "q5_k": ("affine", {"GROUP": q5_k, "NBYTES": 352}),
    "q6_k": ("halves", {"GROUP": q6_k, "NBYTES": 416, "SHIFT": 5}),
}


def vector_block(form: str, mode: int) -> Any:
    """The block for weights of a format and activations of a mode."""
    kind, bindings = FORMS[form]
    return bound(KINDS[kind], MODE=mode, DOTS=DOTS_BY_MODE[mode][1], **bindings)
