"""One step as arrays: the only thing that crosses from the event loop to the worker thread.

Owns the meaning of every array and the counter-based random numbers. It must not know where requests come from
(`batch_build` fills it) nor what a backend does with it. A Batch is immutable once built.

Shapes: T tokens, R requests in the step (one per chunk), B blocks in the longest block table, S logit rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from minserve.request import TokenLogprob

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
UInt32 = npt.NDArray[np.uint32]
Bool = npt.NDArray[np.bool_]

_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    """splitmix64's finalizer (Steele, Lea, Flood 2014): a bijection of 64-bit words with good avalanche."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, choice: int, index: int) -> float:
    """The random number in [0, 1) of output token `index` of choice `choice`: a pure function, no generator state.

    So a token does not depend on batch mates, and preemption cannot change it. 24 bits, exact in float32.
    """
    return (_mix(_stream(seed, choice) ^ index) >> 40) / (1 << 24)


@lru_cache(maxsize=4096)
def _stream(seed: int, choice: int) -> int:
    """What all tokens of a choice have in common."""
    return _mix(_mix(seed & _MASK) ^ choice)


@dataclass(frozen=True, slots=True)
class SamplingArrays:
    """Per logit row. Rows that are only scored have target >= 0: their log probability is wanted, no draw.

    penalties: presence, frequency, repetition. bias: CSR lists, row s owns bias_ids[bias_starts[s]:bias_starts[s+1]].
    mask: bit v of row s set = token v allowed; None = no row is restricted. logprobs: -1 none, k >= 0 the k best.
    seats: the row's seat, where penalty counts live (-1: none needed).
    """

    temperature: Float32  # [S] 0 = greedy
    top_p: Float32  # [S]
    top_k: Int32  # [S] 0 = off
    min_p: Float32  # [S]
    uniforms: Float32  # [S]
    penalties: Float32  # [S, 3]
    bias_starts: Int32  # [S + 1]
    bias_ids: Int32  # [sum]
    bias_values: Float32  # [sum]
    mask: UInt32 | None  # [S, ceil(V / 32)]
    logprobs: Int32  # [S]
    targets: Int32  # [S] -1 = sample this row
    seats: Int32  # [S]


@dataclass(frozen=True, slots=True)
class SeatReset:
    """Rebuild what lives by seat on the device: sent when a penalized request is admitted, again after preemption."""

    seat: int
    prompt: Int32
    output: Int32


@dataclass(frozen=True, slots=True)
class Batch:
    """The step's inputs. slot = block id * block size + offset; the row of a token in the KV cache.

    context_lens[r] counts the request's tokens in the cache after this step (start + count).
    generated[r]: its tokens in this step were generated, or drafted; else they belong to its prompt. A backend may
    compute the two in different ways, each the same in every batch.
    copies: (source, destination) block pairs to copy before anything is computed.
    """

    step: int
    token_ids: Int32  # [T]
    positions: Int32  # [T]
    slots: Int32  # [T]
    query_starts: Int32  # [R + 1]
    context_lens: Int32  # [R]
    block_tables: Int32  # [R, B] padded with 0
    seats: Int32  # [R]
    generated: Bool  # [R]
    logit_rows: Int32  # [S] index into T
    sampling: SamplingArrays
    copies: Int32  # [C, 2]
    resets: tuple[SeatReset, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_requests(self) -> int:
        return len(self.context_lens)

    @property
    def num_rows(self) -> int:
        return len(self.logit_rows)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a backend returns: one entry per logit row.

    tokens: the drawn id, the target of a scored row, or -1 where no finite logit is allowed (an error for that
    request alone). logprobs[s] is None unless asked for.
    """

    tokens: Int32  # [S]
    logprobs: tuple[TokenLogprob | None, ...]


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """A chunk's outcome: accepted tokens (several with drafts), one token per fork, log probabilities of scored rows.

    logprobs run parallel to tokens, fork_logprobs to fork_tokens; None where not asked for.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...] = ()
    fork_tokens: tuple[int, ...] = ()
    fork_logprobs: tuple[TokenLogprob | None, ...] = ()
    scored: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """One ChunkResult per chunk of the plan, in its order."""

    chunks: tuple[ChunkResult, ...]
