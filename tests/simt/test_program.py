"""Programs and the backend around them: fusion, memory, graphs, refusals; odd models as well as ours."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from minserve.assemble import size_cache, step_limits
from minserve.backend.base import BackendError, Heads, KVSpec, ModelSpec, StepLimits
from minserve.backend.cuda_backend import backend as cuda
from minserve.backend.cuda_backend import ops
from minserve.backend.cuda_backend.attention import Attention, Scratch
from minserve.backend.cuda_backend.backend import CudaBackend
from minserve.backend.cuda_backend.lowering import Lowering, live_ranges
from minserve.backend.cuda_backend.program import CudaProgram, buckets
from minserve.backend.cuda_backend.recorder import Recorder
from minserve.backend.cuda_backend.step import Shape, Staging
from minserve.backend.cuda_backend.weights import FACTORS, choose_format
from minserve.backend.numpy_backend import NumpyBackend
from minserve.backend.tensor import BLOCKS, Encoding, HostTensor, float32_to_bfloat16
from minserve.batch import Batch, SeatReset
from minserve.config import EngineConfig
from minserve.models import load
from minserve.weights.dummy import load_dummy
from tests.helpers import Part, allow, make_batch, make_sampling
from tests.simt import fakecupy
from tests.simt.engines import cuda_backend
from tests.simt.fakeblas import FakeBlas
from tests.simt.kit import normal

pytestmark = pytest.mark.simt
LIMITS = StepLimits(max_tokens=40, max_requests=4, max_rows=24, max_model_len=96, num_blocks=16)
IDS = [(i * 31 + 7) % 256 for i in range(90)]


def program(model: str = "dummy:llama-tiny:F16", limits: StepLimits = LIMITS, **options: Any) -> CudaProgram:
    backend = cuda_backend(compute="half", **options)
    loaded = load(load_dummy(model).checkpoint, backend, limits.max_model_len)
    return backend.build(loaded.forward, loaded.spec, limits)


def decode(*starts: int, **more: Any) -> Batch:
    """One new token for each request, after starts[i] tokens; request i holds blocks 3i .. 3i + 2."""
    parts = [Part(start, [IDS[start]], range(3 * i, 3 * i + 3), seat=i) for i, start in enumerate(starts)]
    return make_batch(parts, **more)


def prompt(count: int, request: int = 0) -> Batch:
    return make_batch([Part(0, IDS[:count], range(3 * request, 3 * request + 3))])


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


# ---- what is fused, and where results lie ------------------------------------
def lowered(model: str) -> tuple[list[str], CudaProgram]:
    built = program(model)
    return [type(instruction).__name__ for instruction, _ in built._lowered.instructions], built


class TestLowering:
    def test_llama_is_eight_instructions_a_layer(self) -> None:
        layer = ["Linear", "RopeKV", "Attention", "Linear", "Norm", "Linear", "Linear", "Norm"]
        assert lowered("dummy:llama-tiny:F16")[0] == ["Embed", "Norm", *layer, *layer, "Linear"]

    def test_gemmas_norms_after_a_branch_cost_no_launch(self) -> None:
        layer = ["Linear", "RopeKV", "Attention", "Linear", "Norm", "Linear", "Linear", "Norm"]
        assert lowered("dummy:gemma3-tiny:F16")[0] == ["Embed", "Norm", *layer * 4, "Linear"]

    def test_a_bias_of_qkv_is_added_by_the_rotation(self) -> None:
        assert "AddBias" not in lowered("dummy:qwen2-tiny:F16")[0]

    def test_buffers_that_share_memory_never_live_together(self) -> None:
        backend = cuda_backend(compute="half")
        loaded = load(load_dummy("dummy:gemma3-tiny:F16").checkpoint, backend, 96)
        machine = backend.machine(LIMITS)
        recorder = Recorder()
        caches = [fakecupy.empty(8, np.float16) for _ in loaded.spec.kv]
        output: Any = loaded.forward(recorder, None, caches)
        lowering = Lowering(machine, recorder, output, Scratch(None, None))
        done = lowering.finish(LIMITS)
        ranges = live_ranges([buffers for _, buffers in lowering._uses], done.logits)
        assert len(done.arenas) < len(ranges) / 3
        for (a, (a_first, a_last)), (b, (b_first, b_last)) in combinations(ranges, 2):
            if a.array._memory is b.array._memory:
                assert a_last < b_first or b_last < a_first

    def test_shapes_that_do_not_fit_are_refused(self) -> None:
        backend = cuda_backend(compute="half")
        matrix = backend.prepare_linear([HostTensor.from_array("w", normal(0, 16, 32))])
        recorder = Recorder()
        x = recorder.embed(matrix, None)
        broken: list[Callable[[], Any]] = [
            lambda: recorder.linear(recorder.linear(x, matrix), matrix),
            lambda: recorder.rms_norm(x, fakecupy.empty(8), 1e-5),
            lambda: recorder.add(x, recorder.linear(x, matrix)),
            lambda: recorder.rope_write_kv(x, Heads(1, 1, 16, 1.0), None, None, None),  # type: ignore[arg-type]
            lambda: recorder.attention(x, Heads(2, 2, 16, 1.0), None, None),
        ]
        for mistake in broken:
            with pytest.raises(ValueError, match=r"columns|returned"):
                mistake()


# ---- models that are not ours --------------------------------------------------
class Toy:
    """One layer of width 32 with two heads, and weights by name; `body` is its forward pass."""

    heads = Heads(2, 1, 16, 0.25)

    def __init__(self, body: Callable[[Any, Any, Any, Any], Any], backend: Any) -> None:
        def matrix(seed: int, n: int, k: int, bias: bool = False, pairs: bool = False) -> Any:
            weight = HostTensor.from_array(
                f"w{seed}", normal(seed, n, k, scale=k**-0.5).astype(np.float16).astype("f4")
            )
            extra = HostTensor.from_array(f"b{seed}", normal(seed + 50, n)) if bias else None
            return backend.prepare_linear([weight], extra, pairs=pairs)

        self.embed = backend.prepare_embedding(
            HostTensor.from_array("e", normal(1, 40, 32).astype(np.float16).astype("f4")), tied=False
        )
        self.qkv, self.qkv_bias = matrix(2, 64, 32), matrix(2, 64, 32, bias=True)
        self.o, self.o_bias = matrix(3, 32, 32), matrix(3, 32, 32, bias=True)
        self.up, self.up_bias = matrix(4, 48, 32, pairs=True), matrix(4, 48, 32, bias=True, pairs=True)
        self.down, self.square = matrix(5, 32, 24), matrix(8, 32, 32)
        self.head, self.head_bias = matrix(6, 40, 32), matrix(6, 40, 32, bias=True)
        self.norm = backend.prepare_vector(HostTensor.from_array("n", normal(7, 32) + 1))
        self.rope = backend.prepare_rope(10.0 ** -np.arange(8.0), scale=1.0, max_len=96)
        self.body = body
        self.spec = ModelSpec("toy", 40, 96, (KVSpec(1, 16),), 0, 0, 0)

    def forward(self, ops: Any, batch: Any, kv: Any) -> Any:
        return self.body(self, ops, batch, kv[0])

    def attend(self, ops: Any, x: Any, batch: Any, cache: Any, bias: bool = False) -> Any:
        q = ops.rope_write_kv(ops.linear(x, self.qkv_bias if bias else self.qkv), self.heads, self.rope, batch, cache)
        return ops.attention(q, self.heads, batch, cache)

    def logits(self, ops: Any, x: Any, batch: Any) -> Any:
        return ops.linear(ops.rms_norm(ops.take(x, batch), self.norm, 1e-5), self.head)


def parallel_branches(m: Toy, ops: Any, batch: Any, cache: Any) -> Any:
    """As in GPT-J: both branches from one norm, their sum added at once."""
    x = ops.embed(m.embed, batch, 2.0)
    h = ops.rms_norm(x, m.norm, 1e-5)
    attended = ops.linear(m.attend(ops, h, batch, cache), m.o)
    mlp = ops.linear(ops.glu(ops.linear(h, m.up), "silu"), m.down)
    return m.logits(ops, ops.add(x, ops.add(attended, mlp)), batch)


def norms_after_branches_only(m: Toy, ops: Any, batch: Any, cache: Any) -> Any:
    """As in OLMo 2: products right on the residual stream."""
    x = ops.embed(m.embed, batch)
    x = ops.add(x, ops.rms_norm(ops.linear(m.attend(ops, x, batch, cache, bias=True), m.o), m.norm, 1e-5))
    x = ops.add(x, ops.rms_norm(ops.linear(ops.glu(ops.linear(x, m.up), "gelu"), m.down), m.norm, 1e-3))
    return ops.linear(ops.take(x, batch), m.head)


def biases_everywhere(m: Toy, ops: Any, batch: Any, cache: Any) -> Any:
    x = ops.embed(m.embed, batch)
    attended = m.attend(ops, ops.rms_norm(x, m.norm, 1e-5), batch, cache, bias=True)
    x = ops.add(x, ops.linear(attended, m.o_bias))
    gated = ops.glu(ops.linear(ops.rms_norm(x, m.norm, 1e-5), m.up_bias), "silu")
    x = ops.add(x, ops.linear(gated, m.down))
    return ops.linear(ops.rms_norm(ops.take(x, batch), m.norm, 1e-5), m.head_bias)


def sum_used_twice(m: Toy, ops: Any, batch: Any, cache: Any) -> Any:
    """A sum that is needed after its norm, a residual that is needed after the sum, a product used twice."""
    x = ops.embed(m.embed, batch)
    attended = ops.linear(m.attend(ops, ops.rms_norm(x, m.norm, 1e-5), batch, cache), m.o)
    y = ops.add(x, attended)
    z = ops.add(x, ops.linear(ops.rms_norm(y, m.norm, 1e-5), m.square))
    z = ops.add(ops.add(y, z), attended)
    return m.logits(ops, z, batch)


def sampled_rows_go_on(m: Toy, ops: Any, batch: Any, cache: Any) -> Any:
    """A whole branch after take, and the sum of all rows used besides."""
    x = ops.embed(m.embed, batch)
    x = ops.add(x, ops.linear(m.attend(ops, ops.rms_norm(x, m.norm, 1e-5), batch, cache), m.o))
    y = ops.add(ops.take(x, batch), ops.take(ops.linear(ops.rms_norm(x, m.norm, 1e-5), m.square), batch))
    y = ops.add(y, ops.linear(ops.rms_norm(y, m.norm, 1e-5), m.square))
    return ops.linear(ops.rms_norm(y, m.norm, 1e-5), m.head)


@pytest.mark.parametrize(
    "body",
    [parallel_branches, norms_after_branches_only, biases_everywhere, sum_used_twice, sampled_rows_go_on],
)
def test_any_model_made_of_the_operations_gives_the_numpy_backends_logits(body: Any) -> None:
    """Prompt, chunk beside a decode, decode: with few rows and with more than skinny_gemm takes."""
    built = []
    for backend in (NumpyBackend(), cuda_backend(compute="half")):
        toy = Toy(body, backend)
        built.append(backend.build(toy.forward, toy.spec, LIMITS))
    ids = [i % 40 for i in IDS]
    for batch in (
        make_batch([Part(0, ids[:19], [0, 1], rows=range(19))]),
        make_batch([Part(19, ids[19:20], [0, 1]), Part(0, ids[:7], [5], rows=range(7))]),
        make_batch([Part(20, ids[20:21], [0, 1]), Part(7, ids[7:8], [5])]),
    ):
        want, got = (each.logits(batch) for each in built)
        assert np.abs(got - want).max() < 0.02 * np.abs(want).max()


def test_a_forward_pass_must_end_in_logits_of_the_vocabulary() -> None:
    def no_head(m: Toy, ops: Any, batch: Any, cache: Any) -> Any:
        return ops.rms_norm(ops.take(ops.embed(m.embed, batch), batch), m.norm, 1e-5)

    def narrow_head(m: Toy, ops: Any, batch: Any, cache: Any) -> Any:
        return ops.linear(ops.rms_norm(ops.take(ops.embed(m.embed, batch), batch), m.norm, 1e-5), m.o)

    for body, message in ((no_head, "end with a linear layer"), (narrow_head, "32 columns, the vocabulary has 40")):
        backend = cuda_backend(compute="half")
        toy = Toy(body, backend)
        with pytest.raises(ValueError, match=message):
            backend.build(toy.forward, replace(toy.spec, vocab_size=40), LIMITS)


# ---- the backend ----------------------------------------------------------------
class TestBackend:
    def test_the_first_matrix_decides_the_compute_type(self) -> None:
        for encoding, name in (
            (Encoding.F16, "float16"),
            (Encoding.BF16, "bfloat16"),
            (Encoding.Q8_0, "bfloat16"),
            (Encoding.F32, "bfloat16"),
        ):
            backend = CudaBackend(fakecupy, FakeBlas())
            assert "16-bit" in backend.description
            load(load_dummy(f"dummy:llama-tiny:{encoding}").checkpoint, backend)
            assert f"{name} activations" in backend.description
            assert "SIMT emulator, compute capability 9.0, 4 GB" in backend.description

    def test_sizes(self) -> None:
        backend = cuda_backend(block_size=32)
        assert backend.bytes_per_block([KVSpec(2, 64), KVSpec(1, 16)]) == 32 * 2 * 2 * (2 * 64 + 16)
        matrix = backend.prepare_linear([HostTensor.from_array("w", normal(0, 4, 32))])
        assert backend.nbytes(matrix) == 4 * 32 * 2
        assert backend.nbytes(backend.prepare_vector(HostTensor.from_array("v", normal(0, 8)))) == 32
        assert backend.nbytes(backend.prepare_rope(np.ones(4), scale=1.0, max_len=10)) == 2 * 4 * 10 * 4

    @pytest.mark.parametrize(
        ("encoding", "bits"),
        [
            ("Q4_0", 4.5),
            ("Q4_1", 5),
            ("Q8_0", 8.5),
            ("Q5_0", 7.5),
            ("Q5_1", 7.5),
            ("Q4_K", 5),
            ("Q5_K", 7.5),
            ("Q6_K", 7.5),
            ("BF16", 16),
        ],
    )
    def test_bits_of_a_weight_by_the_files_encoding(self, encoding: str, bits: float) -> None:
        tensor = load_dummy(f"dummy:smollm2-135m:{encoding}").checkpoint.tensor("model.layers.0.mlp.down_proj.weight")
        assert 8 * cuda_backend().nbytes(cuda_backend().prepare_linear([tensor])) == bits * tensor.rows * tensor.cols

    def test_free_memory_leaves_room_for_workspace_and_graphs(self) -> None:
        gc.collect()
        backend = cuda_backend()
        assert backend.free_memory() == fakecupy.Device().mem_info[0] - cuda.RESERVED_BYTES

    @pytest.mark.parametrize("model", ["dummy:llama-tiny:F16", "dummy:gemma3-tiny:Q8_0"])
    def test_what_a_program_takes_beside_its_cache_is_known_before(self, model: str) -> None:
        backend = cuda_backend(compute="half")
        loaded = load(load_dummy(model).checkpoint, backend, LIMITS.max_model_len)
        gc.collect()
        before = fakecupy._Memory.used
        counted = backend.scratch_memory(loaded.forward, loaded.spec, LIMITS)
        assert fakecupy._Memory.used == before
        built = backend.build(loaded.forward, loaded.spec, LIMITS)
        cache = LIMITS.num_blocks * backend.bytes_per_block(loaded.spec.kv)
        tables = built._pools.nbytes + built._block_bytes.nbytes
        assert fakecupy._Memory.used - before == counted + cache + tables

    def test_the_cache_is_sized_by_what_steps_leave(self, monkeypatch: pytest.MonkeyPatch) -> None:
        backend = cuda_backend(compute="half")
        model = load(load_dummy("dummy:llama-tiny:F16").checkpoint, backend)
        config = EngineConfig(max_num_batched_tokens=2048)
        gc.collect()
        free, limits = backend.free_memory(), step_limits(config, 0, model.spec.max_model_len)
        each, sizes = backend.bytes_per_block(model.spec.kv), (backend, model.forward, model.spec, list[str]())
        scratch = backend.scratch_memory(model.forward, model.spec, limits)
        monkeypatch.setattr(fakecupy, "TOTAL_MEMORY", fakecupy.TOTAL_MEMORY - free + scratch + 100 * each + 64)
        assert size_cache(config, *sizes)[0] == 90  # 0.9 of it on a GPU
        assert size_cache(structs.replace(config, memory_fraction=0.5), *sizes)[0] == 50
        more = structs.replace(config, max_num_batched_tokens=4096)
        with pytest.raises(BackendError, match=r"KV cache beside \d+ MB for max_num_batched_tokens"):
            size_cache(more, *sizes)

    def test_memory_that_does_not_suffice_is_one_sentence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        backend = cuda_backend(compute="half")
        loaded = load(load_dummy("dummy:llama-tiny:F16").checkpoint, backend)
        monkeypatch.setattr(fakecupy, "TOTAL_MEMORY", fakecupy._Memory.used + (1 << 16))
        with pytest.raises(BackendError, match=r"GPU memory is full.*memory_fraction"):
            backend.build(loaded.forward, loaded.spec, LIMITS)
        tensor = load_dummy("dummy:smollm2-135m:F16").checkpoint.tensor("model.layers.0.mlp.down_proj.weight")
        with pytest.raises(BackendError, match=r"GPU memory is full.*weights don't fit.*Q8_0.*16 bits a weight"):
            backend.prepare_linear([tensor])

    def test_closing_frees_everything_at_once(self) -> None:
        """Without a collection: a full one may be minutes away, and the next program needs the memory now."""
        gc.collect()
        gc.disable()
        try:
            before = fakecupy._Memory.used
            backend = cuda_backend(compute="half")
            loaded = load(load_dummy("dummy:llama-tiny:F16").checkpoint, backend, LIMITS.max_model_len)
            backend.scratch_memory(loaded.forward, loaded.spec, LIMITS)
            built = backend.build(loaded.forward, loaded.spec, LIMITS)
            built.run(decode(0, 0))
            built.close()
            built.close()
            del built, loaded, backend
            assert fakecupy._Memory.used == before
        finally:
            gc.enable()

    def test_heads_and_widths_that_kernels_cannot_take(self) -> None:
        backend = cuda_backend(compute="half")
        spec = ModelSpec("odd", 8, 8, (KVSpec(1, 24),), 0, 0, 0)
        with pytest.raises(BackendError, match="heads of 24 numbers"):
            backend.build(lambda ops, batch, kv: None, spec, LIMITS)
        with pytest.raises(BackendError, match="max_num_seqs is 65536: a GPU takes at most 65535"):
            backend.build(lambda ops, batch, kv: None, spec, replace(LIMITS, max_requests=65536))
        machine, buffer = backend.machine(LIMITS), ops.Buffer("half", 16 * 19, False)
        with pytest.raises(BackendError, match="17 query heads on 1 key heads: a GPU takes at most 16"):
            Attention(machine, buffer, buffer, Heads(17, 1, 16, 1.0), None, Scratch(None, None))
        with pytest.raises(BackendError, match="odd: 36 columns; the CUDA kernels need a multiple of 8"):
            backend.prepare_linear([HostTensor.from_array("odd", normal(0, 4, 36))])

    def test_weights_that_float16_cannot_hold(self) -> None:
        tensor = HostTensor.from_array("huge", np.full((1, 8), 1e6, np.float32))
        with pytest.raises(BackendError, match="huge has weights beyond float16's range"):
            cuda_backend(compute="half").prepare_linear([tensor])

    @pytest.mark.parametrize(
        ("encoding", "at", "largest"),  # where the factor of the scales, or of the minima, stands
        [(Encoding.Q4_K, 0, 1039), (Encoding.Q4_K, 2, 1039), (Encoding.Q5_K, 0, 1039), (Encoding.Q6_K, 208, 511.75)],
    )
    def test_k_encodings_take_16_bits_where_float16_may_not_hold_their_products(
        self, encoding: Encoding, at: int, largest: float
    ) -> None:
        def tensor(factor: float) -> HostTensor:
            blocks = np.full((2, BLOCKS[encoding].nbytes), 255, np.uint8)  # of the largest integers
            if encoding is Encoding.Q6_K:
                blocks[:, 192:208] = 128  # whose scales are signed
            blocks[:, FACTORS[encoding][0]] = 0
            blocks[1, at : at + 2] = np.array([factor], np.float16).view(np.uint8)
            return HostTensor("w", (2, 256), encoding, blocks)

        backend = cuda_backend(compute="bf16")
        matrix = backend.prepare_linear([tensor(largest)])
        assert max(np.abs(a.get()).max() for a in (matrix.scales, matrix.minima)) in (65472, 65504)
        beyond = np.nextafter(np.float16(largest), np.float16(np.inf))
        dense = backend.prepare_linear([tensor(beyond)])
        assert (dense.data.get().view(np.uint16) == float32_to_bfloat16(tensor(beyond).float32())).all()
        assert [choose_format([tensor(factor)]) for factor in (-beyond, np.inf, np.nan)] == ["Dense"] * 3

    def test_matrices_read_as_one_stay_quantized_unless_one_of_them_is_of_floats(self) -> None:
        floats = {Encoding.F32, Encoding.F16, Encoding.BF16}
        for pair in product(Encoding, Encoding):
            blocks = [(e, 256 // BLOCKS[e].weights * BLOCKS[e].nbytes) for e in pair]
            tensors = [HostTensor("w", (1, 256), e, np.zeros((1, nbytes), np.uint8)) for e, nbytes in blocks]
            assert (choose_format(tensors) == "Dense") is bool(floats & {*pair})

    def test_weights_are_uploaded_in_slabs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("minserve.backend.cuda_backend.weights.UPLOAD_BYTES", 4 * 32 * 3)
        values = normal(0, 10, 32).astype(np.float16).astype(np.float32)
        matrix = cuda_backend(compute="half").prepare_linear([HostTensor.from_array("w", values)])
        assert (matrix.data.get().view(np.float16) == values).all()

    def test_large_products_of_quantized_weights_go_slab_by_slab(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ops, "SLAB_BYTES", 2 * 64 * 24)
        few = program("dummy:llama-tiny:Q8_0")
        monkeypatch.undo()
        whole = program("dummy:llama-tiny:Q8_0")
        assert (few.logits(prompt(30)) == whole.logits(prompt(30))).all()

    def test_peaks_are_measured_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda, "PEAK_COPY_BYTES", 1 << 16)
        monkeypatch.setattr(cuda, "PEAK_COPY_BLOCK", 1 << 14)
        monkeypatch.setattr(cuda, "PEAK_GEMM", 64)
        backend = cuda_backend()
        peaks = backend.peaks()
        assert 0 < peaks.bandwidth < 1e12
        assert 0 < peaks.flops < 1e13
        assert backend.peaks() is peaks
