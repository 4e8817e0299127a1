"""A model without a model: a Program whose next token depends on every row of the KV cache it should depend on.

It reads nothing but the Batch. The row of a token holds a hash of the token, its position and all rows before it, found
through the block table; so a block that was shared, copied, evicted or overwritten wrongly changes what comes out.
`alone` computes the same tokens without blocks, steps or batches: what a request must get whatever happens around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minserve.batch import Batch, Sampled, SamplingArrays, uniform
from minserve.request import SamplingParams, TokenLogprob

VOCAB = 13
_MASK = (1 << 64) - 1


def mix(x: int) -> int:
    x = (x * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK
    x ^= x >> 29
    return (x * 0xBF58476D1CE4E5B9 & _MASK) ^ (x >> 32)


def row_value(token: int, position: int, before: int) -> int:
    return mix(before ^ mix(token * 1_000_003 + position))


def choose(state: int, number: float, counts: int, allowed: Sequence[int]) -> int:
    if not allowed:
        return -1
    return allowed[mix(state ^ int(number * (1 << 24)) ^ counts) % len(allowed)]


def logprob(state: int, token: int) -> TokenLogprob:
    return TokenLogprob(token, -(mix(state ^ token) % 1000) / 100)


def count_hash(prompt: Sequence[int], output: Sequence[int]) -> int:
    """Does not depend on order, as penalties don't."""
    return (sum(mix(2 * t) for t in prompt) + sum(mix(2 * t + 1) for t in output)) & _MASK


class FakeProgram:
    """Checks that every array lies within its bounds, then computes."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.kv = np.zeros(num_blocks * block_size, np.uint64)
        self.counts: dict[int, int] = {}
        self.fail_next = False

    def run(self, batch: Batch) -> Sampled:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device is on fire")
        rows = self.kv.reshape(-1, self.block_size)
        for source, destination in batch.copies.tolist():
            rows[destination] = rows[source]
        for reset in batch.resets:
            self.counts[reset.seat] = count_hash(reset.prompt.tolist(), reset.output.tolist())
        states = self._states(batch)
        return self._sample(states[batch.logit_rows], batch.sampling)

    def _states(self, batch: Batch) -> npt.NDArray[np.uint64]:
        """Per token of the step: the sum of its own row and all rows before it."""
        states = np.zeros(batch.num_tokens, np.uint64)
        for r in range(batch.num_requests):
            first, end = batch.query_starts[r : r + 2].tolist()
            start = int(batch.context_lens[r]) - (end - first)
            places = np.arange(start)
            slots = batch.block_tables[r, places // self.block_size] * self.block_size + places % self.block_size
            total = int(self.kv[slots].sum(dtype=np.uint64))
            for t in range(first, end):
                value = row_value(int(batch.token_ids[t]), int(batch.positions[t]), total)
                self.kv[batch.slots[t]] = value
                total = (total + value) & _MASK
                states[t] = total
        return states

    def _sample(self, states: npt.NDArray[np.uint64], arrays: SamplingArrays) -> Sampled:
        tokens, logprobs = [], []
        for s, state in enumerate(states.tolist()):
            token, seat = int(arrays.targets[s]), int(arrays.seats[s])
            if token < 0:
                allowed = [v for v in range(VOCAB) if arrays.mask is None or arrays.mask[s, v // 32] >> (v % 32) & 1]
                token = choose(state, float(arrays.uniforms[s]), self.counts[seat] if seat >= 0 else 0, allowed)
                if seat >= 0:
                    self.counts[seat] = (self.counts[seat] + mix(2 * token + 1)) & _MASK
            tokens.append(token)
            logprobs.append(logprob(state, token) if arrays.logprobs[s] >= 0 else None)
        return Sampled(np.array(tokens, np.int32), tuple(logprobs))


@dataclass(frozen=True)
class Alone:
    """What a request gets that nothing disturbs."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob]


def alone(prompt: Sequence[int], params: SamplingParams, seed: int, choice: int) -> Alone:
    tokens, total = list(prompt), 0
    result = Alone([], [], [])
    for position in range(len(prompt) + params.max_tokens):
        total = (total + row_value(tokens[position], position, total)) & _MASK
        if position < len(prompt) - 1:
            result.prompt_logprobs.append(logprob(total, tokens[position + 1]))
            continue
        index = len(result.tokens)
        if index >= params.max_tokens:
            break
        banned = params.banned_token_ids | (params.stop_token_ids if index < params.min_tokens else frozenset())
        everything = range(VOCAB) if params.allowed_token_ids is None else sorted(params.allowed_token_ids)
        number = uniform(seed, choice, index) if params.temperature > 0 else 0.0
        counts = count_hash(prompt, result.tokens) if params.penalized else 0
        token = choose(total, number, counts, [v for v in everything if v not in banned])
        if token < 0:
            break
        tokens.append(token)
        result.tokens.append(token)
        result.logprobs.append(logprob(total, token))
        if token in params.stop_token_ids and index >= params.min_tokens:
            break
    return result
