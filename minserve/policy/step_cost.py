"""What steps cost, learnt from those that have finished: the decodes in them, and each prompt token beside these.

Pure: no clock, fed with measured step times. It must not know what the numbers are for: `pace.py` sizes the next step
by them, `forecast.py` says when a queue will have moved.
"""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = 0.2  # of a new measurement in the running means


def learn(mean: float, new: float) -> float:
    """The running mean after one more measurement; 0 is none yet."""
    return mean + (WEIGHT if mean else 1.0) * (new - mean)


def prompt_token_cost(seconds: float, decodes: float, tokens: int) -> float:
    """Seconds of a prompt token in a step with so many, whose decodes should have taken `decodes`.

    However wrong that is, a tenth of the step went to the prompts.
    """
    return max(seconds - decodes, seconds * 0.1) / tokens


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
        weight = WEIGHT if self.count else 1.0
        self.count += weight * (count - self.count)
        self.seconds += weight * (seconds - self.seconds)
        self._square += weight * (count * count - self._square)
        self._product += weight * (count * seconds - self._product)

    @property
    def _variance(self) -> float:
        return max(0.0, self._square - self.count**2)

    @property
    def slope(self) -> float:
        """Seconds of one more decode."""
        if not self.count:
            return 0.0
        covariance = self._product - self.count * self.seconds
        return max(0.0, (covariance + self.seconds / self.count) / (self._variance + 1.0))

    def knows(self, count: int) -> bool:
        """Whether steps with about so many were seen lately."""
        return bool(self.count) and abs(count - self.count) <= 2 + 2 * self._variance**0.5

    def predict(self, count: int) -> float:
        return max(0.0, self.seconds + self.slope * (count - self.count))


@dataclass(slots=True)
class StepCost:
    """Seconds of a mean step: a base and something for each prompt token in it.

    quantum: fewer prompt tokens than these say nothing of what one costs.
    """

    quantum: int
    base: float = 0.0
    per_token: float = 0.0

    def observe(self, decode_tokens: int, prefill_tokens: int, seconds: float) -> None:
        """Learn from one finished step."""
        if prefill_tokens == 0:
            self.base = learn(self.base, seconds)
        elif prefill_tokens >= self.quantum:
            base = self.base if decode_tokens else 0.0
            self.per_token = learn(self.per_token, prompt_token_cost(seconds, base, prefill_tokens))
