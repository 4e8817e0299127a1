"""Runs a model's forward pass once without computing anything, and keeps what it did.

Owns the recorded values and the checks of their shapes. It must not know kernels: lowering.py turns the recording into
launches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minserve.backend.base import Activation, Heads
from minserve.backend.cuda_backend.weights import Matrix, Rope


@dataclass(eq=False, slots=True)
class Value:
    """The result of one operation: [T, cols], or [S, cols] if sampled.

    It knows its inputs and not its users: cycles would keep weights and caches on the device until a full collection.
    """

    op: str
    inputs: tuple[Value, ...]
    cols: int
    sampled: bool
    attributes: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.attributes[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def residual(self) -> bool:
        """Whether this is the residual stream, which is kept in float32."""
        return self.op in ("embed", "add") or (self.op == "take" and self.inputs[0].residual)


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
        return {value.heads for value in self.values if value.op == "attention"}

    def _record(
        self, op: str, inputs: tuple[Value, ...], cols: int, *, sampled: bool = False, **attributes: Any
    ) -> Value:
        value = Value(op, inputs, cols, sampled or any(x.sampled for x in inputs), attributes)
        for x in inputs:
            self.users[x].append(value)
        self.values.append(value)
        return value

    def embed(self, table: Matrix, batch: Any, scale: float = 1.0) -> Value:
        return self._record("embed", (), table.k, table=table, scale=scale)

    def rms_norm(self, x: Value, weight: Any, eps: float) -> Value:
        _require(weight.size == x.cols, f"a norm of {weight.size} on {x.cols} columns")
        return self._record("rms_norm", (x,), x.cols, weight=weight, eps=eps)

    def linear(self, x: Value, weight: Matrix) -> Value:
        _require(weight.k == x.cols, f"a linear layer of {weight.k} inputs on {x.cols} columns")
        return self._record("linear", (x,), weight.n, weight=weight)

    def glu(self, x: Value, activation: Activation) -> Value:
        _require(x.cols % 2 == 0, f"glu on {x.cols} columns")
        return self._record("glu", (x,), x.cols // 2, activation=activation)

    def add(self, residual: Value, branch: Value) -> Value:
        same = (residual.cols, residual.sampled) == (branch.cols, branch.sampled)
        _require(same, f"a sum of {residual.cols} and {branch.cols} columns")
        return self._record("add", (residual, branch), residual.cols)

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
        norms = {"q_norm": q_norm, "k_norm": k_norm, "eps": eps}
        return self._record("rope_write_kv", (qkv,), qkv.cols, heads=heads, rope=rope, cache=cache, **norms)

    def attention(self, q: Value, heads: Heads, batch: Any, cache: Any) -> Value:
        _require(q.op == "rope_write_kv", f"attention needs what rope_write_kv returned, not {q.op}")
        return self._record("attention", (q,), heads.q * heads.dim, heads=heads, cache=cache)

    def take(self, x: Value, batch: Any) -> Value:
        return self._record("take", (x,), x.cols, sampled=True)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)
