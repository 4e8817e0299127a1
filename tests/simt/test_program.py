"""How programs run steps: graphs, copies, uploads, and the indices they refuse."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from minserve.backend.base import StepLimits
from minserve.backend.cuda_backend.program import CudaProgram, buckets
from minserve.backend.cuda_backend.step import Shape, Staging
from minserve.batch import Batch, SeatReset
from tests.helpers import Part, allow, make_batch, make_sampling
from tests.simt import fakecupy
from tests.simt.fakeblas import FakeBlas
from tests.simt.fakestream import Stream
from tests.simt.programs import IDS, LIMITS, decode, program, prompt

pytestmark = pytest.mark.simt


class TestGraphs:
    def test_replay_is_bit_for_bit_the_same_step_run_eagerly(self) -> None:
        """For every bucket, full and padded, as contexts grow."""
        replayed, eager = program(), program(graphs=False)
        for each in (replayed, eager):
            for request, length in enumerate((33, 5, 20, 1)):
                each.logits(prompt(length, request))
        for step in range(3):
            for requests in (1, 2, 3, 4):
                batch = decode(*[length + step for length in (33, 5, 20, 1)][:requests])
                assert (replayed.logits(batch) == eager.logits(batch)).all()

    @pytest.mark.parametrize("encoding", ["F16", "Q4_0"])
    def test_large_buckets_capture_what_small_ones_do_not_use(
        self, encoding: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Beyond SKINNY_ROWS a product is cuBLAS's, and a quantized matrix is expanded first, inside of the graph."""
        captured = 0
        gemm = FakeBlas.cublasGemmEx

        def counted(self: FakeBlas, *args: Any) -> int:
            nonlocal captured
            captured += fakecupy.cuda.get_current_stream().is_capturing()
            return gemm(self, *args)

        monkeypatch.setattr(FakeBlas, "cublasGemmEx", counted)
        limits = StepLimits(max_tokens=40, max_requests=26, max_rows=26, max_model_len=48, num_blocks=78)
        replayed, eager = (program(f"dummy:llama-tiny:{encoding}", limits, graphs=on) for on in (True, False))
        for context, requests in enumerate((26, 17, 9, 1)):
            batch = decode(*[context] * requests)
            assert (replayed.logits(batch) == eager.logits(batch)).all()
        assert captured

    def test_buckets_cover_every_batch_size(self) -> None:
        assert buckets(1) == [1]
        assert buckets(4) == [1, 2, 4]
        assert buckets(33) == [1, 2, 4, 8, 16, 24, 32, 33]

    def test_a_decode_step_without_sampled_rows_or_with_more_rows_than_requests(self) -> None:
        """A prompt's last but one token alone, and forks: several rows of one token."""
        replayed, eager = program(), program(graphs=False)
        batches = [
            make_batch([Part(0, [7], [0], rows=())]),
            make_batch([Part(1, [9], [0], rows=(0, 0, 0)), Part(0, [8], [1], rows=())]),
            make_batch([Part(2, [9], [0], rows=[0] * 24)]),
        ]
        for batch in batches:
            assert (replayed.logits(batch) == eager.logits(batch)).all()
            assert len(replayed.run(batch).tokens) == batch.num_rows

    def test_the_program_runs_on_another_thread_than_it_was_built_on(self) -> None:
        built, results = program(), []
        thread = threading.Thread(target=lambda: results.append(built.run(prompt(20))))
        thread.start()
        thread.join()
        assert results[0].tokens.tolist() == program().run(prompt(20)).tokens.tolist()


