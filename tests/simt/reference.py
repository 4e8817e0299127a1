"""What the kernels should compute, in NumPy float64. Shapes as in minserve.backend.base."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]


def rms_norm(x: Float64, weight: npt.NDArray[Any], eps: float) -> Float64:
    result: Float64 = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return result


def activate(x: Float64, activation: str) -> Float64:
    with np.errstate(over="ignore"):
        if activation == "silu":
            return np.asarray(x / (1 + np.exp(-x)))
        return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


def glu(x: Float64, activation: str) -> Float64:
    gate, up = np.split(x, 2, -1)
    return activate(gate, activation) * up


def rotate(x: Float64, cos: Float64, sin: Float64) -> Float64:
    """x [T, heads, D]; cos and sin [T, half] of each token."""
    half = cos.shape[-1]
    c, s = cos[:, None], sin[:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * c - b * s, b * c + a * s, rest], -1)


def softmax(x: Float64) -> Float64:
    e = np.exp(x - x.max(-1, keepdims=True))
    result: Float64 = e / e.sum(-1, keepdims=True)
    return result


def attention(
    q: Float64, k: Float64, v: Float64, scale: float, window: int | None = None, softcap: float | None = None
) -> Float64:
    """q [n, H, D] are the last n of the keys' positions; k, v [context, KV, D]."""
    n, heads, _ = q.shape
    context, kv_heads, _ = k.shape
    k, v = (np.repeat(x, heads // kv_heads, axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    distance = np.arange(context - n, context)[:, None] - np.arange(context)[None]
    visible = (distance >= 0) & (distance < (window or context + 1))
    result: Float64 = np.einsum("hqk,khd->qhd", softmax(np.where(visible, scores, -np.inf)), v)
    return result


def gather(cache: npt.NDArray[Any], table: npt.NDArray[np.int32], context: int) -> tuple[Float64, Float64]:
    """K and V [context, KV, D] of a request out of the cache [blocks, KV, 2, block size, D]."""
    pages = cache[table].astype(np.float64)  # [n, KV, 2, block size, D]
    rows = pages.transpose(2, 0, 3, 1, 4).reshape(2, -1, cache.shape[1], cache.shape[4])
    return rows[0, :context], rows[1, :context]
