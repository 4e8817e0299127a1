"""Runs a step's arrays on a program and gives the rows back to the chunks they belong to.

Owns nothing but the program. Called on the worker thread only. It must not know requests: a plan and a batch are all
it sees, both immutable.
"""

from __future__ import annotations

from collections.abc import Sequence

from minserve.backend.base import ModelSpec, Peaks, Program
from minserve.batch import Batch, ChunkResult, StepResult
from minserve.request import Chunk, StepPlan, TokenLogprob


class Runner:
    """`run` is what happens between plan and commit: upload, forward pass, sampling, download."""

    def __init__(self, program: Program, spec: ModelSpec, peaks: Peaks, kv_bytes_per_token: float) -> None:
        self.program = program
        self.spec = spec
        self.peaks = peaks
        self._kv_bytes_per_token = kv_bytes_per_token

    def run(self, plan: StepPlan, batch: Batch) -> StepResult:
        sampled = self.program.run(batch)
        tokens, results, row = sampled.tokens.tolist(), [], 0
        for chunk in plan.chunks:
            results.append(_chunk_result(chunk, tokens, sampled.logprobs, row))
            row += chunk.scored + chunk.samples + len(chunk.forks)
        return StepResult(tuple(results))

    def ideal_seconds(self, batch: Batch) -> float:
        """Time this step's traffic or arithmetic would take at the measured peaks, whichever is longer.

        Bytes: every weight once, every cached row of the step's requests once. FLOPs: the linear layers and the head.
        """
        rows = float(batch.context_lens.sum())
        nbytes = self.spec.weight_bytes + rows * self._kv_bytes_per_token
        flops = batch.num_tokens * self.spec.flops_per_token + batch.num_rows * self.spec.head_flops
        return max(nbytes / self.peaks.bandwidth, flops / self.peaks.flops)

    def close(self) -> None:
        self.program.close()


def _chunk_result(
    chunk: Chunk, tokens: Sequence[int], logprobs: tuple[TokenLogprob | None, ...], row: int
) -> ChunkResult:
    first = row + chunk.scored
    last = first + chunk.samples
    accepted = _accept(chunk.draft, tokens[first:last])
    forks = slice(last, last + len(chunk.forks))
    return ChunkResult(
        tokens=tuple(tokens[first : first + accepted]),
        logprobs=logprobs[first : first + accepted],
        fork_tokens=tuple(tokens[forks]),
        fork_logprobs=logprobs[forks],
        scored=tuple(lp for lp in logprobs[row:first] if lp is not None),
    )


def _accept(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """How many drawn tokens stand: row i was computed under the assumption that drafts 0..i-1 are right.

    Exact for greedy and for seeded sampling alike, since a token's random number depends on its index alone.
    """
    if not drawn:
        return 0
    agreed = 0
    while agreed < len(draft) and draft[agreed] == drawn[agreed]:
        agreed += 1
    return agreed + 1
