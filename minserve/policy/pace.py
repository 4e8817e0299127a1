"""How many prompt tokens a step may carry while somebody decodes, so that a step stays near the ITL target.

Pure: no clock, fed with measured step times. A mixed step costs about `base + per_token * prompt tokens`; both are
learnt as running means. Owns those two numbers and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_WEIGHT = 0.2  # of a new measurement in the running means


@dataclass(slots=True)
class StepCost:
    """What a step takes, in seconds. quantum: fewer prompt tokens than these say nothing of what one costs."""

    quantum: int
    base: float = 0.0
    per_token: float = 0.0

    def observe(self, decode_tokens: int, prefill_tokens: int, seconds: float) -> None:
        """Learn from one finished step."""
        if prefill_tokens == 0:
            self.base = _mean(self.base, seconds)
        elif prefill_tokens >= self.quantum:
            base = self.base if decode_tokens else 0.0
            self.per_token = _mean(self.per_token, max(seconds - base, seconds * 0.1) / prefill_tokens)


@dataclass(slots=True)
class Pace:
    """target: seconds a step should take. Token counts are multiples of `quantum` between it and `ceiling`."""

    target: float
    quantum: int
    ceiling: int
    cost: StepCost = field(init=False)

    def __post_init__(self) -> None:
        self.cost = StepCost(self.quantum)

    def observe(self, decode_tokens: int, prefill_tokens: int, seconds: float) -> None:
        """Learn from one finished step."""
        self.cost.observe(decode_tokens, prefill_tokens, seconds)

    def chunk_tokens(self) -> int:
        """Prompt tokens for the next step in which somebody decodes; at least one quantum, so that prompts advance."""
        cost = self.cost
        if cost.per_token == 0.0:
            return min(self.ceiling, max(self.quantum, self.ceiling // 4))
        room = int((self.target - cost.base) / cost.per_token) // self.quantum * self.quantum
        return min(self.ceiling, max(self.quantum, room))


def _mean(old: float, new: float) -> float:
    return new if old == 0.0 else old + _WEIGHT * (new - old)
