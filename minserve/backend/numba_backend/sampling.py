"""Drawing a token from a row of logits without sorting it, in the team's threads.

Follows the steps of minserve/backend/sampling.py for rows with temperature, top_k, top_p and min_p; rows with
penalties, bias, a mask or log probabilities go through that module itself. The thresholds of top_k and top_p are found
by bisection over the bits of a float: non-negative floats are ordered as their bits are, so 31 halvings find the exact
one. What makes it cheap: the largest logit of each 64 is kept, and a pass looks only into parts that reach a threshold.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

import numpy as np

from minserve.backend.numba_backend.jit import helper, inlined, kernel
from minserve.backend.numba_backend.mathlib import F, share, vexp
from minserve.backend.numba_backend.simd_math import (
    bits_float,
    count_at_least,
    float_bits,
    hmax,
    hsum,
    keep_at_least,
    splat,
    unordered,
    vmax,
)
from minserve.backend.numba_backend.simd_memory import f32, i32, i64, load_f32, set_f32, set_i32, store_f32

SKIP, DRAW = 0, 1  # kinds of rows: not sampled here, or drawn
PART = 64  # logits per kept maximum
INFINITY = F(np.inf)


@inlined
def values(x, i, best, temperature):
    """16 logits, shifted and divided: step 4."""
    return (load_f32(x, i) - splat(best)) / splat(temperature)


@helper
def part_maxima(x, parts, maxima):
    """The largest of each PART logits; returns the largest of all, NaN if any logit is NaN."""
    bad = 0
    best = splat(-INFINITY)
    for j in range(parts):
        i = j * PART
        a, b, c, d = load_f32(x, i), load_f32(x, i + 16), load_f32(x, i + 32), load_f32(x, i + 48)
        bad |= unordered(a, b) | unordered(c, d)
        top = vmax(vmax(a, b), vmax(c, d))
        best = vmax(best, top)
        set_f32(maxima, j, hmax(top))
    return F(np.nan) if bad else hmax(best)


@helper
def lowest_index(x, parts, maxima, best):
    for j in range(parts):
        if f32(maxima, j) == best:
            for i in range(j * PART, (j + 1) * PART):
                if f32(x, i) == best:
                    return i
    return -1


@helper
def count_values(x, parts, maxima, best, temperature, low):
    """How many values are >= low."""
    n = 0
    for j in range(parts):
        if (f32(maxima, j) - best) / temperature >= low:
            for i in range(j * PART, (j + 1) * PART, 16):
                n += count_at_least(values(x, i, best, temperature), splat(low))
    return n


@inlined
def weights(x, i, best, temperature, low, least):
    """16 weights exp(value) where value >= low and weight >= least, else 0."""
    v = values(x, i, best, temperature)
    w = keep_at_least(vexp(v), v, splat(low))
    return keep_at_least(w, w, splat(least))


@helper
def sum_weights(x, parts, maxima, best, temperature, low, least):
    """In ascending order, float64."""
    total = 0.0
    for j in range(parts):
        if (f32(maxima, j) - best) / temperature >= low:
            for i in range(j * PART, (j + 1) * PART, 16):
                total += np.float64(hsum(weights(x, i, best, temperature, low, least)))
    return total


@helper
def invert(x, parts, maxima, best, temperature, low, least, stop, place):
    """The first index at which the ascending sum of weights exceeds stop; the last one kept if rounding hides it."""
    total, last = 0.0, 0
    for j in range(parts):
        if (f32(maxima, j) - best) / temperature >= low:
            for i in range(j * PART, (j + 1) * PART, 16):
                w = weights(x, i, best, temperature, low, least)
                step = np.float64(hsum(w))
                if step > 0.0:
                    store_f32(place, 0, w)
                    running = total
                    for k in range(16):
                        if f32(place, k) > F(0):
                            last = i + k
                            running += np.float64(f32(place, k))
                            if running > stop:
                                return last
                total += step
    return last


@helper
def kth_value(x, parts, maxima, best, temperature, k):
    """The k-th largest value, as minus the smallest float u >= 0 with at least k values >= -u."""
    low, high = -1, float_bits(F(0.25))  # -1: nothing is known to be too small
    while count_values(x, parts, maxima, best, temperature, -bits_float(high)) < k:
        low = high
        high = min(high + (2 << 23), float_bits(INFINITY))  # four times as far
    while high - low > 1:
        middle = (low + high) // 2
        if count_values(x, parts, maxima, best, temperature, -bits_float(middle)) < k:
            low = middle
        else:
            high = middle
    return -bits_float(high)


@helper
def nucleus(x, parts, maxima, best, temperature, low, top_p, vocab):
    """The largest weight t for which the weights >= t sum to at least top_p of all."""
    total = sum_weights(x, parts, maxima, best, temperature, low, F(0))
    enough = top_p * total
    # All below (1 - top_p) total / vocab together are less than what may go. Half of it: rounding.
    fits, fails = float_bits(F((1.0 - top_p) * total / vocab * 0.5)), float_bits(F(1)) + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        least = bits_float(middle)
        reach = max(low, F(np.log(np.float64(least))) - F(1e-3))  # values below it have smaller weights
        if sum_weights(x, parts, maxima, best, temperature, reach, least) >= enough:
            fits = middle
        else:
            fails = middle
    return bits_float(fits)


@helper
def draw(x, vocab, padded, temperature, top_k, top_p, min_p, uniform, scratch):
    """A token, or -1 if none can be drawn. scratch: 16 floats, then a maximum per part."""
    parts, maxima = padded // PART, scratch + 64
    for i in range(vocab, padded):
        set_f32(x, i, -INFINITY)
    best = part_maxima(x, parts, maxima)
    if not np.isfinite(best):
        return -1
    if temperature <= F(0):
        return lowest_index(x, parts, maxima, best)
    low, least = -INFINITY, min_p
    if 0 < top_k < vocab:
        low = kth_value(x, parts, maxima, best, temperature, top_k)
    if top_p < F(1):
        least = max(least, nucleus(x, parts, maxima, best, temperature, low, np.float64(top_p), vocab))
    total = sum_weights(x, parts, maxima, best, temperature, low, least)
    return invert(x, parts, maxima, best, temperature, low, least, np.float64(uniform) * total, scratch)


@kernel("logits vocab padded kinds temperature top_k top_p min_p uniforms tokens scratch scratch_stride")
def sample_rows(tid, threads, rows, p):
    """tokens[s] for rows whose kind isn't SKIP."""
    logits, vocab, padded, kinds, temperature, top_k = i64(p, 0), i64(p, 1), i64(p, 2), i64(p, 3), i64(p, 4), i64(p, 5)
    top_p, min_p, uniforms, tokens = i64(p, 6), i64(p, 7), i64(p, 8), i64(p, 9)
    scratch = i64(p, 10) + tid * i64(p, 11)
    first, last = share(rows, tid, threads)
    for s in range(first, last):
        if i32(kinds, s) != SKIP:
            knobs = f32(temperature, s), i32(top_k, s), f32(top_p, s), f32(min_p, s), f32(uniforms, s)
            t, k, nucleus, least, u = knobs
            set_i32(tokens, s, draw(logits + s * padded * 4, vocab, padded, t, k, nucleus, least, u, scratch))


def scratch_bytes(padded: int) -> int:
    """Scratch of one thread."""
    return (16 + padded // PART) * 4
