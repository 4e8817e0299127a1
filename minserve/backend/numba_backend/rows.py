"""From float rows to float rows: what is not fused into a neighbour.

Owns the kernels norm, add, glu and take. A row of the result depends on one row of each input.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from minserve.backend.numba_backend.jit import kernel
from minserve.backend.numba_backend.mathlib import activate, rms_scale, share
from minserve.backend.numba_backend.simd_math import splat
from minserve.backend.numba_backend.simd_memory import f64, i32, i64, load_f32, store_f32, zero_bytes


@kernel("out x padded cols weight eps residual gather")
def norm(tid, threads, rows, p):
    """out[m] = norm(x[gather[m]]) * weight + residual[m]; residual 0: none."""
    out, x, padded, cols = i64(p, 0), i64(p, 1), i64(p, 2), i64(p, 3)
    weight, eps, residual, gather = i64(p, 4), f64(p, 5), i64(p, 6), i64(p, 7)
    m0, m1 = share(rows, tid, threads)
    for m in range(m0, m1):
        i = (i32(gather, m) if gather else m) * padded
        s = splat(rms_scale(x, i, padded, cols, eps))
        for j in range(0, padded, 16):
            v = load_f32(x, i + j) * s * load_f32(weight, j)
            if residual:
                v = v + load_f32(residual, m * padded + j)
            store_f32(out, m * padded + j, v)


@kernel("out a b padded")
def add(tid, threads, rows, p):
    out, a, b, padded = i64(p, 0), i64(p, 1), i64(p, 2), i64(p, 3)
    m0, m1 = share(rows, tid, threads)
    for j in range(m0 * padded, m1 * padded, 16):
        store_f32(out, j, load_f32(a, j) + load_f32(b, j))


@kernel("out x cols stride padded kind")
def glu(tid, threads, rows, p):
    """out[m] = act(gate) * up, x = gate | up of `cols` columns each; for gate and up of different encodings."""
    out, x, cols, stride, padded, kind = i64(p, 0), i64(p, 1), i64(p, 2), i64(p, 3), i64(p, 4), i64(p, 5)
    m0, m1 = share(rows, tid, threads)
    for m in range(m0, m1):
        for j in range(0, cols, 16):
            gate, up = load_f32(x, m * stride + j), load_f32(x, m * stride + cols + j)
            store_f32(out, m * padded + j, activate(kind, gate) * up)
        zero_bytes(out + (m * padded + cols) * 4, (padded - cols) * 4)


@kernel("out x padded gather")
def take(tid, threads, rows, p):
    """out[m] = x[gather[m]]."""
    out, x, padded, gather = i64(p, 0), i64(p, 1), i64(p, 2), i64(p, 3)
    m0, m1 = share(rows, tid, threads)
    for m in range(m0, m1):
        i = i32(gather, m) * padded
        for j in range(0, padded, 16):
            store_f32(out, m * padded + j, load_f32(x, i + j))
