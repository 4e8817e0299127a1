"""How many prompt tokens a step may carry while somebody decodes, so that a step stays near the ITL target.

Pure: no clock, fed with measured step times. A mixed step costs what its decodes cost and something per prompt token;
both are learnt, and how far off the prediction tends to be. Owns those numbers and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_WEIGHT = 0.2  # of a new measurement in the running means
_DEARER = 2.0  # how much more a prompt token may take in a small chunk than in a large one
_MARGIN = 1.0  # mean errors of the prediction that a step stays below the target (Jacobson 1988, for timeouts)


@dataclass(slots=True)
class StepCost:
    """What a step takes, in seconds. quantum: fewer prompt tokens than these say nothing of what one costs."""

    quantum: int
    base: float = 0.0
    per_token: float = 0.0

    def observe(self, decode_tokens: int, prefill_tokens: int, seconds: float, base: float | None = None) -> None:
        """Learn from one finished step. base: what its decodes alone take, if known better than their mean."""
        if prefill_tokens == 0:
            self.base = _mean(self.base, seconds)
        elif prefill_tokens >= self.quantum:
            base = self.base if base is None else base
            rest = max(seconds - base, seconds * 0.1) if decode_tokens else seconds
            self.per_token = _mean(self.per_token, rest / prefill_tokens)


@dataclass(slots=True)
class DecodeCost:
    """Seconds of a step that only decodes, a line over the number of requests in it.

    Least squares with exponential forgetting. While that number hardly varies, the slope tends to the one through 0.
    """

    count: float = 0.0
    seconds: float = 0.0
    _square: float = 0.0  # running means of count * count and of count * seconds
    _product: float = 0.0

    def observe(self, count: int, seconds: float) -> None:
        weight = _WEIGHT if self.count else 1.0
        for name, value in (
            ("count", count),
            ("seconds", seconds),
            ("_square", count * count),
            ("_product", count * seconds),
        ):
            old = getattr(self, name)
            setattr(self, name, old + weight * (value - old))

    @property
    def slope(self) -> float:
        """Seconds of one more decode."""
        if not self.count:
            return 0.0
        variance = max(0.0, self._square - self.count**2)
        return max(0.0, (self._product - self.count * self.seconds + self.seconds / self.count) / (variance + 1.0))

    def knows(self, count: int) -> bool:
        """Whether steps with about so many were seen lately."""
        return bool(self.count) and abs(count - self.count) <= 2 + 2 * max(0.0, self._square - self.count**2) ** 0.5

    def predict(self, count: int) -> float:
        return max(0.0, self.seconds + self.slope * (count - self.count))


@dataclass(slots=True)
class Pace:
    """target: seconds a step should take. quantum: the fewest prompt tokens of a step, ceiling: the most."""

    target: float
    quantum: int
    ceiling: int
    cost: StepCost = field(init=False)
    decodes: DecodeCost = field(default_factory=DecodeCost)
    error: float = 0.0  # mean distance of steps from their prediction, seconds
    mixed: bool = False  # whether a step with decodes and prompt tokens has been seen

    def __post_init__(self) -> None:
        self.cost = StepCost(self.quantum)

    def observe(self, decode_tokens: int, prefill_tokens: int, seconds: float) -> None:
        """Learn from one finished step."""
        base, prompts = self.decodes.predict(decode_tokens), prefill_tokens * self.cost.per_token
        if prefill_tokens == 0:
            self.decodes.observe(decode_tokens, seconds)
        elif decode_tokens == 0:  # uncapped: tokens are cheaper by the hundred than in the chunks of mixed steps
            if not self.mixed:
                self.cost.observe(0, prefill_tokens, _DEARER * seconds)
        elif prompts and not self.decodes.knows(decode_tokens):
            self.decodes.observe(decode_tokens, max(0.0, seconds - prompts))  # says more of these than of prompts
        else:
            if base and prompts:
                self.error += _WEIGHT * (abs(seconds - base - prompts) - self.error)
            self.cost.observe(decode_tokens, prefill_tokens, seconds, base)
            self.mixed = True

    def chunk_tokens(self, decodes: int) -> int:
        """Prompt tokens for a step in which so many requests decode; at least one quantum, so that prompts advance."""
        per_token = self.cost.per_token
        if per_token == 0.0:
            return min(self.ceiling, max(self.quantum, self.ceiling // 4))
        room = (self.target - self.decodes.predict(decodes) - _MARGIN * self.error) / per_token
        return min(self.ceiling, max(self.quantum, int(room)))

    @property
    def decode_worth(self) -> float:
        """Prompt tokens that take as long as one decode; at least 1."""
        return max(1.0, self.decodes.slope / self.cost.per_token) if self.cost.per_token else 1.0


def _mean(old: float, new: float) -> float:
    return new if old == 0.0 else old + _WEIGHT * (new - old)
