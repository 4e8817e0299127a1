"""Checks of sampling: every step of the specification (minserve/backend/sampling.py), alone and together.

The specification itself is the reference. A draw may differ only where the random number lies within rounding of the
edge between two tokens; the kept tokens must be the same.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from minserve.backend.base import StepLimits
from minserve.backend.cuda_backend.kernels import Kernels
from minserve.backend.cuda_backend.sampler import Sampler, adjusted_rows
from minserve.backend.cuda_backend.step import Shape, Staging
from minserve.backend.sampling import Seats, kept_weights, sample
from minserve.batch import Batch, Sampled, SamplingArrays, SeatReset
from tests.helpers import Part, allow, make_batch, make_sampling
from tests.simt.kit import Check, Kit

EDGE = 1e-6  # of the whole weight
UNIFORMS = (0.0, 0.25, 0.61803, 0.999999)
Logits = npt.NDArray[np.float32]


class Device:
    """A Sampler with its inputs, as a program has them."""

    def __init__(self, kit: Kit, vocab: int, seats: int = 4) -> None:
        limits = StepLimits(max_tokens=64, max_requests=seats, max_rows=64, max_model_len=64, num_blocks=4)
        kernels = Kernels(kit.cp)
        self._kit, self._vocab, self._staging = kit, vocab, Staging(kit.cp, limits, 16)
        self._sampler = Sampler(kit.cp, kernels, limits, vocab)
        kernels.compile()

    def draw(self, logits: Logits, sampling: SamplingArrays, resets: tuple[SeatReset, ...] = ()) -> Sampled:
        batch = replace(batch_of(len(logits), sampling), resets=resets)
        adjusted, shape = adjusted_rows(sampling), Shape(batch.num_tokens, batch.num_requests, batch.num_rows)
        step = self._staging.upload(batch, shape, adjusted, self._kit.cp.cuda.get_current_stream())
        self._sampler.reset(resets, step.resets)
        described = self._sampler.draw(self._kit.array(logits, "float"), batch, step, adjusted)
        return self._sampler.wait(sampling, described)

    def counts(self, seat: int) -> npt.NDArray[np.uint16]:
        """[V]: bit 15 = in the prompt, the rest = how often in the output."""
        counts: npt.NDArray[np.uint16] = self._kit.cp.asnumpy(self._sampler._counts[seat])
        return counts


def batch_of(rows: int, sampling: SamplingArrays) -> Batch:
    return make_batch([Part(0, [0] * rows, range(4), rows=range(rows))], sampling=sampling)


def agree(device: Device, logits: Logits, sampling: SamplingArrays, seats: Seats | None = None) -> None:
    """The device draws what the specification draws, but for the edges; log probabilities agree."""
    got = device.draw(logits, sampling)
    want = sample(logits, sampling, seats or Seats(logits.shape[1]))
    for s, (token, expected) in enumerate(zip(got.tokens, want.tokens, strict=True)):
        if token != expected:
            assert token >= 0 <= expected, f"row {s}: {token} instead of {expected}"
            plain = not adjusted_rows(sampling)[s]
            assert plain, f"row {s}: {token} instead of {expected}"
            assert sampling.targets[s] < 0, f"row {s}: {token} instead of {expected}, which was only to be scored"
            weights = kept_weights(logits[s].astype(np.float32), sampling, s).astype(np.float64)
            edges = np.cumsum(weights) / weights.sum()
            assert weights[token] > 0, f"row {s}: {token} was not kept"
            low, high = edges[token] - weights[token] / weights.sum(), edges[token]
            assert low - EDGE <= sampling.uniforms[s] <= high + EDGE, f"row {s}: {token} instead of {expected}"
    for a, b in zip(got.logprobs, want.logprobs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None and a.token_id == b.token_id:
            np.testing.assert_allclose(a.logprob, b.logprob, rtol=1e-5, atol=1e-5)
            assert [i for i, _ in a.top] == [i for i, _ in b.top]
            np.testing.assert_allclose([p for _, p in a.top], [p for _, p in b.top], rtol=1e-5, atol=1e-5)


def rows_of(vocab: int, count: int, *, ties: bool = False, seed: int = 0) -> Logits:
    logits = (np.random.default_rng(seed).standard_normal((count, vocab)) * 3).astype(np.float32)
    return (np.round(logits * 2) / 2).astype(np.float32) if ties else logits


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 30.0},
    "nearly greedy": {"temperature": 1e-4},
    "tiny temperature": {"temperature": 1e-30},
    "top_k": {"temperature": 1.0, "top_k": 40},
    "top_k of one": {"temperature": 1.0, "top_k": 1},
    "top_k of all": {"temperature": 1.0, "top_k": 1 << 30},
    "negative top_k": {"temperature": 1.0, "top_k": -1},
    "top_p": {"temperature": 1.3, "top_p": 0.9},
    "cold top_p": {"temperature": 0.05, "top_p": 0.95},  # most weights are 0
    "top_p of zero": {"temperature": 1.0, "top_p": 0.0},
    "top_p of a little": {"temperature": 1.0, "top_p": 1e-6},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "min_p of one": {"temperature": 1.0, "min_p": 1.0},
    "all together": {"temperature": 0.9, "top_k": 50, "top_p": 0.8, "min_p": 0.05},
    "top_k within top_p": {"temperature": 2.0, "top_k": 5, "top_p": 0.99},
}


def settings(kit: Kit, name: str, vocab: int, ties: bool) -> None:
    sampling = make_sampling(len(UNIFORMS), uniforms=UNIFORMS, **SETTINGS[name])
    agree(Device(kit, vocab), rows_of(vocab, len(UNIFORMS), ties=ties), sampling)


def mixed_rows(kit: Kit) -> None:
    """Every row has settings of its own, and none meets another's."""
    vocab, names = 300, list(SETTINGS)
    fields: dict[str, list[Any]] = {
        key: [SETTINGS[name].get(key, default) for name in names]
        for key, default in (("temperature", 0.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
    }
    fields["uniforms"] = [i / len(names) for i in range(len(names))]
    agree(Device(kit, vocab), rows_of(vocab, len(names)), make_sampling(len(names), **fields))


def edges_of_floats(kit: Kit) -> None:
    """Rows from which nothing can be drawn, and rows with infinities from which something can."""
    logits = rows_of(70, 8)
    logits[0] = -np.inf
    logits[1, 5] = np.nan
    logits[2, 6] = np.inf
    logits[3, 7:] = -np.inf
    logits[4], logits[4, :5] = 0, -0.0  # all equal: the lowest id
    logits[5, 9] = -np.nan
    logits[6] = -3e38
    logits[7, 69] = 3e38
    device = Device(kit, 70)
    for temperature in (0.0, 1.0):
        agree(device, logits, make_sampling(8, temperature=temperature, uniforms=0.3, logprobs=2))


def places_of_weights(kit: Kit) -> None:
    """The first token with a weight lies behind many without; ten equal ones have more than 32 bits of it."""
    logits = rows_of(70, 4)
    logits[0, :40] = logits[1, :69] = -np.inf
    logits[2:] = -1.0
    logits[2:, 20:30] = 0.0
    sampling = make_sampling(4, temperature=1.0, top_p=[1.0, 1.0, 0.2, 0.3], uniforms=[0.0, 0.0, 0.99, 0.0])
    agree(Device(kit, 70), logits, sampling)


def equal_weights(kit: Kit) -> None:
    """Where the kept weights before a token, and before a tile or a warp's segment, are exactly what is wanted."""
    vocab, tokens = 2048, np.array([0, 31, 32, 63, 64, 1000, 1024, 2047])
    logits = np.zeros((len(tokens), vocab), np.float32)
    sampling = make_sampling(len(tokens), temperature=1.0, uniforms=(tokens / vocab).tolist())
    device = Device(kit, vocab)
    assert device.draw(logits, sampling).tokens.tolist() == tokens.tolist()
    logits[:, vocab // 2 :] = -3  # dropped: one bin holds more of the sum than is wanted, and more than a word does
    agree(device, logits, replace(sampling, top_p=np.full(len(tokens), 0.5, np.float32)))
    logits[:, 1:1000], logits[:, 1000:] = -1.0, -1.07  # the same, dropped is the next bin
    agree(device, logits, replace(sampling, top_p=np.full(len(tokens), 0.4, np.float32)))


def masks_by_row(kit: Kit) -> None:
    """A row's mask leaves the rows beside it alone."""
    logits = rows_of(70, 4)
    logits[:, 0] = 50.0
    sampling = make_sampling(4, mask=allow(70, [0, 1], [0, 1], [0, 1], [0, 1]))
    assert Device(kit, 70).draw(logits, sampling).tokens.tolist() == [0] * 4


def masks_and_bias(kit: Kit) -> None:
    """Masks restrict, bias moves, both in rows beside others; a mask that allows nothing gives -1."""
    vocab, logits = 70, rows_of(70, 4)
    logits[1, 3] = np.nan  # masked: harmless
    mask = allow(vocab, [5, 69], [0, 31, 32, 33], None, [])
    bias = [{5: -2.0}, {31: 100.0, 3: 50.0}, {2: 7.5, 69: -100.0, 0: 1.25}, {1: 100.0}]
    device = Device(kit, vocab)
    for temperature in (0.0, 1.0):
        for m, b in ((mask, []), (None, bias), (mask, bias)):
            sampling = make_sampling(4, temperature=temperature, uniforms=0.4, mask=m, bias=b, logprobs=3)
            rows = logits if m is not None else np.nan_to_num(logits)
            got, want = device.draw(rows, sampling), sample(rows, sampling, Seats(vocab))
            assert got.tokens.tolist() == want.tokens.tolist()
            agree(device, rows, sampling)


def many_adjusted_rows(kit: Kit) -> None:
    """More rows with a bias than are prepared at once."""
    vocab, count = 40, 50
    bias = [{i % vocab: 100.0} if i % 3 else {} for i in range(count)]
    sampling = make_sampling(count, bias=bias)
    agree(Device(kit, vocab), rows_of(vocab, count), sampling)


def penalties(kit: Kit, vocab: int) -> None:
    """Counts by seat: from the known tokens at a reset, then from every draw; a seat without penalties has none."""
    device, seats = Device(kit, vocab), Seats(vocab)
    rng = np.random.default_rng(1)
    for seat in (0, 3, 2):
        prompt, output = (rng.integers(0, vocab, n).astype(np.int32) for n in (seat + 1, seat * 7))
        reset = SeatReset(seat, prompt, np.concatenate([output, output[: seat * 2]]))
        seats.reset(reset)
        device.draw(np.zeros((0, vocab), np.float32), make_sampling(0), (reset,))
        same_counts(device, seats, seat)
    knobs = [(0.5, 0.25, 1.3), (0, 0, 1), (-1.5, 0.7, 1), (0, 0, 0.6)]
    sampling = make_sampling(4, penalties=knobs, seats=[0, 2, 3, -1])
    for step in range(6):
        logits = rows_of(vocab, 4, seed=step)
        got, want = device.draw(logits, sampling), sample(logits, sampling, seats)
        assert got.tokens.tolist() == want.tokens.tolist(), f"step {step}: {got.tokens} instead of {want.tokens}"
        for seat in (0, 2, 3):
            same_counts(device, seats, seat)
    reset = SeatReset(3, np.array([1], np.int32), np.array([], np.int32))  # a new owner forgets the old one's tokens
    seats.reset(reset)
    logits = rows_of(vocab, 4, seed=9)
    assert device.draw(logits, sampling, (reset,)).tokens.tolist() == sample(logits, sampling, seats).tokens.tolist()


def full_counts(kit: Kit) -> None:
    """A count has 15 bits and stays at its most; the bit beside it says that the prompt has the token."""
    device, sampling = Device(kit, 10), make_sampling(1, penalties=[(0.1, 0.0, 1.0)], seats=[0])
    logits = np.zeros((1, 10), np.float32)
    logits[0, 5] = 9
    for made in (0x7FFE, 0x7FFF, 0x8000, 0x10003):  # the first is filled by the draw
        reset = SeatReset(0, np.array([2, 5], np.int32), np.array([5] * made + [4, 6], np.int32))
        for resets in ((reset,), ()):
            assert device.draw(logits, sampling, resets).tokens.tolist() == [5]
            assert device.counts(0).tolist() == [0, 0, 0x8000, 0, 1, 0xFFFF, 1, 0, 0, 0]


def rows_of_one_seat(kit: Kit) -> None:
    """Several rows of a step may belong to one request: each of their tokens counts, also the same one."""
    device, seats = Device(kit, 33), Seats(33)
    reset = SeatReset(1, np.array([2], np.int32), np.array([], np.int32))
    seats.reset(reset)
    logits = rows_of(33, 6)
    logits[:, 7] += [99, 0, 99, 99, 0, 99]
    sampling = make_sampling(6, penalties=[(0.5, 0.25, 1.3)] * 6, seats=1)
    got, want = device.draw(logits, sampling, (reset,)), sample(logits, sampling, seats)
    assert got.tokens.tolist() == want.tokens.tolist()
    same_counts(device, seats, 1)


def same_counts(device: Device, seats: Seats, seat: int) -> None:
    counts = device.counts(seat)
    assert ((counts & 0x8000 != 0) == seats._counts[seat].seen).all()
    assert (counts & 0x7FFF == seats._counts[seat].made).all()


def logprobs(kit: Kit, vocab: int, ties: bool) -> None:
    """Of drawn and of scored tokens, with as many of the best as each row asks for, from the raw row."""
    logits = rows_of(vocab, 5, ties=ties)
    logits[4, 1:] = -np.inf  # everything else is clamped, in order of ids
    arrays = make_sampling(
        5, logprobs=[-1, 0, 3, -1, 6], targets=[-1, -1, 0, min(7, vocab - 1), -1], temperature=0.5, uniforms=0.5
    )
    device = Device(kit, vocab)
    agree(device, logits, arrays)
    agree(device, logits, replace(arrays, logprobs=np.full(5, -1, np.int32)))
    agree(device, logits, make_sampling(5, logprobs=min(vocab + 3, 60), bias=[{0: 3.0}] * 5))


def nothing(kit: Kit) -> None:
    got = Device(kit, 10).draw(np.zeros((0, 10), np.float32), make_sampling(0))
    assert (len(got.tokens), got.logprobs) == (0, ())


CHECKS: dict[str, Check] = {
    **{f"sampling {name}, {vocab} tokens{', ties' * ties}": partial(settings, name=name, vocab=vocab, ties=ties)
       for name in SETTINGS for vocab, ties in ((2000, False), (33, True))},
    "sampling all together, 2000 tokens, ties": partial(settings, name="all together", vocab=2000, ties=True),
    "sampling all together, 1 token": partial(settings, name="all together", vocab=1, ties=False),
    "sampling with settings by row": mixed_rows,
    "sampling infinities and NaN": edges_of_floats,
    "sampling with masks and bias": masks_and_bias,
    "sampling with masks by row": masks_by_row,
    "sampling among weights of zero and ties": places_of_weights,
    "sampling among equal weights": equal_weights,
    "sampling many adjusted rows": many_adjusted_rows,
    **{f"sampling with penalties, {vocab} tokens": partial(penalties, vocab=vocab) for vocab in (30, 2001)},
    **{f"logprobs {vocab} tokens{', ties' * ties}": partial(logprobs, vocab=vocab, ties=ties)
       for vocab, ties in ((2000, False), (50, True), (4, False), (1, False))},
    "sampling with penalties, full counts": full_counts,
    "sampling with penalties, rows of one seat": rows_of_one_seat,
    "sampling nothing": nothing,
}  # fmt: skip
