"""Rotary positions, the norms of queries and keys before them, and writing keys and values into the cache."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from minserve.backend.numba_backend.jit import inlined, kernel
from minserve.backend.numba_backend.layout import BLOCK, POSITIONS, SLOTS
from minserve.backend.numba_backend.mathlib import rms_scale, share
from minserve.backend.numba_backend.simd_math import splat
from minserve.backend.numba_backend.simd_memory import (
    f32,
    f64,
    i32,
    i64,
    load_f32,
    set_f32,
    set_i32,
    set_u16,
    store_bf16,
    store_f32,
    u16,
    zero_bytes,
)


@inlined
def rotate(x, i, cos, sin, at, half):
    """Rotate the pairs (j, j + half) of the row at x[i] by the angles at `at` (Su et al. 2021)."""
    if half % 16 == 0:
        for j in range(0, half, 16):
            a, b, c, s = load_f32(x, i + j), load_f32(x, i + half + j), load_f32(cos, at + j), load_f32(sin, at + j)
            store_f32(x, i + j, a * c - b * s)
            store_f32(x, i + half + j, b * c + a * s)
    else:
        for j in range(half):
            u, v, k, z = f32(x, i + j), f32(x, i + half + j), f32(cos, at + j), f32(sin, at + j)
            set_f32(x, i + j, u * k - v * z)
            set_f32(x, i + half + j, v * k + u * z)


@inlined
def write_key(block, offset, x, i, dim, scratch):
    """K [dim/2][BLOCK][2]."""
    for j in range(0, dim, 16):
        store_bf16(scratch, j, load_f32(x, i + j))
    for d in range(dim // 2):
        set_i32(block, d * BLOCK + offset, i32(scratch, d))


@inlined
def write_value(block, offset, x, i, dim, scratch):
    """V [BLOCK/2][dim][2]."""
    for j in range(0, dim, 16):
        store_bf16(scratch, j, load_f32(x, i + j))
    for d in range(dim):
        set_u16(block, (offset // 2 * dim + d) * 2 + offset % 2, u16(scratch, d))


@inlined
def next_block(slots, m, rows):
    """The first row from m on that doesn't share a block of the cache with the row before it."""
    while 0 < m < rows and i32(slots, m) // BLOCK == i32(slots, m - 1) // BLOCK:
        m += 1
    return m


@kernel("qkv heads kv_heads dim stride cos sin half cache blocks batch q_norm k_norm eps scratch scratch_stride")
def rope_write_kv(tid, threads, rows, p):
    """In place on qkv. Threads share the heads of one row, as they shared the columns of the projection that made it;
    several rows they share by blocks of the cache, since keys and values are most of the work.

    The token in a block's first slot clears the rest of it: attention reads whole blocks and gives the hidden keys the
    weight 0, which a NaN left by the block's last owner would turn into NaN.
    """
    qkv, heads, kv_heads, dim, stride = i64(p, 0), i64(p, 1), i64(p, 2), i64(p, 3), i64(p, 4)
    cos, sin, half, cache, blocks, batch = i64(p, 5), i64(p, 6), i64(p, 7), i64(p, 8), i64(p, 9), i64(p, 10)
    q_norm, k_norm, eps, scratch = i64(p, 11), i64(p, 12), f64(p, 13), i64(p, 14) + tid * i64(p, 15)
    positions, slots = i64(batch, POSITIONS), i64(batch, SLOTS)
    h0, h1, m0, m1 = 0, heads + 2 * kv_heads, 0, rows
    if rows == 1:
        h0, h1 = share(h1, tid, threads)
    else:
        m0, m1 = share(rows, tid, threads)
        m0, m1 = next_block(slots, m0, rows), next_block(slots, m1, rows)
    for h in range(h0, h1):
        rotates = h < heads + kv_heads
        weight = q_norm if h < heads else (k_norm if rotates else 0)
        place = cache + ((h - heads) % kv_heads * 2 + (0 if rotates else 1)) * blocks * BLOCK * dim * 2
        for m in range(m0, m1):
            i = m * stride + h * dim
            if weight:
                s = splat(rms_scale(qkv, i, dim, dim, eps))
                for j in range(0, dim, 16):
                    store_f32(qkv, i + j, load_f32(qkv, i + j) * s * load_f32(weight, j))
            if rotates:
                rotate(qkv, i, cos, sin, i32(positions, m) * half, half)
            if h >= heads:
                slot = i32(slots, m)
                block, offset = place + slot // BLOCK * BLOCK * dim * 2, slot % BLOCK
                if offset == 0:
                    zero_bytes(block, BLOCK * dim * 2)
                if rotates:
                    write_key(block, offset, qkv, i, dim, scratch)
                else:
                    write_value(block, offset, qkv, i, dim, scratch)
