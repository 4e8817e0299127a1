"""From logits to tokens, in NumPy: the specification of sampling that every backend follows.

Owns the penalty counts of the seats. It must not know requests, text or how the logits were made.

One row of logits [V], float32 throughout (sums in float64), goes through these steps, in this order:

 0. Log probabilities, where asked for, are the log-softmax of the row as it came in. They are clamped to -9999, so
    that JSON can carry them.
 1. Penalties, by seat. Repetition (Keskar et al. 2019) over prompt and output: a positive logit is divided by the
    penalty, a negative one multiplied. Frequency, then presence, over the output only: logit -= frequency * count,
    logit -= presence where count > 0.
 2. Bias is added.
 3. Mask: a token whose bit is 0 is out. If the largest logit now isn't finite (everything masked or -inf, or a NaN or
    +inf among the allowed), no token can be drawn: -1.
 4. Temperature 0 ends here: the largest logit, the lowest id among equals. Otherwise the largest logit is subtracted
    and the row divided by the temperature.
 5. top_k keeps every token whose value is at least the k-th largest (ties stay). k <= 0 or k >= V is off.
    What is left gets weights exp(value); the probabilities below are weights over their sum.
 6. top_p (Holtzman et al. 2020) keeps the tokens with probability >= t, where t is the largest probability for which
    these sum to at least top_p (ties stay). 1 is off, 0 keeps the best.
 7. min_p (Nguyen et al. 2024) keeps probabilities of at least min_p times the largest.
 8. The draw inverts the cumulative sum of the kept weights in ascending id order: the first token whose cumulative
    weight exceeds uniform * total.

Rows with a target are only scored: the target is returned with its log probability.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minserve.batch import Float32, Int32, Sampled, SamplingArrays, SeatReset
from minserve.request import TokenLogprob

LOWEST_LOGPROB = -9999.0
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SeatCounts:
    """seen: the token is in the prompt [V]. made: how often it is in the output [V]."""

    seen: npt.NDArray[np.bool_]
    made: Int32


class Seats:
    """What penalties must remember between steps, by seat. Only seats that were reset have counts."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab = vocab_size
        self._counts: dict[int, SeatCounts] = {}

    def reset(self, reset: SeatReset) -> None:
        """Forget the seat's last owner and count what the new one already knows."""
        seen = np.zeros(self._vocab, np.bool_)
        seen[reset.prompt] = True
        made = np.bincount(reset.output, minlength=self._vocab).astype(np.int32)
        self._counts[reset.seat] = SeatCounts(seen, made)

    def add(self, seat: int, token: int) -> None:
        """Count a drawn token, where the seat has counts."""
        counts = self._counts.get(seat)
        if counts is not None:
            counts.made[token] += 1

    def penalize(self, logits: Float32, seat: int, penalties: Float32) -> None:
        """Step 1, in place. penalties: presence, frequency, repetition."""
        presence, frequency, repetition = penalties
        counts = self._counts.get(seat)
        if counts is None or (presence == 0 and frequency == 0 and repetition == 1):
            return
        made = counts.made > 0
        known = np.flatnonzero(counts.seen | made)
        values = logits[known]
        logits[known] = np.where(values > 0, values / repetition, values * repetition)
        output = np.flatnonzero(made)
        logits[output] -= frequency * counts.made[output].astype(np.float32)
        logits[output] -= presence


def sample(logits: Float32, arrays: SamplingArrays, seats: Seats) -> Sampled:
    """logits [S, V] -> one token and, where asked for, one TokenLogprob per row. Drawn tokens are counted by seat.

    A row depends on nothing but itself and its seat. ValueError if an id lies outside the vocabulary.
    """
    check_ids(arrays, logits.shape[1])
    tokens = np.empty(len(logits), np.int32)
    logprobs: list[TokenLogprob | None] = []
    for s, row in enumerate(logits):
        target = int(arrays.targets[s])
        token = target if target >= 0 else draw(row, arrays, s, seats)
        if target < 0 <= token:
            seats.add(int(arrays.seats[s]), token)
        wanted = token >= 0 and (target >= 0 or arrays.logprobs[s] >= 0)
        logprobs.append(describe(row, token, max(0, int(arrays.logprobs[s]))) if wanted else None)
        tokens[s] = token
    return Sampled(tokens, tuple(logprobs))


