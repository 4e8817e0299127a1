"""A batch on its way into the tape's buffers: what arrives, and what is refused before a kernel follows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minserve.backend.base import KVSpec, StepLimits
from minserve.backend.numba_backend.kv_memory import KVMemory, place
from minserve.backend.numba_backend.layout import (
    BLOCK,
    G_ROWS,
    LENGTHS,
    LOGIT_ROWS,
    P_ROWS,
    POSITIONS,
    REQUEST_OF,
    REQUESTS,
    S_ROWS,
    SLOTS,
    STARTS,
    T_ROWS,
    TABLES,
    TOKEN_IDS,
)
from minserve.backend.numba_backend.staging import StepBuffers
from minserve.batch import Batch
from tests.helpers import Part, make_batch

VOCAB, BLOCKS = 100, 70  # more blocks than a run has
LIMITS = StepLimits(max_tokens=64, max_requests=4, max_rows=8, max_model_len=256, num_blocks=BLOCKS)
MEMORY = KVMemory((KVSpec(2, 64, None), KVSpec(2, 64, None)), BLOCKS)


def buffers() -> StepBuffers:
    made = StepBuffers(LIMITS, VOCAB, MEMORY)
    for array in made.arrays.values():
        array[:] = -77
    return made


def batch(**arrays: Any) -> Batch:
    """Two requests, three and one tokens; keywords replace arrays."""
    good = make_batch([Part(14, [5, 6, 7], [3, 66], rows=(0, 2)), Part(0, [99], [40])])
    changed: dict[str, Any] = {name: np.array(values, getattr(good, name).dtype) for name, values in arrays.items()}
    return replace(good, **changed)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        start, count = draw(st.integers(0, 200)), draw(st.integers(1, 16))
        ids = draw(st.lists(st.integers(0, VOCAB - 1), min_size=count, max_size=count))
        blocks = draw(st.lists(st.integers(0, BLOCKS - 1), min_size=14, max_size=16))
        rows = draw(st.sampled_from([(), (-1,), (0, -1)]))
        parts.append(Part(start, ids, blocks, rows=rows, generated=draw(st.booleans())))
    return make_batch(parts)


@settings(deadline=None)
@given(batches())
def test_every_array_arrives_and_nothing_else_is_written(b: Batch) -> None:
    """Requests whose tokens were generated first, otherwise in the batch's order."""
    made = buffers()
    made.fill(b)
    tokens, requests, width = b.num_tokens, b.num_requests, b.block_tables.shape[1]
    counts = np.diff(b.query_starts)
    order = np.argsort(~b.generated, kind="stable")
    came = np.concatenate([np.arange(b.query_starts[r], b.query_starts[r + 1]) for r in order])
    generated = int(counts[b.generated].sum())
    assert made.header[[T_ROWS, REQUESTS, S_ROWS]].tolist() == [tokens, requests, b.num_rows]
    assert made.header[[G_ROWS, P_ROWS]].tolist() == [generated, tokens - generated]
    slots = place.py_func(b.slots, MEMORY.run * BLOCK, MEMORY.jump * BLOCK)
    for word, values in (
        (TOKEN_IDS, b.token_ids[came]),
        (POSITIONS, b.positions[came]),
        (SLOTS, slots[came]),
        (LENGTHS, b.context_lens[order]),
        (LOGIT_ROWS, np.argsort(came)[b.logit_rows]),
        (REQUEST_OF, np.repeat(np.arange(requests), counts[order])),
    ):
        np.testing.assert_array_equal(made.arrays[word][: len(values)], values)
        assert (made.arrays[word][len(values) :] == -77).all()
    np.testing.assert_array_equal(made.arrays[STARTS][1 : requests + 1], np.cumsum(counts[order]))
    placed = place.py_func(b.block_tables, MEMORY.run, MEMORY.jump)
    tables = made.arrays[TABLES][: 4 * made.table_width].reshape(4, -1)
    np.testing.assert_array_equal(tables[:requests, :width], placed[order])
    assert (tables[requests:] == -77).all()
    assert (tables[:, width:] == -77).all()


@pytest.mark.parametrize(
    ("arrays", "what"),
    [
        ({"token_ids": [5, 6, VOCAB, 9]}, r"token_ids of shape \(4,\) holds 5..100"),
        ({"token_ids": [5, -1, 7, 9]}, r"token_ids .* holds -1..9, in a step of 4 tokens of 2 requests; there are 100"),
        ({"token_ids": [5, 6, 7]}, "positions"),
        ({"positions": [14, 15, 256, 0]}, "positions"),
        ({"positions": [14, 15, 16]}, "positions"),
        ({"slots": [1, 2, BLOCKS * BLOCK, 4]}, "slots"),
        ({"slots": [1, 2, 3]}, "slots"),
        ({"query_starts": [0, 3]}, "query_starts"),
        ({"query_starts": [1, 3, 4]}, "query_starts"),
        ({"query_starts": [0, 3, 5]}, "query_starts"),
        ({"query_starts": [0, 1 << 30, 4]}, "query_starts"),
        ({"query_starts": [0, -1, 4]}, "query_starts"),
        ({"context_lens": [17, 257]}, "context_lens"),
        ({"context_lens": [17, -1]}, "context_lens"),
        ({"context_lens": [17]}, "query_starts"),
        ({"block_tables": [[3, BLOCKS], [40, 0]]}, "block_tables"),
        ({"block_tables": [[3, 66], [-40, 0]]}, "block_tables"),
        ({"block_tables": [[3, 66]]}, "block_tables"),
        ({"block_tables": np.zeros((2, 17))}, "17 blocks a request, the limit is 16"),
        ({"generated": [True]}, r"generated of shape \(1,\)"),
        ({"logit_rows": [0, 4]}, "logit_rows"),
        ({"logit_rows": [0, -1]}, "logit_rows"),
        ({"logit_rows": [0] * 9}, "9 logit rows, the limit is 8"),
        ({"token_ids": range(65)}, "65 tokens, the limit is 64"),
        ({"context_lens": [1] * 5}, "5 requests, the limit is 4"),
    ],
)
def test_what_would_lead_a_kernel_astray_is_refused(arrays: dict[str, Any], what: str) -> None:
    made = buffers()
    made.fill(batch())
    with pytest.raises(ValueError, match=what):
        made.fill(batch(**arrays))
    made.fill(batch())  # the next step is unaffected
    assert made.arrays[TOKEN_IDS][:4].tolist() == [5, 6, 7, 99]
