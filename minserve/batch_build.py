"""A plan as arrays: what `build_batch` lays out on the event loop and a backend reads on its thread.

Owns the order of tokens and of logit rows. It must not know queues, blocks' owners or backends; it reads requests and
changes nothing.

All arrays are small and this runs in every step: so lists are flattened once, and positions and slots are computed for
all chunks together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np

from minserve.batch import Batch, Float32, Int32, SamplingArrays, SeatReset, UInt32, uniform
from minserve.request import Chunk, Request, SamplingParams, StepPlan

_SCORING = SamplingParams(max_tokens=0, temperature=0.0)


class _Row(NamedTuple):
    """One logit row: whose parameters, which output token; target >= 0 = scored only, nothing is drawn."""

    request: Request
    params: SamplingParams
    output_index: int
    target: int = -1


def build_batch(
    plan: StepPlan,
    requests: Mapping[str, Request],
    *,
    block_size: int,
    vocab_size: int,
    copies: Sequence[tuple[int, int]],
) -> Batch:
    """Lay out a step that the scheduler has applied: every request has its seat and its blocks."""
    chunks = plan.chunks
    owners = [requests[chunk.request_id] for chunk in chunks]
    counts = [chunk.count for chunk in chunks]
    query_starts = [*accumulate(counts, initial=0)]
    tables = _block_tables(owners)
    spans = (range(chunk.start, chunk.start + chunk.count) for chunk in chunks)
    positions = np.array([*chain.from_iterable(spans)], np.int32)
    blocks, offsets = np.divmod(positions, np.int32(block_size))
    rows, logit_rows = _rows(chunks, owners, requests, query_starts)
    return Batch(
        step=plan.step,
        token_ids=_token_ids(chunks, owners),
        positions=positions,
        slots=tables[np.repeat(np.arange(len(chunks)), counts), blocks] * np.int32(block_size) + offsets,
        query_starts=np.array(query_starts, np.int32),
        context_lens=np.array([chunk.start + chunk.count for chunk in chunks], np.int32),
        block_tables=tables,
        seats=np.array([owner.seat for owner in owners], np.int32),
        generated=np.array([c.start >= o.prompt_len for c, o in zip(chunks, owners, strict=True)], np.bool_),
        logit_rows=np.array(logit_rows, np.int32),
        sampling=_sampling(rows, vocab_size),
        copies=np.array(copies, np.int32).reshape(-1, 2),
        resets=tuple(_reset(requests[name]) for name in plan.admitted if requests[name].params.penalized),
    )


def _token_ids(chunks: Sequence[Chunk], owners: Sequence[Request]) -> Int32:
    ids: list[int] = []
    for chunk, owner in zip(chunks, owners, strict=True):
        if chunk.count == 1:
            ids.append(owner.tokens[chunk.start])
        else:
            ids += owner.tokens[chunk.start : chunk.start + chunk.count - len(chunk.draft)]
            ids += chunk.draft
    return np.array(ids, np.int32)


def _block_tables(owners: Sequence[Request]) -> Int32:
    """[R, B], padded with 0."""
    width = max((len(owner.blocks) for owner in owners), default=0) or 1
    padded = [owner.blocks + [0] * (width - len(owner.blocks)) for owner in owners]
    return np.array(padded, np.int32).reshape(-1, width)


def _rows(
    chunks: Sequence[Chunk], owners: Sequence[Request], requests: Mapping[str, Request], query_starts: Sequence[int]
) -> tuple[list[_Row], list[int]]:
    """The step's logit rows and which of its tokens they follow."""
    rows: list[_Row] = []
    tokens: list[int] = []
    for chunk, owner, (first, end) in zip(chunks, owners, pairwise(query_starts), strict=True):
        if chunk.scored:
            begin = max(chunk.start, owner.scored)
            places = range(begin, begin + chunk.scored)
            rows += [_Row(owner, _SCORING, 0, owner.tokens[place + 1]) for place in places]
            tokens += [first + place - chunk.start for place in places]
        rows += [_Row(owner, owner.params, owner.output_len + ahead) for ahead in range(chunk.samples)]
        tokens += range(end - chunk.samples, end)
        for name in chunk.forks:
            rows.append(_Row(requests[name], requests[name].params, 0))
            tokens.append(end - 1)
    return rows, tokens


def _sampling(rows: Sequence[_Row], vocab_size: int) -> SamplingArrays:
    """One array of each type for all fields: making an array costs more than filling it."""
    params = [row.params for row in rows]
    bias = [p.logit_bias for p in params]
    temperature, top_p, min_p, uniforms = np.array(
        [
            [p.temperature for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
            [_uniform(row) for row in rows],
        ],
        np.float32,
    )
    top_k, logprobs, targets, seats = np.array(
        [
            [p.top_k for p in params],
            [_logprobs(row) for row in rows],
            [row.target for row in rows],
            [row.request.seat if row.params.penalized else -1 for row in rows],
        ],
        np.int32,
    )
    return SamplingArrays(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        uniforms=uniforms,
        penalties=_penalties(params),
        bias_starts=np.array([*accumulate(map(len, bias), initial=0)], np.int32),
        bias_ids=np.array([token for b in bias for token in b], np.int32),
        bias_values=np.array([value for b in bias for value in b.values()], np.float32),
        mask=_mask(rows, vocab_size),
        logprobs=logprobs,
        targets=targets,
        seats=seats,
    )


def _uniform(row: _Row) -> float:
    """Greedy rows draw nothing."""
    return uniform(row.request.seed, row.request.choice, row.output_index) if row.params.temperature > 0 else 0.0


def _penalties(params: Sequence[SamplingParams]) -> Float32:
    flat = [(p.presence_penalty, p.frequency_penalty, p.repetition_penalty) for p in params]
    return np.array(flat, np.float32).reshape(-1, 3)


def _logprobs(row: _Row) -> int:
    wanted = row.params.logprobs if row.target < 0 else row.request.params.prompt_logprobs
    return -1 if wanted is None else wanted


def _mask(rows: Sequence[_Row], vocab_size: int) -> UInt32 | None:
    """[S, ceil(V / 32)] bits of allowed tokens, or None if no row is restricted."""
    masks = [_allowed(row, vocab_size) for row in rows]
    if all(mask is None for mask in masks):
        return None
    everything = _bits(None, frozenset(), vocab_size)
    return np.stack([everything if mask is None else mask for mask in masks])


def _allowed(row: _Row, vocab_size: int) -> UInt32 | None:
    params = row.params
    banned = params.banned_token_ids
    if row.output_index < params.min_tokens:
        banned |= params.stop_token_ids
    if not banned and params.allowed_token_ids is None:
        return None
    return _bits(params.allowed_token_ids, banned, vocab_size)


@lru_cache(maxsize=128)
def _bits(allowed: frozenset[int] | None, banned: frozenset[int], vocab_size: int) -> UInt32:
    """Bit v of word v // 32 = token v may be drawn. Ids outside the vocabulary are nobody's bits."""
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    if allowed is None:
        flags[:vocab_size] = 1
    else:
        flags[[token for token in allowed if 0 <= token < vocab_size]] = 1
    flags[[token for token in banned if 0 <= token < vocab_size]] = 0
    bits = np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)
    bits.flags.writeable = False
    return bits


def _reset(request: Request) -> SeatReset:
    prompt, output = request.tokens[: request.prompt_len], request.tokens[request.prompt_len :]
    return SeatReset(request.seat, np.array(prompt, np.int32), np.array(output, np.int32))
