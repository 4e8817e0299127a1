"""The backend around programs: memory, the layout of weights, what it refuses."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import product
from unittest.mock import Mock

import numpy as np
import pytest
from msgspec import structs

from minserve.assemble import size_cache, step_limits
from minserve.backend.base import BackendError, Heads, KVSpec, ModelSpec
from minserve.backend.cuda_backend import backend as cuda
from minserve.backend.cuda_backend import ops
from minserve.backend.cuda_backend.attention import Attention, Scratch
from minserve.backend.cuda_backend.backend import CudaBackend
from minserve.backend.cuda_backend.weights import FACTORS, choose_format
from minserve.backend.tensor import BLOCKS, Encoding, HostTensor, float32_to_bfloat16
from minserve.config import EngineConfig
from minserve.models import load
from minserve.weights.dummy import load_dummy
from tests.simt import fakecupy
from tests.simt.engines import cuda_backend
from tests.simt.fakeblas import FakeBlas
from tests.simt.fakestream import Stream
from tests.simt.kit import normal
from tests.simt.programs import LIMITS, decode, program, prompt

pytestmark = pytest.mark.simt


class TestMemory:
    def test_sizes(self) -> None:
        backend = cuda_backend(block_size=32)
        assert backend.bytes_per_block([KVSpec(2, 64), KVSpec(1, 16)]) == 32 * 2 * 2 * (2 * 64 + 16)
        matrix = backend.prepare_linear([HostTensor.from_array("w", normal(0, 4, 32))])
        assert backend.nbytes(matrix) == 4 * 32 * 2
        assert backend.nbytes(backend.prepare_vector(HostTensor.from_array("v", normal(0, 8)))) == 32
        assert backend.nbytes(backend.prepare_rope(np.ones(4), scale=1.0, max_len=10)) == 2 * 4 * 10 * 4

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
        vector = HostTensor.from_array("v", np.zeros(1 << 15, np.float32))
        for prepare in (lambda: backend.prepare_linear([tensor]), lambda: backend.prepare_vector(vector)):
            with pytest.raises(BackendError, match=r"GPU memory is full.*weights don't fit.*Q8_0.*16 bits a weight"):
                prepare()
        with pytest.raises(BackendError, match=r"GPU memory is full.*Lower max_model_len\."):
            backend.prepare_rope(np.ones(32), scale=1.0, max_len=1 << 12)

    @pytest.mark.parametrize(
        "error",
        [
            "cudaErrorMemoryAllocation: out of memory",  # making a graph of what was captured
            "CUDA_ERROR_OUT_OF_MEMORY: out of memory",  # loading a module
        ],
    )
    def test_so_is_memory_that_no_array_was_to_have(self, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Stream, "begin_capture", Mock(side_effect=RuntimeError(error)))
        with pytest.raises(BackendError, match=r"GPU memory is full: .*out of memory\. Lower memory_fraction"):
            program()
        monkeypatch.setattr(Stream, "begin_capture", Mock(side_effect=RuntimeError("something else")))
        with pytest.raises(RuntimeError, match="something else"):
            program()

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


class TestWeights:
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

    @pytest.mark.parametrize(
        ("encoding", "bits"),
        [
            ("Q4_0", 4.5),
            ("Q4_1", 5),
            ("Q8_0", 8.5),
            ("Q5_0", 7.5),
            ("Q5_1", 6),
            ("Q4_K", 5),
            ("Q5_K", 6),
            ("Q6_K", 7.5),
            ("BF16", 16),
        ],
    )
    def test_bits_of_a_weight_by_the_files_encoding(self, encoding: str, bits: float) -> None:
        tensor = load_dummy(f"dummy:smollm2-135m:{encoding}").checkpoint.tensor("model.layers.0.mlp.down_proj.weight")
        assert 8 * cuda_backend().nbytes(cuda_backend().prepare_linear([tensor])) == bits * tensor.rows * tensor.cols

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


def test_heads_and_widths_that_kernels_cannot_take() -> None:
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


def test_peaks_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "PEAK_COPY_BYTES", 1 << 16)
    monkeypatch.setattr(cuda, "PEAK_COPY_BLOCK", 1 << 14)
    monkeypatch.setattr(cuda, "PEAK_GEMM", 64)
    backend = cuda_backend()
    peaks = backend.peaks()
    assert 0 < peaks.bandwidth < 1e12
    assert 0 < peaks.flops < 1e13
    assert backend.peaks() is peaks
