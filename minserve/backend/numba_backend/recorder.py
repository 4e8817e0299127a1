"""Recording a forward pass: each operation leaves a Value that knows its inputs, its row count and its columns.

Owns the symbolic graph. It must not know kernels or memory (lower.py does). Shapes are checked here, once; nothing is
computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from minserve.backend.base import Activation, BackendError, BatchView, Heads
from minserve.backend.numba_backend.layout import BLOCK, S_ROWS, T_ROWS, block_words
from minserve.backend.numba_backend.packing import Matrix

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """cos and sin by position, [max_len, half] contiguous; half = rotated dimensions / 2."""

    cos: Float32
    sin: Float32

    @property
    def half(self) -> int:
        return int(self.cos.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """One layer's KV cache: words [runs, kv heads, 2 (K, V), blocks of a run, block words], bfloat16 bits."""

    words: npt.NDArray[np.uint16]

    @property
    def blocks(self) -> int:
        """Of a run: from a head's keys to its values."""
        return int(self.words.shape[3])


@dataclass(slots=True, eq=False)
class Value:
    """A float array [rows, cols]: rows is T_ROWS or S_ROWS, known only when a step runs."""

    op: str
    inputs: tuple[Value, ...]
    rows: int
    cols: int
    attrs: dict[str, Any]
    users: list[Value] = field(default_factory=list)

    def __post_init__(self) -> None:
        for value in self.inputs:
            value.users.append(self)


def require(condition: bool, what: str) -> None:
    """A model file broke the contract."""
    if not condition:
        raise BackendError(what)


class Recorder:
    """The contract's operations. A model's forward pass called with it leaves the graph of its result."""

    def embed(self, table: Matrix, batch: BatchView, scale: float = 1.0) -> Value:
        return Value("embed", (), T_ROWS, table.cols, {"table": table, "scale": scale})

    def rms_norm(self, x: Value, weight: Float32, eps: float) -> Value:
        require(weight.size >= x.cols, f"norm of {weight.size} weights on {x.cols} columns")
        return Value("norm", (x,), x.rows, x.cols, {"weight": weight, "eps": eps})

    def linear(self, x: Value, weight: Matrix) -> Value:
        require(weight.cols == x.cols, f"{weight.name} takes {weight.cols} columns, got {x.cols}")
        rows = weight.rows * 2 if weight.pairs else weight.rows
        return Value("linear", (x,), x.rows, rows, {"weight": weight})

    def glu(self, x: Value, activation: Activation) -> Value:
        return Value("glu", (x,), x.rows, x.cols // 2, {"activation": activation})

    def add(self, residual: Value, branch: Value) -> Value:
        same = (residual.rows, residual.cols) == (branch.rows, branch.cols)
        require(same, f"add of {residual.cols} and {branch.cols} columns")
        return Value("add", (residual, branch), residual.rows, residual.cols, {})

    def rope_write_kv(
        self,
        qkv: Value,
        heads: Heads,
        rope: Rope,
        batch: BatchView,
        cache: LayerCache,
        q_norm: Float32 | None = None,
        k_norm: Float32 | None = None,
        eps: float = 0.0,
    ) -> Value:
        require(qkv.cols == heads.cols, f"rope on {qkv.cols} columns, the heads need {heads.cols}")
        require(not qkv.users and qkv.rows == T_ROWS, "rope_write_kv works in place, on the rows of the step")
        require(heads.dim % BLOCK == 0, f"head dimension {heads.dim} is not a multiple of {BLOCK}")
        require(cache.words.shape[1::3] == (heads.kv, block_words(heads.dim)), "the cache is laid out for other heads")
        attrs = {"heads": heads, "rope": rope, "cache": cache, "q_norm": q_norm, "k_norm": k_norm, "eps": eps}
        return Value("rope", (qkv,), qkv.rows, qkv.cols, attrs)

    def attention(self, q: Value, heads: Heads, batch: BatchView, cache: LayerCache) -> Value:
        require(q.op == "rope", "attention takes what rope_write_kv returned")
        return Value("attention", (q,), q.rows, heads.q * heads.dim, {"heads": heads, "cache": cache})

    def take(self, x: Value, batch: BatchView) -> Value:
        require(x.rows == T_ROWS, "take applies to the rows of the step")
        return Value("take", (x,), S_ROWS, x.cols, {})


def in_order(out: Value) -> list[Value]:
    """Every value that out needs, inputs before users: the order of recording."""
    order: list[Value] = []
    seen = {out}
    stack = [(out, iter(out.inputs))]
    while stack:
        value, inputs = stack[-1]
        for needed in inputs:
            if needed not in seen:
                seen.add(needed)
                stack.append((needed, iter(needed.inputs)))
                break
        else:
            order.append(value)
            stack.pop()
    return order


ROW_WISE = ("add", "glu", "linear", "norm")  # a row of the result depends on the same row of the inputs


def sink_takes(out: Value) -> list[Value]:
    """The values of `in_order(out)`, with every take moved as far towards the inputs as it can go.

    After the last attention only the rows whose logits are wanted matter: the rest of that layer is then computed for
    those alone, and not at all in a step that samples nothing. A value can follow the take if all its users do.
    """
    moved: dict[Value, Value] = {}

    def follow(value: Value, movable: set[Value]) -> Value:
        if value not in moved:
            if value in movable:
                inputs = tuple(follow(needed, movable) for needed in value.inputs)
                moved[value] = Value(value.op, inputs, S_ROWS, value.cols, value.attrs)
            else:
                moved[value] = Value("take", (value,), S_ROWS, value.cols, {})
        return moved[value]

    for take in [value for value in in_order(out) if value.op == "take"]:
        (source,) = take.inputs
        movable: set[Value] = set()
        for value in reversed(in_order(source)):
            if value.op in ROW_WISE and all(user is take or user in movable for user in value.users):
                movable.add(value)
        sunk = follow(source, movable)
        for user in take.users:
            user.inputs = tuple(sunk if needed is take else needed for needed in user.inputs)
    order = in_order(out)
    for value in order:
        value.users = []
    for value in order:
        for needed in value.inputs:
            needed.users.append(value)
    return order
