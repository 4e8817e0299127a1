"""The tape: what is fused, where the team meets, and that nobody reads what another thread has yet to write."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest

from minserve.backend.base import StepLimits
from minserve.backend.numba_backend import NumbaBackend
from minserve.backend.numba_backend.amx import HAS_AMX
from minserve.backend.numba_backend.layout import G_ROWS, P_ROWS, S_ROWS, T_ROWS
from minserve.backend.numba_backend.program import NumbaProgram
from minserve.backend.numba_backend.tape import HEAD, WIDTH
from minserve.batch import Batch
from minserve.models import load
from minserve.weights.dummy import PRESETS, DummyCheckpoint, load_dummy
from tests.helpers import Part, make_batch

LIMITS = StepLimits(max_tokens=96, max_requests=4, max_rows=8, max_model_len=640, num_blocks=64)
THREADS = 3
Order = Sequence[Sequence[int]]


def build(name: str, threads: int, activations: Literal["accurate", "int8"] = "accurate") -> NumbaProgram:
    """A dummy model; "odd" has head counts and sizes that fill no buffer evenly."""
    if name == "odd":
        config = PRESETS["qwen2-tiny"] | {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 48}
        checkpoint = DummyCheckpoint(config | {"intermediate_size": 100, "vocab_size": 133})
    else:
        checkpoint = load_dummy(name).checkpoint  # type: ignore[assignment]
    backend = NumbaBackend(threads=threads, activations=activations)
    model = load(checkpoint, backend, LIMITS.max_model_len)
    return backend.build(model.forward, model.spec, LIMITS)


def play(program: NumbaProgram, batch: Batch, order: Order) -> np.ndarray:
    """A team of THREADS on one thread: each member runs its whole stretch between two barriers at once, in this order.

    Buffers are full of rubbish at the start.
    """
    tape, header = program.tape, program.buffers.header
    for piece in tape.memory:
        piece[:] = 0x55
    program.buffers.fill(batch)
    program.sampling.fill(batch.sampling)
    kind = (header[T_ROWS] > 1) + 2 * (header[S_ROWS] > 1)
    stretches: list[list[int]] = [[]]
    for i, bits in enumerate(tape.barriers):
        if bits >> kind & 1:
            stretches.append([])
        stretches[-1].append(i)
    for number, stretch in enumerate(stretches):
        for tid in order[number % len(order)]:
            for i in stretch:
                row = tape.rows[i * WIDTH :]
                if rows := int(header[row[2]]):
                    kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(int(row[0]))
                    kernel(tid, THREADS, rows, row.ctypes.data + HEAD * 8)
    return program.view(batch.num_rows).copy()


def steps() -> list[Batch]:
    """Every kind of step: one token or many, one logit row or many or none."""
    far, near = range(4, 44), [60, 2, 33]
    ids = list(range(90))
    return [
        make_batch([Part(0, ids[:90], far, rows=())]),
        make_batch([Part(90, ids[:90], far)]),
        make_batch([Part(180, ids[:81], far, rows=(0, 5, 80))]),
        make_batch([Part(261, [7], far)]),
        make_batch([Part(262, [8], far, rows=(0, 0, 0), generated=True)]),
        make_batch([Part(263, [9], far, generated=True), Part(0, ids[:20], near)]),
        make_batch([Part(264, [9], far, generated=True), Part(20, [3], near)]),
        make_batch([Part(20, [3], near), Part(264, [9, 7], far, generated=True)]),
        make_batch([Part(21, [4], near, rows=(), generated=True)]),
    ]


ORDERS: list[Order] = [[order] for order in itertools.permutations(range(THREADS))]
ORDERS += [[(0, 1, 2), (2, 1, 0)], [(2, 0, 1), (1, 2, 0)]]


@pytest.mark.parametrize("activations", ["accurate", "int8"])
@pytest.mark.parametrize("name", ["dummy:llama-tiny:Q4_1", "dummy:gemma3-tiny:Q8_0", "dummy:qwen2-tiny:BF16", "odd"])
def test_no_order_of_the_threads_changes_a_bit(name: str, activations: Literal["accurate", "int8"]) -> None:
    single, team = build(name, 1, activations), build(name, THREADS, activations)
    for batch in steps():
        expected = single.logits(batch)
        for order in ORDERS:
            np.testing.assert_array_equal(play(team, batch, order), expected)
    single.close()
    team.close()


def test_a_missing_barrier_would_be_noticed() -> None:
    """The check itself: without the barriers of one kind of step, some order gives other logits."""
    single, team = build("dummy:llama-tiny:Q4_1", 1), build("dummy:llama-tiny:Q4_1", THREADS)
    batch = steps()[2]
    expected = single.logits(batch)
    needed = 0
    barriers = list(team.tape.barriers)
    for i, bits in enumerate(barriers):
        team.tape.barriers = [*barriers[:i], 0, *barriers[i + 1 :]]
        if bits and any(not np.array_equal(play(team, batch, order), expected) for order in ORDERS):
            needed += 1
    assert needed >= sum(bool(bits & 8) for bits in barriers) - 3
    single.close()
    team.close()


def test_a_layer_is_nine_kernels_and_the_team_meets_five_times_for_one_token() -> None:
    program = build("dummy:llama-tiny:Q4_1", 2)
    names = [i.kernel.name for i in program.tape.instructions]
    layer = [
        "quantize",
        "linear_q4_1_int12",
        "rope_write_kv",
        "attention_ones_2",
        "attention_many_16",
        "merge_quantize",
        "linear_q4_1_int12",
        "quantize",
        "linear_q4_1_int12",
        "linear_q4_1_int12",
    ]
    assert names[1:11] == layer
    assert sum(bits & 1 for bits in program.tape.barriers[1:11]) == 5
    program.close()


def test_two_kinds_of_tokens_do_not_make_the_team_meet_more_often_for_one() -> None:
    accurate, int8 = build("dummy:llama-tiny:Q4_1", 2), build("dummy:llama-tiny:Q4_1", 2, "int8")
    kinds = {i.rows for i in int8.tape.instructions}
    assert kinds == ({T_ROWS, S_ROWS, G_ROWS, P_ROWS} if HAS_AMX else {T_ROWS, S_ROWS})
    meetings = [[sum(bits >> kind & 1 for bits in p.tape.barriers) for kind in (0, 2)] for p in (accurate, int8)]
    assert meetings[0] == meetings[1]
    accurate.close()
    int8.close()


def test_the_rest_of_the_last_layer_runs_for_sampled_rows_alone() -> None:
    program = build("dummy:llama-tiny:Q4_1", 1)
    names = [i.kernel.name for i in program.tape.instructions]
    last = max(i for i, name in enumerate(names) if name.startswith("attention"))
    after = program.tape.instructions[last + 1 :]
    assert {i.rows for i in after} == {S_ROWS}
    assert sum(i.kernel.name == "linear_q4_1_int12" for i in after) == 4  # output, gate and up, down, head
    program.close()


def test_buffers_are_shared_by_values_that_do_not_live_together() -> None:
    deep = build("dummy:llama-tiny:Q4_1", 1)
    assert len(deep.tape.slots) <= 12
    deep.close()
