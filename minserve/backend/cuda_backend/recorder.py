"""Runs a model's forward pass once without computing anything, and keeps what it did.

Owns the recorded values and the checks of their shapes. It must not know kernels: lowering.py turns the recording into
launches.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from minserve.backend.base import Activation, Heads
from minserve.backend.cuda_backend.weights import Matrix, Rope


@dataclass(eq=False, slots=True)
class Value:
    """The result of an operation, one class each: [T, cols], or [S, cols] if sampled.

    It knows its inputs and not its users: cycles would keep weights and caches on the device until a full collection.
    """

    inputs: tuple[Value, ...]
    cols: int
    sampled: bool

    @property
    def residual(self) -> bool:
        """Whether this is the residual stream, which is kept in float32."""
        return isinstance(self, Embedded | Sum) or (isinstance(self, Taken) and self.inputs[0].residual)


@dataclass(eq=False, slots=True)
class Embedded(Value):
    table: Matrix
    scale: float


@dataclass(eq=False, slots=True)
class Normed(Value):
    weight: Any
    eps: float


@dataclass(eq=False, slots=True)
class Product(Value):
    weight: Matrix


@dataclass(eq=False, slots=True)
class Gated(Value):
    activation: Activation


@dataclass(eq=False, slots=True)
class Sum(Value):
    """Of the residual stream and a branch."""


@dataclass(eq=False, slots=True)
class Rotated(Value):
    """qkv, which it takes the place of."""

    heads: Heads
    rope: Rope
    cache: Any
    q_norm: Any
    k_norm: Any
    eps: float


@dataclass(eq=False, slots=True)
class Attended(Value):
    heads: Heads
    cache: Any


@dataclass(eq=False, slots=True)
class Taken(Value):
    """The rows whose logits are wanted."""


class Recorder:
    """The contract's Operations on Values. ValueError where a model's shapes don't fit.

    users: what takes each value as an input. Both are in the order of recording.
    """

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.users: defaultdict[Value, list[Value]] = defaultdict(list)

    def sole_user(self, value: Value) -> Value | None:
        users = self.users[value]
        return users[0] if len(users) == 1 else None

    def attention_heads(self) -> set[Heads]:
        """Of all layers; each kind once."""
        return {value.heads for value in self.values if isinstance(value, Attended)}

    def _record(self, value: Value) -> Value:
        for x in value.inputs:
            self.users[x].append(value)
        self.values.append(value)
        return value

    def embed(self, table: Matrix, batch: Any, scale: float = 1.0) -> Value:
        return self._record(Embedded((), table.k, False, table, scale))

    def rms_norm(self, x: Value, weight: Any, eps: float) -> Value:
        _require(weight.size == x.cols, f"a norm of {weight.size} on {x.cols} columns")
        return self._record(Normed((x,), x.cols, x.sampled, weight, eps))

    def linear(self, x: Value, weight: Matrix) -> Value:
        _require(weight.k == x.cols, f"a linear layer of {weight.k} inputs on {x.cols} columns")
        return self._record(Product((x,), weight.n, x.sampled, weight))

    def glu(self, x: Value, activation: Activation) -> Value:
        _require(x.cols % 2 == 0, f"glu on {x.cols} columns")
        return self._record(Gated((x,), x.cols // 2, x.sampled, activation))

    def add(self, residual: Value, branch: Value) -> Value:
        same = (residual.cols, residual.sampled) == (branch.cols, branch.sampled)
        _require(same, f"a sum of {residual.cols} and {branch.cols} columns")
        return self._record(Sum((residual, branch), residual.cols, residual.sampled))

    def rope_write_kv(
        self,
        qkv: Value,
        heads: Heads,
        rope: Rope,
        batch: Any,
        cache: Any,
        q_norm: Any = None,
        k_norm: Any = None,
        eps: float = 0.0,
    ) -> Value:
        _require(qkv.cols == heads.cols, f"rope_write_kv on {qkv.cols} columns, the heads have {heads.cols}")
        _require(not self.users[qkv], "rope_write_kv works in place, but its input is used elsewhere")
        return self._record(Rotated((qkv,), qkv.cols, qkv.sampled, heads, rope, cache, q_norm, k_norm, eps))

    def attention(self, q: Value, heads: Heads, batch: Any, cache: Any) -> Value:
        _require(isinstance(q, Rotated), f"attention needs what rope_write_kv returned, not {type(q).__name__}")
        return self._record(Attended((q,), heads.q * heads.dim, q.sampled, heads, cache))

    def take(self, x: Value, batch: Any) -> Value:
        return self._record(Taken((x,), x.cols, True))


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)