class TestSteps:
    def test_blocks_are_copied_before_anything_is_computed(self) -> None:
        built = program()
        built.logits(prompt(20))
        whole = built.logits(make_batch([Part(20, [5], [0, 1])]))
        copied = built.logits(make_batch([Part(20, [5], [0, 9])], copies=[(1, 9)]))
        assert (copied == whole).all()

    def test_places_in_a_cache_of_more_numbers_than_32_bits_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A request in its last blocks gets what it gets in the first: in prompts, decodes and copies."""
        monkeypatch.setattr(fakecupy, "TOTAL_MEMORY", 1 << 40)
        blocks = 2**32 // (2 * 2 * 16 * 16) + 8  # two heads of 16 numbers, 16 tokens
        built, found = program(limits=replace(LIMITS, num_blocks=blocks)), []
        for first in (0, blocks - 3):
            whole = built.logits(make_batch([Part(0, IDS[:20], [first, first + 1])]))
            alone = built.logits(make_batch([Part(20, [IDS[20]], [first, first + 1])]))
            copied = make_batch([Part(20, [IDS[20]], [first, first + 2])], copies=[(first + 1, first + 2)])
            found.append((whole, alone, built.logits(copied)))
        assert all((low == high).all() for low, high in zip(*found, strict=True))

    @pytest.mark.parametrize("graphs", [True, False])
    def test_a_step_is_over_before_the_next_one_overwrites_its_inputs(
        self, graphs: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also one that samples nothing, and one that fails halfway."""
        want, built = program().run(prompt(20)).tokens, program(graphs=graphs)
        built.logits(make_batch([Part(0, IDS[:19], range(3), rows=())]))
        built.logits(prompt(5, request=1))
        assert built.run(make_batch([Part(19, IDS[19:20], range(3))])).tokens == want
        with monkeypatch.context() as patched:
            patched.setattr(built._sampler, "draw", Mock(side_effect=MemoryError))
            with pytest.raises(MemoryError):
                built.run(make_batch([Part(0, IDS[:19], range(6, 9))]))
        built.logits(prompt(5, request=1))
        assert built.run(make_batch([Part(19, IDS[19:20], range(6, 9))])).tokens == want

    def test_a_program_on_a_gpu_that_has_failed_can_be_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        built = program()
        error = fakecupy.CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")
        monkeypatch.setattr(Stream, "synchronize", Mock(side_effect=error))
        with pytest.raises(fakecupy.CUDARuntimeError):
            built.run(prompt(5))
        built.close()

    def test_several_adjusted_rows_beside_plain_ones(self) -> None:
        built = program()
        sampling = make_sampling(3, bias=[{5: 100.0}, {}, {9: 100.0}], seats=[0, 1, 2])
        for request in range(3):
            built.logits(prompt(4, request))
        tokens = built.run(decode(4, 4, 4, sampling=sampling)).tokens
        assert (tokens[0], tokens[2]) == (5, 9)
        assert tokens[1] == built.logits(decode(4, 4, 4))[1].argmax()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"token_ids": [261]}, "token_ids"),
            ({"token_ids": [-1]}, "token_ids"),
            ({"positions": [96]}, "positions"),
            ({"slots": [16 * 16]}, "slots"),
            ({"context_lens": [97]}, "context_lens"),
            ({"block_tables": [[16]]}, "block_tables"),
            ({"logit_rows": [1]}, "logit_rows"),
            ({"copies": [[0, 16]]}, "copies"),
            ({"logit_rows": [0] * 25}, "25 logit rows"),
        ],
    )
    def test_an_index_that_would_touch_foreign_memory_is_refused(self, change: dict[str, Any], message: str) -> None:
        batch = make_batch([Part(0, [1], [0])])
        values: dict[str, Any] = {name: np.array(value, np.int32) for name, value in change.items()}
        with pytest.raises(ValueError, match=message):
            small().logits(replace(batch, **values))

    def test_seats_and_sampling_ids_are_checked_too(self) -> None:
        for sampling in (make_sampling(1, seats=4), make_sampling(1, targets=261), make_sampling(1, bias=[{300: 1.0}])):
            with pytest.raises(ValueError, match=r"seats|targets|bias_ids"):
                small().run(make_batch([Part(0, [1], [0])], sampling=sampling))

    def test_a_step_too_large_for_the_program_is_refused(self) -> None:
        with pytest.raises(ValueError, match="41 tokens does not fit this program's 40"):
            small().logits(make_batch([Part(0, [1] * 41, [0, 1, 2])]))
        with pytest.raises(ValueError, match="5 requests"):
            small().logits(make_batch([Part(0, [1], [i]) for i in range(5)]))


_SMALL: list[CudaProgram] = []


def small() -> CudaProgram:
    if not _SMALL:
        _SMALL.append(program())
    return _SMALL[0]


class TestStaging:
    def test_ragged_tables_and_padding(self) -> None:
        staging = Staging(fakecupy, LIMITS, 16)
        batch = make_batch([Part(17, [4], [9, 5, 0]), Part(2, [6], [7])])
        step = staging.upload(batch, Shape(4, 4, 4), np.zeros(2, bool), fakecupy.cuda.get_current_stream())
        host = {name: array.get().tolist() for name, array in step.inputs.items()}
        assert host["token_ids"] == [4, 6, 0, 0]
        assert host["slots"] == [5 * 16 + 1, 7 * 16 + 2, -1, -1]
        assert host["context_lens"] == [18, 3, 0, 0]
        assert host["query_starts"] == [0, 1, 2, 3, 4]
        assert host["table_starts"] == [0, 2, 0, 0]
        assert host["block_tables"][:3] == [9, 5, 7]
        assert (step.longest, step.singles) == (1, True)


class TestUploads:
    """What goes to the device for a step."""

    @pytest.fixture
    def uploads(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Bytes of every copy to the device since."""
        sizes, original = list[int](), fakecupy.ndarray.set

        def counted(array: Any, values: Any, stream: Any = None) -> None:
            sizes.append(values.nbytes)
            original(array, values, stream)

        self.with_prompts(small())
        monkeypatch.setattr(fakecupy.ndarray, "set", counted)
        return sizes

    @staticmethod
    def with_prompts(built: CudaProgram) -> CudaProgram:
        for request in range(2):
            built.logits(prompt(4, request))
        return built

    def busy(self, known: int, **sampling: Any) -> Batch:
        """A decode with everything that a step can have."""
        reset = SeatReset(0, np.resize(np.array(IDS, np.int32), known), np.array([7], np.int32))
        each = make_sampling(2, bias=[{5: 100.0}, {}], penalties=[[0.5, 0, 1], [0, 0, 2]], seats=[0, 1], **sampling)
        return decode(4, 4, sampling=each, copies=[(1, 9)], resets=(reset, replace(reset, seat=1)))

    def test_all_of_it_in_one_copy(self, uploads: list[int]) -> None:
        small().run(self.busy(20))
        assert len(uploads) == 1

    def test_masks_take_another(self, uploads: list[int]) -> None:
        tokens = small().run(self.busy(20, mask=allow(261, [9], [11]))).tokens
        assert tokens.tolist() == [9, 11]
        assert len(uploads) == 2
        assert uploads[1] == 2 * 4 * 9  # the rows that there are, a bit for each of 261 words

    def test_a_reset_that_finds_no_room_goes_alone(self, uploads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        want = small().run(self.busy(600)).tokens
        monkeypatch.setattr("minserve.backend.cuda_backend.step.EXTRA_WORDS", 0)
        cramped = self.with_prompts(program())
        uploads.clear()
        assert cramped.run(self.busy(600)).tokens.tolist() == want.tolist()
        assert len(uploads) == 3
