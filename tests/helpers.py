"""Batches made by hand: what backend and model tests feed to a program, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minserve.batch import Batch, SamplingArrays, SeatReset

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Part:
    """One request's share of a step: tokens to compute from position `start`, over its block ids.

    rows: which of the chunk's tokens give a logit row. seat: where its penalty counts live. generated: the tokens are
    not of its prompt.
    """

    start: int
    tokens: Sequence[int]
    blocks: Sequence[int]
    rows: Sequence[int] = (-1,)
    seat: int = 0
    generated: bool = False


def make_batch(
    parts: Sequence[Part],
    *,
    block_size: int = BLOCK_SIZE,
    sampling: SamplingArrays | None = None,
    copies: Sequence[tuple[int, int]] = (),
    resets: tuple[SeatReset, ...] = (),
    step: int = 0,
) -> Batch:
    """The step that runs `parts` one after the other. Sampling is greedy unless given."""
    positions = [np.arange(p.start, p.start + len(p.tokens)) for p in parts]
    slots = [
        np.asarray(part.blocks)[at // block_size] * block_size + at % block_size
        for part, at in zip(parts, positions, strict=True)
    ]
    starts = np.cumsum([0] + [len(p.tokens) for p in parts])
    rows = [start + row % len(p.tokens) for p, start in zip(parts, starts[:-1], strict=True) for row in p.rows]
    tables = np.zeros((len(parts), max((len(p.blocks) for p in parts), default=0)), np.int32)
    for table, part in zip(tables, parts, strict=True):
        table[: len(part.blocks)] = part.blocks
    seats = [p.seat for p in parts]
    return Batch(
        step=step,
        token_ids=_ints([token for p in parts for token in p.tokens]),
        positions=_ints(np.concatenate(positions)),
        slots=_ints(np.concatenate(slots)),
        query_starts=_ints(starts),
        context_lens=_ints([p.start + len(p.tokens) for p in parts]),
        block_tables=tables,
        seats=_ints(seats),
        generated=np.array([p.generated for p in parts], np.bool_),
        logit_rows=_ints(rows),
        sampling=sampling or make_sampling(len(rows), seats=[p.seat for p in parts for _ in p.rows]),
        copies=_ints(copies).reshape(-1, 2),
        resets=resets,
    )


def make_sampling(
    count: int, *, bias: Sequence[dict[int, float]] = (), mask: Any = None, **rows: Any
) -> SamplingArrays:
    """SamplingArrays of `count` rows: greedy by default. A keyword sets a field for all rows or, as a list, per row."""
    defaults: dict[str, tuple[Any, Any]] = {
        "temperature": (0.0, np.float32),
        "top_p": (1.0, np.float32),
        "top_k": (0, np.int32),
        "min_p": (0.0, np.float32),
        "uniforms": (0.5, np.float32),
        "logprobs": (-1, np.int32),
        "targets": (-1, np.int32),
        "seats": (-1, np.int32),
    }
    fields = {
        name: np.broadcast_to(np.asarray(rows.pop(name, default), dtype), (count,)).copy()
        for name, (default, dtype) in defaults.items()
    }
    penalties = np.broadcast_to(np.asarray(rows.pop("penalties", (0, 0, 1)), np.float32), (count, 3)).copy()
    assert not rows, f"unknown fields {rows}"
    lists = list(bias) or [{}] * count
    return SamplingArrays(
        **fields,
        penalties=penalties,
        bias_starts=_ints(np.cumsum([0] + [len(b) for b in lists])),
        bias_ids=_ints([token for b in lists for token in b]),
        bias_values=np.array([value for b in lists for value in b.values()], np.float32),
        mask=mask,
    )


def allow(vocab_size: int, *rows: Sequence[int] | None) -> np.ndarray:
    """Mask words [S, ceil(V / 32)]: the ids a row allows, None for all."""
    words = -(-vocab_size // 32)
    bits = np.zeros((len(rows), words * 32), np.uint8)
    for row, ids in zip(bits, rows, strict=True):
        row[slice(None) if ids is None else list(ids)] = 1
    return np.packbits(bits, axis=1, bitorder="little").view("<u4").astype(np.uint32)


def _ints(values: Any) -> np.ndarray:
    return np.asarray(values, np.int32).reshape(np.shape(values))
