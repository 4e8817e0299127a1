"""Every operation of a forward pass in NumPy, float32: the specification that the other backends are compared with.

Owns what the operations of base.py mean. It must not know which model calls them, nor when. Clear code comes first;
speed is what matrix products in BLAS give. Batch mates never meet in a sum, so a request's result does not depend on
them but for the rounding of differently shaped products (about 1e-7).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minserve.backend.base import Activation, Heads
from minserve.batch import Batch, Float32, Int32

QUERY_TILE = 128  # query rows whose scores are held at once: bounds memory at [heads, 128, context]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer or an embedding table: dense [N, K], bias [N] or None."""

    dense: Float32
    bias: Float32 | None = None


@dataclass(frozen=True, slots=True)
class Rope:
    """cos and sin by position, [max_len, rotated dimensions / 2]."""

    cos: Float32
    sin: Float32


@dataclass(frozen=True, slots=True)
class LayerCache:
    """k and v [num_blocks, block_size, kv_heads, head_dim]."""

    k: Float32
    v: Float32


class NumpyOperations:
    """The contract's operations on plain arrays. A BatchView is the Batch itself."""

    def embed(self, table: Matrix, batch: Batch, scale: float = 1.0) -> Float32:
        rows: Float32 = table.dense[batch.token_ids]
        return rows * np.float32(scale)

    def rms_norm(self, x: Float32, weight: Float32, eps: float) -> Float32:
        variance = np.mean(x * x, axis=-1, keepdims=True)
        normed: Float32 = x / np.sqrt(variance + np.float32(eps))
        return normed * weight

    def linear(self, x: Float32, weight: Matrix) -> Float32:
        y = x @ weight.dense.T
        return y if weight.bias is None else y + weight.bias

    def glu(self, x: Float32, activation: Activation) -> Float32:
        gate, up = np.split(x, 2, axis=-1)
        activated = silu(gate) if activation == "silu" else gelu(gate)
        return activated * up

    def add(self, residual: Float32, branch: Float32) -> Float32:
        return residual + branch

    def rope_write_kv(
        self,
        qkv: Float32,
        heads: Heads,
        rope: Rope,
        batch: Batch,
        cache: LayerCache,
        q_norm: Float32 | None = None,
        k_norm: Float32 | None = None,
        eps: float = 0.0,
    ) -> Float32:
        x = qkv.reshape(len(qkv), -1, heads.dim)  # [T, H + 2 KV, D]
        q, k, v = np.split(x, [heads.q, heads.q + heads.kv], axis=1)
        if q_norm is not None:
            q = self.rms_norm(q, q_norm, eps)
        if k_norm is not None:
            k = self.rms_norm(k, k_norm, eps)
        cos, sin = rope.cos[batch.positions, None], rope.sin[batch.positions, None]  # [T, 1, r / 2]
        cache.k.reshape(-1, heads.kv, heads.dim)[batch.slots] = rotate(k, cos, sin)
        cache.v.reshape(-1, heads.kv, heads.dim)[batch.slots] = v
        return rotate(q, cos, sin).reshape(len(qkv), -1)  # [T, H * D]

    def attention(self, q: Float32, heads: Heads, batch: Batch, cache: LayerCache) -> Float32:
        out = np.empty((len(q), heads.q * heads.dim), np.float32)
        for r, table in enumerate(batch.block_tables):
            start, stop = batch.query_starts[r : r + 2]
            for first in range(start, stop, QUERY_TILE):
                rows = slice(first, min(first + QUERY_TILE, stop))
                out[rows] = attend(q[rows], batch.positions[rows], table, heads, cache)
        return out

    def take(self, x: Float32, batch: Batch) -> Float32:
        return x[batch.logit_rows]


def silu(x: Float32) -> Float32:
    """x * sigmoid(x)."""
    with np.errstate(over="ignore"):  # exp of a large -x: x / inf = 0 is right
        y: Float32 = x / (1 + np.exp(-x))
    return y


def gelu(x: Float32) -> Float32:
    """Hendrycks and Gimpel's (2016) tanh approximation."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)
    y: Float32 = np.float32(0.5) * x * (1 + np.tanh(inner))
    return y


def rotate(x: Float32, cos: Float32, sin: Float32) -> Float32:
    """Rotate the pairs (i, i + r/2) of the last axis's first r dimensions; the rest stays. x [T, heads, D]."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def attend(q: Float32, positions: Int32, table: Int32, heads: Heads, cache: LayerCache) -> Float32:
    """Attention of some tokens of one request: q [t, H * D] at `positions` over its blocks -> [t, H * D]."""
    t, group, block_size = len(q), heads.q // heads.kv, cache.k.shape[1]
    end = int(positions[-1]) + 1
    first_block = 0 if heads.window is None else max(0, int(positions[0]) + 1 - heads.window) // block_size
    blocks = table[first_block : -(-end // block_size)]
    key_positions = np.arange(first_block * block_size, end)
    n = len(key_positions)
    k = cache.k[blocks].reshape(-1, heads.kv, heads.dim)[:n].transpose(1, 2, 0)  # [KV, D, n]
    v = cache.v[blocks].reshape(-1, heads.kv, heads.dim)[:n].transpose(1, 0, 2)  # [KV, n, D]

    q = q.reshape(t, heads.kv, group, heads.dim).transpose(1, 2, 0, 3).reshape(heads.kv, group * t, heads.dim)
    scores = ((q @ k) * np.float32(heads.scale)).reshape(heads.kv, group, t, n)
    if heads.softcap is not None:
        scores = np.float32(heads.softcap) * np.tanh(scores / np.float32(heads.softcap))
    distance = positions[:, None] - key_positions  # [t, n]
    visible = distance >= 0 if heads.window is None else (distance >= 0) & (distance < heads.window)
    weights = np.where(visible, scores, np.float32(-np.inf))
    weights -= weights.max(axis=-1, keepdims=True)
    np.exp(weights, out=weights)
    weights /= weights.sum(axis=-1, keepdims=True)
    out: Float32 = weights.reshape(heads.kv, group * t, n) @ v  # [KV, group * t, D]
    return out.reshape(heads.kv, group, t, heads.dim).transpose(2, 0, 1, 3).reshape(t, -1)
