"""Every family's logits against transformers' float32, however the work is cut into steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from minserve.backend.base import Checkpoint, Program, StepLimits
from minserve.backend.numpy_backend import NumpyBackend
from minserve.models import FAMILIES, load
from minserve.weights.safetensors_file import SafetensorsCheckpoint
from tests.helpers import Part, make_batch
from tests.models.golden import FOLDER, Golden, golden_names

REFERENCE = 1e-4  # max |difference| / max |logit| against transformers
CHUNKING = 1e-5  # against ourselves, the prompt run whole
BLOCKS = [3, 9, 1, 14, 6]  # 80 tokens, out of order on purpose
OTHER_BLOCKS = [[2, 4, 5, 7, 8], [10, 11, 12, 13, 15]]


def program_for(checkpoint: Checkpoint) -> Program:
    backend = NumpyBackend(block_size=16)
    model = load(checkpoint, backend)
    return backend.build(model.forward, model.spec, StepLimits(128, 4, 128, model.spec.max_model_len, 16))


@cache
def golden_program(name: str) -> tuple[Golden, Program, np.ndarray]:
    """The golden, a program for it, and our logits of the prompt run whole."""
    golden = Golden.read(name)
    program = program_for(golden.checkpoint())
    return golden, program, run(program, golden.ids, 0, BLOCKS)


def run(program: Program, ids: Sequence[int], start: int, blocks: Sequence[int], **more: Any) -> np.ndarray:
    """Logits of ids[start:], run as one chunk."""
    rows = range(len(ids) - start)
    return program.logits(make_batch([Part(start, ids[start:], blocks, rows=rows)], **more))


def in_chunks(program: Program, ids: Sequence[int], size: int, blocks: Sequence[int]) -> np.ndarray:
    """Logits of all ids, run in chunks of `size` tokens."""
    ends = [min(start + size, len(ids)) for start in range(0, len(ids), size)]
    return np.concatenate([run(program, ids[:end], end - 1 - (end - 1) % size, blocks) for end in ends])


def difference(ours: np.ndarray, reference: np.ndarray) -> float:
    return float(np.abs(ours - reference).max() / np.abs(reference).max())


@pytest.mark.parametrize("name", golden_names())
class TestFamily:
    def test_whole_prompt_equals_transformers(self, name: str) -> None:
        golden, _, whole = golden_program(name)
        assert difference(whole, golden.logits) <= REFERENCE

    @pytest.mark.parametrize("size", [1, 2, 5, 16, 17, 31, 64, 71])
    def test_chunks_change_nothing(self, name: str, size: int) -> None:
        golden, program, whole = golden_program(name)
        chunked = in_chunks(program, golden.ids, size, BLOCKS)
        assert difference(chunked, whole) <= CHUNKING
        assert difference(chunked, golden.logits) <= REFERENCE

    def test_batch_mates_change_nothing(self, name: str) -> None:
        """The prompt in chunks of 7 while two others decode, one before and one after it in the batch."""
        golden, program, whole = golden_program(name)
        first, last = golden.ids[::-1], [id ^ 1 for id in golden.ids]
        run(program, first[:20], 0, OTHER_BLOCKS[0])
        run(program, last[:33], 0, OTHER_BLOCKS[1])
        rows = []
        for step, start in enumerate(range(0, len(golden.ids), 7)):
            chunk = golden.ids[start : start + 7]
            mates = [
                Part(20 + step, [first[20 + step]], OTHER_BLOCKS[0]),
                Part(start, chunk, BLOCKS, rows=range(len(chunk))),
                Part(33 + step, [last[33 + step]], OTHER_BLOCKS[1]),
            ]
            logits = program.logits(make_batch(mates))
            rows.append(logits[1:-1])
            alone = run(program, first[: 21 + step], 20 + step, OTHER_BLOCKS[0])
            assert difference(logits[:1], alone) <= CHUNKING
        assert difference(np.concatenate(rows), whole) <= CHUNKING

    def test_preemption_changes_nothing(self, name: str) -> None:
        """Half computed, thrown away and overwritten by another request, then computed anew in other blocks."""
        golden, program, whole = golden_program(name)
        run(program, golden.ids[:40], 0, BLOCKS)
        run(program, golden.ids[::-1], 0, BLOCKS)
        run(program, golden.ids[:45], 0, OTHER_BLOCKS[0])
        again = run(program, golden.ids, 45, OTHER_BLOCKS[0])
        assert difference(again, whole[45:]) <= CHUNKING

    def test_shared_and_copied_blocks_change_nothing(self, name: str) -> None:
        """A prefix hit (two full blocks of another request), and a fork that gets a copy of a half-full block."""
        golden, program, whole = golden_program(name)
        run(program, golden.ids[:40], 0, BLOCKS)
        hit = run(program, golden.ids, 32, [*BLOCKS[:2], 12, 13, 15])
        assert difference(hit, whole[32:]) <= CHUNKING
        fork = [*BLOCKS[:2], 8, 7, 5]
        forked = run(program, golden.ids, 40, fork, copies=[(BLOCKS[2], fork[2])])
        assert difference(forked, whole[40:]) <= CHUNKING


def test_chunks_of_every_size_change_nothing() -> None:
    golden, program, whole = golden_program("llama")
    for size in range(1, len(golden.ids) + 1):
        assert difference(in_chunks(program, golden.ids, size, BLOCKS), whole) <= CHUNKING, size


def test_every_family_has_a_golden_model() -> None:
    covered = {Golden.read(name).config["model_type"] for name in golden_names()}
    assert covered == set(FAMILIES) - {"gemma3"}  # gemma3 is gemma3_text inside a multimodal checkpoint


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("llama", {"rope_theta": 9000.0}),
        ("llama_linear", {"rope_scaling": None}),
        ("llama_llama3", {"rope_scaling": None}),
        ("llama_yarn", {"rope_scaling": None}),
        ("mistral", {"sliding_window": 17}),
        ("qwen2_window", {"max_window_layers": 0}),
        ("qwen2_window", {"use_sliding_window": False}),
        ("gemma3", {"sliding_window": 15}),
        ("gemma3", {"rope_local_base_freq": 9000.0}),
        ("gemma3", {"query_pre_attn_scalar": 32}),
        ("gemma3_scaled", {"rope_scaling": None}),
        ("phi3", {"sliding_window": None}),
        ("phi3_longrope", {"original_max_position_embeddings": 256}),
    ],
)
def test_goldens_notice_a_wrong_setting(name: str, wrong: dict[str, Any]) -> None:
    golden = Golden.read(name)
    program = program_for(golden.checkpoint(**wrong))
    assert difference(run(program, golden.ids, 0, BLOCKS), golden.logits) > 10 * REFERENCE


def test_folder_saved_by_transformers_loads() -> None:
    """safetensors in bfloat16, and the config keys of transformers 5 (rope_parameters)."""
    folder = FOLDER / "llama_llama3"
    golden, _, whole = golden_program("llama_llama3")
    config = json.loads((folder / "config.json").read_text())
    assert "rope_parameters" in config
    program = program_for(SafetensorsCheckpoint(folder, config))
    np.testing.assert_array_equal(run(program, golden.ids, 0, BLOCKS), whole)
