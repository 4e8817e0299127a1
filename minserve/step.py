"""One step on its way through plan, run and commit, and the record that it leaves.

Owns nothing but its own times. It must not know the engine, nor who observes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minserve.batch import Batch
from minserve.request import Pool, StepPlan, StepRecord
from minserve.scheduler import Counts
from minserve.transcript import Transcript


@dataclass(slots=True)
class Step:
    """What was planned, its arrays, and how long each part took (seconds)."""

    plan: StepPlan
    batch: Batch
    started: float
    plan_s: float
    build_s: float
    run_s: float = 0.0
    ttfts: list[tuple[Pool, float]] = field(default_factory=list)
    gaps: list[tuple[Pool, float]] = field(default_factory=list)

    @property
    def decode_tokens(self) -> int:
        """Sampled chunks of one token; everything else counts as prefill."""
        return sum(1 for chunk in self.plan.chunks if chunk.count == 1 and chunk.samples)

    @property
    def prefill_tokens(self) -> int:
        return self.plan.tokens - self.decode_tokens

    def note_token(self, transcript: Transcript) -> None:
        time, pool = transcript.time, transcript.request.pool
        if time.gaps:
            self.gaps.append((pool, time.gaps[-1]))
        elif time.first is not None:
            self.ttfts.append((pool, time.first - time.arrival))

    def record(
        self,
        before: Counts,
        counts: Counts,
        *,
        ideal: float = 0.0,
        commit: float = 0.0,
        deliver: float = 0.0,
        failed: str | None = None,
    ) -> StepRecord:
        return StepRecord(
            step=self.plan.step,
            started=self.started,
            plan=self.plan_s,
            build=self.build_s,
            run=self.run_s,
            commit=commit,
            deliver=deliver,
            ideal=ideal,
            decode_tokens=self.decode_tokens,
            prefill_tokens=self.prefill_tokens,
            running=counts.running,
            waiting=counts.waiting,
            waits=self.plan.waits,
            preempted=len(self.plan.preempted),
            blocks_total=counts.blocks_total,
            blocks_free=counts.blocks_free,
            blocks_cached=counts.blocks_cached,
            prefix_queries=counts.prefix_queries - before.prefix_queries,
            prefix_hits=counts.prefix_hits - before.prefix_hits,
            ttfts=tuple(self.ttfts),
            gaps=tuple(self.gaps),
            failed=failed,
        )
