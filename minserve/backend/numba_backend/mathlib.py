"""Small functions on vectors and rows that several kernels share."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

import numpy as np

from minserve.backend.numba_backend.jit import helper, inlined
from minserve.backend.numba_backend.simd_math import fma, hsum, splat, times_power, vmax, vmin, vround, where_below
from minserve.backend.numba_backend.simd_memory import load_f32

F = np.float32


@inlined
def vexp(x):
    """exp of 16 floats, relative error about 2e-7 (Cephes' polynomial). Below -87 it is exactly 0, and no power
    underflows for that: on an Intel this would take as long as fifty of these steps."""
    given, least = x, splat(F(-87.0))
    x = vmax(vmin(x, splat(F(88.0))), least)
    n = vround(x * splat(F(1.44269504)))
    r = fma(n, splat(F(-0.693359375)), x)  # ln 2 in two parts, the first one exact in n * ln 2
    r = fma(n, splat(F(2.12194440e-4)), r)
    p = fma(r, splat(F(1.9875691500e-4)), splat(F(1.3981999507e-3)))
    p = fma(p, r, splat(F(8.3334519073e-3)))
    p = fma(p, r, splat(F(4.1665795894e-2)))
    p = fma(p, r, splat(F(1.6666665459e-1)))
    p = fma(p, r, splat(F(5.0000001201e-1)))
    return where_below(given, least, splat(F(0.0)), times_power(fma(p * r, r, r) + splat(F(1.0)), n))


@inlined
def vexp2(x):
    """2^x of 16 floats that are at most 0, relative error about 2e-7 (Cephes). Below -126 it is exactly 0; no power
    underflows, as in vexp."""
    least = splat(F(-126.0))
    bounded = vmax(x, least)
    n = vround(bounded)
    f = bounded - n
    p = fma(f, splat(F(1.535336188319500e-4)), splat(F(1.339887440266574e-3)))
    p = fma(p, f, splat(F(9.618437357674640e-3)))
    p = fma(p, f, splat(F(5.550332471162809e-2)))
    p = fma(p, f, splat(F(2.402264791363012e-1)))
    p = fma(p, f, splat(F(6.931472028550421e-1)))
    return where_below(x, least, splat(F(0.0)), times_power(fma(p, f, splat(F(1.0))), n))


@inlined
def vtanh(x):
    """tanh of 16 floats: 1 - 2 / (exp(2x) + 1)."""
    return splat(F(1.0)) - splat(F(2.0)) / (vexp(x + x) + splat(F(1.0)))


@inlined
def activate(kind, g):
    """kind 1: silu, g * sigmoid(g). kind 2: gelu, g * sigmoid(2t) with t = sqrt(2/pi) (g + 0.044715 g^3)."""
    t = g
    if kind == 2:
        t = g * splat(F(1.5957691216)) * fma(g * g, splat(F(0.044715)), splat(F(1.0)))
    return g / (splat(F(1.0)) + vexp(splat(F(0.0)) - t))


@helper
def rms_scale(x, i, padded, cols, eps):
    """1 / sqrt(mean(x^2) + eps) of the row at x[i]; columns from cols to padded (a multiple of 16) are zeros."""
    a, b = splat(F(0)), splat(F(0))
    j = 0
    while j + 32 <= padded:
        u, v = load_f32(x, i + j), load_f32(x, i + j + 16)
        a, b = fma(u, u, a), fma(v, v, b)
        j += 32
    if j < padded:
        u = load_f32(x, i + j)
        a = fma(u, u, a)
    return F(1.0 / np.sqrt(np.float64(hsum(a + b)) / cols + eps))


@inlined
def share(n, tid, threads):
    """This thread's part of 0..n. The first threads get what is left over: of heads, the last are the keys and values,
    which are more work."""
    return -(-n * tid // threads), -(-n * (tid + 1) // threads)


@inlined
def row_share(rows, tid, threads):
    """As share, but a single row is everybody's: each thread then works for itself, which spares a barrier."""
    if rows == 1:
        return 0, 1
    return share(rows, tid, threads)
