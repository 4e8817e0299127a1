"""How many prompt tokens a step may carry while somebody decodes, so that a step stays near the ITL target.

Pure: no clock, fed with measured step times. A mixed step costs what its decodes cost and something per prompt token;
both are learnt (`step_cost.py`), and how far off the prediction tends to be. Owns those numbers and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minserve.policy.step_cost import WEIGHT, DecodeCost, learn, prompt_token_cost

_DEARER = 2.0  # how much more a prompt token may take in a small chunk than in a large one
_MARGIN = 1.0  # mean errors of the prediction that a step stays below the target (Jacobson 1988, for timeouts)


@dataclass(slots=True)
class Pace:
    """target: seconds a step should take. quantum: the fewest prompt tokens of a step, ceiling: the most."""

    target: float
    quantum: int
    ceiling: int
    decodes: DecodeCost = field(default_factory=DecodeCost)
    per_token: float = 0.0  # seconds of a prompt token beside decodes; 0: unknown
    error: float = 0.0  # mean distance of steps from their prediction, seconds
    mixed: bool = False  # whether a step with decodes and prompt tokens has taught per_token

    def observe(self, decode_tokens: int, prefill_tokens: int, seconds: float) -> None:
        """Learn from one finished step. Fewer prompt tokens than a quantum say nothing of what one costs."""
        if prefill_tokens == 0:
            self.decodes.observe(decode_tokens, seconds)
        elif decode_tokens == 0:  # uncapped: tokens are cheaper by the hundred than in the chunks of mixed steps
            if not self.mixed and prefill_tokens >= self.quantum:
                self.per_token = learn(self.per_token, _DEARER * seconds / prefill_tokens)
        else:
            self._observe_mixed(decode_tokens, prefill_tokens, seconds)

    def _observe_mixed(self, decode_tokens: int, prefill_tokens: int, seconds: float) -> None:
        base, prompts = self.decodes.predict(decode_tokens), prefill_tokens * self.per_token
        if prompts and not self.decodes.knows(decode_tokens):
            self.decodes.observe(decode_tokens, max(0.0, seconds - prompts))  # says more of these than of prompts
            return
        if base and prompts:
            self.error += WEIGHT * (abs(seconds - base - prompts) - self.error)
        if prefill_tokens >= self.quantum:
            self.per_token = learn(self.per_token, prompt_token_cost(seconds, base, prefill_tokens))
            self.mixed = True

    def chunk_tokens(self, decodes: int) -> int:
        """Prompt tokens for a step in which so many requests decode; at least one quantum, so that prompts advance."""
        if self.per_token == 0.0:
            return min(self.ceiling, max(self.quantum, self.ceiling // 4))
        room = (self.target - self.decodes.predict(decodes) - _MARGIN * self.error) / self.per_token
        return min(self.ceiling, max(self.quantum, int(room)))

    @property
    def decode_worth(self) -> float:
        """Prompt tokens that take as long as one decode; at least 1, in tenths."""
        return max(1.0, round(self.decodes.slope / self.per_token, 1)) if self.per_token else 1.0