def check_ids(arrays: SamplingArrays, vocab_size: int) -> None:
    """An id outside the vocabulary would wrap around or touch a neighbour's row: ValueError before anything is."""
    for name, ids, lowest in (("bias_ids", arrays.bias_ids, 0), ("targets", arrays.targets, -1)):
        if len(ids) and not lowest <= ids.min() <= ids.max() < vocab_size:
            raise ValueError(f"{name} must lie in {lowest}..{vocab_size - 1}, got {ids.min()}..{ids.max()}")
    words = -(-vocab_size // 32)
    if arrays.mask is not None and arrays.mask.shape[1] != words:
        raise ValueError(f"mask has {arrays.mask.shape[1]} words a row, {vocab_size} tokens need {words}")


def adjusted(row: Float32, arrays: SamplingArrays, s: int, seats: Seats) -> Float32:
    """Steps 1 to 3 for row s. A copy: log probabilities come from the raw row."""
    logits = row.astype(np.float32)
    seats.penalize(logits, int(arrays.seats[s]), arrays.penalties[s])
    bias = slice(arrays.bias_starts[s], arrays.bias_starts[s + 1])
    np.add.at(logits, arrays.bias_ids[bias], arrays.bias_values[bias])
    if arrays.mask is not None:
        bits = np.unpackbits(arrays.mask[s].astype("<u4").view(np.uint8), bitorder="little")
        logits[bits[: len(logits)] == 0] = -np.inf
    return logits


def draw(row: Float32, arrays: SamplingArrays, s: int, seats: Seats) -> int:
    """Steps 1 to 8 for row s: a token id, or -1 where none can be drawn."""
    logits = adjusted(row, arrays, s, seats)
    best = int(logits.argmax())  # of a NaN: argmax stops at the first one
    if not np.isfinite(logits[best]):
        return -1
    if arrays.temperature[s] <= 0:
        return best
    weights = kept_weights(logits, arrays, s)
    cumulative = np.cumsum(weights, dtype=np.float64)
    return int(np.searchsorted(cumulative, float(arrays.uniforms[s]) * cumulative[-1], side="right"))


def kept_weights(logits: Float32, arrays: SamplingArrays, s: int) -> Float32:
    """Steps 4 to 7: exp((logit - max) / temperature) of the tokens that stay, 0 elsewhere; the best one's is 1."""
    with np.errstate(over="ignore"):  # a tiny temperature sends everything but the best to -inf, as it should
        values = (logits - logits.max()) / arrays.temperature[s]
    top_k, top_p = int(arrays.top_k[s]), float(arrays.top_p[s])
    if 0 < top_k < len(values):
        values[values < np.partition(values, -top_k)[-top_k]] = -np.inf
    weights: Float32 = np.exp(values)
    if top_p < 1:
        weights[weights < nucleus_threshold(weights, top_p)] = 0
    weights[weights < arrays.min_p[s]] = 0
    return weights


def nucleus_threshold(weights: Float32, top_p: float) -> np.float32:
    """The largest weight t for which the weights >= t sum to at least top_p of all.

    Looks at the largest 64 weights, then at eight times as many until they suffice: no sort of the vocabulary, since a
    few hundred tokens hold nearly all of the probability.
    """
    enough = top_p * weights.sum(dtype=np.float64)
    count = 64
    while True:
        count = min(count, len(weights))
        largest = np.sort(np.partition(weights, -count)[-count:])[::-1]
        reached = int(np.searchsorted(np.cumsum(largest, dtype=np.float64), enough))
        if reached < count or count == len(weights):
            return np.float32(largest[min(reached, count - 1)])
        count *= 8


def describe(row: Float32, token: int, k: int) -> TokenLogprob:
    """Step 0: the token's log probability and the k best (log probability descending, then id ascending)."""
    values = log_softmax(row)
    k = min(k, len(values))
    if k == 0:
        return TokenLogprob(token, float(values[token]))
    candidates = np.flatnonzero(values >= np.partition(values, -k)[-k])
    best = candidates[np.argsort(-values[candidates], kind="stable")[:k]]
    return TokenLogprob(token, float(values[token]), tuple((int(i), float(values[i])) for i in best))


def log_softmax(row: Float32) -> Float64:
    """Natural log of the softmax [V], clamped to -9999; so is everything in a row that has no finite maximum."""
    with np.errstate(invalid="ignore"):
        shifted = row.astype(np.float64) - row.max()
        values = shifted - np.log(np.exp(shifted).sum())
    return np.where(values > LOWEST_LOGPROB, values, LOWEST_LOGPROB)
