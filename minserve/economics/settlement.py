"""How a call ended, in the ledger's terms.

Owns the step from the engine's outcomes (one per choice) to what is billed (one per call).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import msgspec

from minserve.request import FinishReason, RequestOutcome

# The worst end of any choice names the call's end.
_WORST = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP)


class Settlement(msgspec.Struct, frozen=True, kw_only=True):
    """finish: how it ended. status: what the client was told, 499 if it had gone. Tokens: really processed."""

    finish: str
    status: int
    code: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_ms: float | None = None
    ttft_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None

    @classmethod
    def of(
        cls, outcomes: Sequence[RequestOutcome], *, status: int, code: str = "", computed: int | None = None
    ) -> Settlement:
        """What a call's choices used together. A prompt is billed once, with the choice that leads its group.

        computed: prompt tokens that were processed over all prompts, where that is known better: a call that ended
        before its first token may have read some of its prompt.
        """
        leaders = [outcome for outcome in outcomes if outcome.id.endswith("#0") and read_prompt(outcome)]
        prompt = sum(outcome.usage.prompt for outcome in leaders) if computed is None else computed
        gaps = sorted(chain.from_iterable(outcome.gaps for outcome in outcomes))
        ttfts = [outcome.ttft for outcome in outcomes if outcome.ttft is not None]
        ends = {outcome.finish for outcome in outcomes}
        errors = [outcome.error_code for outcome in outcomes if outcome.error_code]
        return cls(
            finish=next((end.value for end in _WORST if end in ends), FinishReason.ABORT.value),
            status=status,
            code=code or (errors[0] if errors else ""),
            prompt_tokens=prompt,
            cached_tokens=min(prompt, sum(outcome.usage.cached for outcome in leaders)),
            completion_tokens=sum(outcome.usage.completion for outcome in outcomes),
            queue_ms=_ms(max(outcome.queue for outcome in outcomes)) if outcomes else None,
            ttft_ms=_ms(min(ttfts)) if ttfts else None,
            itl_p50_ms=_ms(rank(gaps, 0.5)) if gaps else None,
            itl_p99_ms=_ms(rank(gaps, 0.99)) if gaps else None,
        )

    def columns(self) -> dict[str, object]:
        """The row's columns that an end decides."""
        return msgspec.structs.asdict(self)


def read_prompt(outcome: RequestOutcome) -> bool:
    """Whether all of the prompt was processed: a token came, or none was wanted and that is how it ended."""
    return outcome.ttft is not None or outcome.finish in (FinishReason.STOP, FinishReason.LENGTH)


def rank(ordered: Sequence[float], q: float) -> float:
    """The nearest-rank quantile of sorted numbers, at least one: the least that a share q does not exceed."""
    return ordered[max(0, -int(-q * len(ordered) // 1) - 1)]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
