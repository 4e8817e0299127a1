"""What each operation but attention launches: the grids, the arguments and the choice between kernels.

Owns one class per instruction of a lowered forward pass; calling it with a Step launches its kernels on the current
stream. Everything an instruction needs is fixed when it is made, so that a call can be captured. It must not know the
model, nor how buffers were assigned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from minserve.backend.base import Activation, Heads
from minserve.backend.cuda_backend.blas import Blas, Output
from minserve.backend.cuda_backend.kernels import Kernels, cdiv, f32, i32
from minserve.backend.cuda_backend.step import Step
from minserve.backend.cuda_backend.weights import LAYOUTS, Matrix, Rope

Instruction = Callable[[Step], None]

# Rows up to which a product runs in skinny_gemm.cu instead of cuBLAS, by weight format. Dense: cuBLAS is as good from
# about 8 rows on. Quantized: cuBLAS needs dequantized weights, 8 times the traffic of Int4.
SKINNY_ROWS = {"Dense": 8} | dict.fromkeys(LAYOUTS, 16)
SLAB_BYTES = 16 << 20  # dequantized weights at a time: cuBLAS then finds them in the L2 cache
ACTIVATIONS = {None: "kNone", "silu": "kSilu", "gelu": "kGelu"}


@dataclass(frozen=True, slots=True)
class Machine:
    """What instructions are made for. compute: half or bf16. sms: multiprocessors. slab: SLAB_BYTES of that type."""

    cp: Any
    kernels: Kernels
    blas: Blas
    compute: str
    sms: int
    block_size: int
    max_model_len: int
    slab: Any


@dataclass(slots=True, eq=False)
class Buffer:
    """An activation of `cols` numbers a row, of type half, bf16 or float. `array` is set when memory is assigned."""

    type: str
    cols: int
    sampled: bool  # S rows instead of T
    array: Any = None

    def rows(self, step: Step) -> int:
        return step.shape.rows if self.sampled else step.shape.tokens


class Embed:
    def __init__(self, m: Machine, out: Buffer, table: Matrix, scale: float) -> None:
        self._kernel = m.kernels.get("embed", "embed", m.compute, table.format)
        self._out, self._table, self._scale = out, table, f32(scale)

    def __call__(self, step: Step) -> None:
        t = self._table
        source = t.data, t.scales, t.minima, step.inputs["token_ids"]
        self._kernel((step.shape.tokens,), 128, self._out.array, *source, i32(t.k), self._scale)


class Take:
    def __init__(self, m: Machine, out: Buffer, x: Buffer) -> None:
        self._kernel = m.kernels.get("embed", "take", x.type)
        self._out, self._x = out, x

    def __call__(self, step: Step) -> None:
        rows = step.inputs["logit_rows"]
        self._kernel((step.shape.rows,), 128, self._out.array, self._x.array, rows, i32(self._x.cols))


class Cast:
    def __init__(self, m: Machine, out: Buffer, x: Buffer) -> None:
        self._kernel = m.kernels.get("add", "cast", out.type)
        self._out, self._x = out, x

    def __call__(self, step: Step) -> None:
        n = self._out.rows(step) * self._out.cols
        self._kernel((cdiv(n, 8 * 256),), 256, self._out.array, self._x.array, np.int64(n))


class Add:
    """out = residual + branch; out may be the residual."""

    def __init__(self, m: Machine, out: Buffer, residual: Buffer, branch: Buffer) -> None:
        self._kernel = m.kernels.get("add", "add", residual.type, branch.type)
        self._out, self._residual, self._branch = out, residual, branch

    def __call__(self, step: Step) -> None:
        n = self._out.rows(step) * self._out.cols
        arrays = self._out.array, self._residual.array, self._branch.array
        self._kernel((cdiv(n, 8 * 256),), 256, *arrays, np.int64(n))


@dataclass(frozen=True, slots=True)
class NormWeight:
    """Of an RMSNorm: float32 weight [cols] and epsilon."""

    weight: Any
    eps: float


class Norm:
    """out = norm(x), or of x + branch, or of x + post(branch); x keeps the sum, unless only sampled rows are wanted."""

    def __init__(
        self,
        m: Machine,
        out: Buffer,
        x: Buffer,
        norm: NormWeight,
        branch: Buffer | None = None,
        post: NormWeight | None = None,
    ) -> None:
        self._shared = 4 * x.cols
        parameters = m.compute, x.type, 256, branch is not None, post is not None
        self._kernel = m.kernels.get("rms_norm", "rms_norm", *parameters, shared=self._shared)
        self._out, self._x, self._branch, self._norm = out, x, branch, norm
        self._post = post or NormWeight(None, 0.0)
        self._gather = out.sampled and not x.sampled

    def __call__(self, step: Step) -> None:
        branch = None if self._branch is None else self._branch.array
        rows = step.inputs["logit_rows"] if self._gather else None
        weights = self._post.weight, self._norm.weight, rows
        scalars = i32(self._x.cols), f32(self._norm.eps), f32(self._post.eps)
        arrays = self._out.array, self._x.array, branch
        self._kernel((self._out.rows(step),), 256, *arrays, *weights, *scalars, shared=self._shared)


class Linear:
    """out = x @ weight.T; with an activation out = act(gate) * up of the weight's two halves, `wide` holding both."""

    def __init__(
        self,
        m: Machine,
        out: Buffer,
        x: Buffer,
        weight: Matrix,
        activation: Activation | None = None,
        wide: Buffer | None = None,
    ) -> None:
        self._m, self._out, self._x, self._weight, self._wide = m, out, x, weight, wide
        self._columns = 8 if activation else 16
        self._skinny = {}
        for tiles in range(1, SKINNY_ROWS[weight.format] // 8 + 1):
            parameters = m.compute, out.type, weight.format, tiles, ACTIVATIONS[activation]
            self._skinny[tiles] = m.kernels.get("skinny_gemm", "skinny_gemm", *parameters)
        self._glu = Glu(m, out, wide, activation) if wide is not None and activation is not None else None
        if weight.format != "Dense":
            self._dequantize = m.kernels.get("dequantize", "dequantize", m.compute, weight.format)

    def __call__(self, step: Step) -> None:
        rows, w = self._out.rows(step), self._weight
        if rows > SKINNY_ROWS[w.format]:
            self._large(step, rows)
            return
        kernel = self._skinny[cdiv(rows, 8)]
        grid = (cdiv(self._out.cols, self._columns),)
        source = self._x.array, w.data, w.scales, w.minima
        kernel(grid, 256, self._out.array, *source, i32(rows), i32(self._out.cols), i32(w.k))

    def _large(self, step: Step, rows: int) -> None:
        """cuBLAS, for a quantized weight in slabs that are dequantized first."""
        m, w, target = self._m, self._weight, self._wide or self._out
        slab = w.n if w.format == "Dense" else slab_rows(w.k)
        for first in range(0, w.n, slab):
            n = min(slab, w.n - first)
            dense = w.data
            if w.format != "Dense":
                dense = m.slab
                packed = w.data, w.scales, w.minima
                self._dequantize((cdiv(n * w.k, 8 * 256),), 256, dense, *packed, i32(first), i32(n), i32(w.k))
            out = Output(target.array, target.type, w.n, first)
            m.blas.linear(out, self._x.array, dense, rows, n, w.k, m.compute)
        if self._glu is not None:
            self._glu(step)


def slab_rows(k: int) -> int:
    """Rows of k weights that are dequantized at a time: if possible as many as make cuBLAS begin at 128 bytes of the
    result, since it has slower kernels for what is not aligned."""
    rows = SLAB_BYTES // (2 * k)
    return rows - rows % 64 or rows


class AddBias:
    def __init__(self, m: Machine, x: Buffer, bias: Any) -> None:
        self._kernel = m.kernels.get("add", "add_bias", x.type)
        self._x, self._bias = x, bias

    def __call__(self, step: Step) -> None:
        n = self._x.rows(step) * self._x.cols
        self._kernel((cdiv(n, 256),), 256, self._x.array, self._bias, i32(self._x.cols), np.int64(n))


class Glu:
    def __init__(self, m: Machine, out: Buffer, x: Buffer, activation: Activation) -> None:
        self._kernel = m.kernels.get("glu", "glu", m.compute, activation == "gelu")
        self._out, self._x = out, x

    def __call__(self, step: Step) -> None:
        rows, width = self._out.rows(step), self._out.cols
        grid = (cdiv(rows * width, 8 * 256),)
        self._kernel(grid, 256, self._out.array, self._x.array, i32(rows), i32(width))


class RopeKV:
    """Bias, per-head norms and rotation of qkv in place; keys and values into the cache."""

    def __init__(
        self,
        m: Machine,
        qkv: Buffer,
        heads: Heads,
        rope: Rope,
        cache: Any,
        *,
        bias: Any = None,
        q_norm: Any = None,
        k_norm: Any = None,
        eps: float = 0.0,
    ) -> None:
        self._kernel = m.kernels.get("rope_kv", "rope_kv", m.compute, heads.dim, m.block_size)
        self._qkv, self._heads, self._rope, self._cache = qkv, heads, rope, cache
        self._weights = bias, q_norm, k_norm
        self._eps = f32(eps)

    def __call__(self, step: Step) -> None:
        h, rope = self._heads, self._rope
        grid = (step.shape.tokens, cdiv(h.q + 2 * h.kv, 4))
        tables = rope.cos, rope.sin, step.inputs["positions"], step.inputs["slots"]
        sizes = i32(h.q), i32(h.kv), i32(rope.half)
        self._kernel(grid, 128, self._qkv.array, self._cache, *self._weights, *tables, *sizes, self._eps)
