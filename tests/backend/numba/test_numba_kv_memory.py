"""Where blocks lie: everybody's own place, neighbours adjacent, copies in every layer."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from minserve.backend.base import KVSpec
from minserve.backend.numba_backend import kv_memory
from minserve.backend.numba_backend.kv_memory import KVMemory, place
from minserve.backend.numba_backend.layout import BLOCK, RUN, block_words

UNIFORM = (KVSpec(3, 64, None), KVSpec(3, 64, 128), KVSpec(1, 64, None))
MIXED = (KVSpec(3, 64, None), KVSpec(2, 128, None))
COUNT = 2 * RUN + 5


@pytest.mark.parametrize("kv", [UNIFORM, MIXED])
def test_a_block_of_a_head_is_its_own_and_lies_where_kernels_look(kv: tuple[KVSpec, ...]) -> None:
    memory = KVMemory(kv, COUNT)
    blocks = np.arange(COUNT, dtype=np.int32)
    places = place.py_func(blocks, memory.run, memory.jump).astype(np.int64)
    assert (np.diff(places)[np.arange(1, COUNT) % RUN != 0] == 1).all()
    assert (place.py_func(blocks * BLOCK + 3, memory.run * BLOCK, memory.jump * BLOCK) == places * BLOCK + 3).all()
    seen: set[int] = set()
    for spec, layer in zip(kv, memory.layers, strict=True):
        nbytes = 2 * block_words(spec.head_dim)
        for head in range(spec.kv_heads):
            for part in range(2):
                first = layer.words.ctypes.data + (2 * head + part) * layer.blocks * nbytes
                addresses = set((first + places * nbytes).tolist())
                assert len(addresses) == COUNT
                assert not addresses & seen
                seen |= addresses
                for block in (0, RUN - 1, RUN, COUNT - 1):
                    view = layer.words[block // layer.blocks, head, part, block % layer.blocks]
                    assert view.ctypes.data == first + places[block] * nbytes


@pytest.mark.parametrize("kv", [UNIFORM, MIXED])
def test_copies_reach_every_layer_and_nothing_else(kv: tuple[KVSpec, ...]) -> None:
    memory = KVMemory(kv, COUNT)
    for i, layer in enumerate(memory.layers):
        layer.words[:] = np.random.default_rng(i).integers(0, 1 << 16, layer.words.shape, np.uint16)
    before = [layer.words.copy() for layer in memory.layers]
    source, target = np.array([1, RUN + 2]), np.array([RUN + 7, 0])
    memory.copy(source, target)
    for old, layer in zip(before, memory.layers, strict=True):
        run = layer.blocks
        for s, t in zip(source, target, strict=True):
            old[t // run, :, :, t % run] = old[s // run, :, :, s % run]
        assert (layer.words == old).all()


def test_memory_is_touched_one_page_a_step_and_only_behind_what_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "SPARE", 0)
    memory = KVMemory(UNIFORM, 8 * RUN)
    rng = np.random.default_rng(0)
    slots = np.zeros(0, np.int32)
    kept: dict[int, int] = {}
    for step in range(60):
        block = int(rng.integers(0, min(8 * RUN, 4 * step + 1)))  # ever further out, with jumps back and ahead
        slots = np.arange(block * BLOCK, block * BLOCK + 3, dtype=np.int32)
        memory.touch_ahead(slots)
        for layer in memory.layers:
            layer.words[block // RUN, :, :, block % RUN] = step
        memory.step_over()
        kept[block] = step
        if step % 7 == 0 and step:
            target = int(rng.integers(0, 8 * RUN))
            memory.copy(np.array([block]), np.array([target]))
            kept[target] = step
        for known, value in kept.items():
            assert all((layer.words[known // RUN, :, :, known % RUN] == value).all() for layer in memory.layers)


@pytest.mark.skipif(
    sys.platform != "linux" or tuple(map(int, platform.release().split(".")[:2])) < (5, 14),
    reason="only Linux 5.14 and later gives pages that nobody writes to",
)
def test_pages_are_taken_beside_the_first_step_later_between_steps_and_keep_what_steps_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_memory, "SPARE", 12 << 20)
    memory = KVMemory(UNIFORM, 64 * RUN)  # 29 MB
    memory.layers[0].words[0] = 7
    before = resident()
    memory.touch_ahead(np.zeros(1, np.int32))
    pages_are_taken()
    first = resident() - before
    assert 8 << 20 < first < 16 << 20
    memory.touch_ahead(np.full(1, 20 * RUN * BLOCK, np.int32))  # more than half of them are used now
    time.sleep(5 * kv_memory.PAUSE)
    assert resident() - before < first + (4 << 20), "not beside a later step"
    memory.step_over()
    pages_are_taken()
    assert first + (5 << 20) < resident() - before < first + (13 << 20)
    assert (memory.layers[0].words[0] == 7).all()
    assert not memory.layers[1].words.any()


def pages_are_taken() -> None:
    for thread in threading.enumerate():
        if thread.name == "minserve-pages":
            thread.join()


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_places_beyond_int32_fall_back_to_long_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "BLOCK", 1 << 24)
    memory = KVMemory(UNIFORM, COUNT)
    assert (memory.run, memory.jump) == (COUNT, 0)
