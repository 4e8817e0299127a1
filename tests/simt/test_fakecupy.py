"""The stand-in for CuPy: its timing is the worst legal one, and what CuPy would only do by accident is an error."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from minserve.backend.base import BackendError
from minserve.backend.cuda_backend.blas import Blas, Output
from minserve.backend.cuda_backend.kernels import flatten
from tests.simt import fakecupy as cp
from tests.simt.emulator import KernelError
from tests.simt.fakeblas import FakeBlas

pytestmark = pytest.mark.simt
ADD_ONE = "__global__ void add_one(int* x) { x[threadIdx.x] += 1; }"


@cache
def kernel() -> Any:
    return cp.RawModule(code=ADD_ONE).get_function("add_one")


def add_one(array: Any) -> None:
    kernel()((1,), (len(array),), (array,))


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    add_one(cp.zeros(1, np.int32))
    cp.cuda.get_current_stream().synchronize()


class TestTiming:
    def test_a_host_buffer_reused_too_early_is_seen(self) -> None:
        stream, host, device = cp.cuda.Stream(non_blocking=True), np.array([1], np.int32), cp.empty(1, np.int32)
        device.set(host, stream=stream)
        host[0] = 2
        assert device.get(stream)[0] == 2

    def test_a_host_buffer_freed_too_early_is_an_error(self) -> None:
        device, host = cp.empty((2, 2), np.int32), np.array([[1, 2], [3, 4]], np.int32)
        device[0].set(host[0])
        device[1].set(host[1] + 1)
        with pytest.raises(KernelError, match="freed before the copy has run"):
            device.get()

    def test_a_result_that_nobody_waited_for_is_not_there(self) -> None:
        device, out = cp.asarray(np.array([1], np.int32)), np.zeros(1, np.int32)
        device.get(out=out, blocking=False)
        assert out[0] == 0
        cp.cuda.get_current_stream().synchronize()
        assert out[0] == 1

    def test_a_missing_event_is_seen(self) -> None:
        array, other = cp.asarray(np.array([4], np.int32)), cp.cuda.Stream(non_blocking=True)
        cp.cuda.Stream.null.synchronize()
        with cp.cuda.Stream(non_blocking=True) as stream:
            array.fill(5)
            event = stream.record()
        assert not event.done
        with other:
            assert array.get()[0] == 4
            other.wait_event(event)
            assert array.get()[0] == 5
        assert event.done

    def test_waiting_for_the_device_runs_every_stream(self) -> None:
        array, stream = cp.empty(1, np.int32), cp.cuda.Stream(non_blocking=True)
        with stream:
            array.fill(5)
        cp.Device().synchronize()
        assert array._host[0] == 5


class TestMemoryThatNobodyWrote:
    def test_a_kernel_cannot_read_it_and_the_host_gets_nonsense(self) -> None:
        array = cp.empty((3, 4), np.int32)
        array[1, 1:].fill(5)
        numbers = np.arange(3, dtype=np.int32)
        array[:, 0].set(numbers)
        assert array.get().tolist() == [[0, -1, -1, -1], [1, 5, 5, 5], [2, -1, -1, -1]]
        add_one(array[1])
        assert array[1].get().tolist() == [2, 6, 6, 6]
        add_one(array[2])
        with pytest.raises(KernelError, match=r"thread \(1,0,0\): read of device memory that nobody has written"):
            cp.Device().synchronize()

    def test_freed_memory_is_as_if_nobody_wrote_it(self) -> None:
        for _ in range(3):
            array = cp.empty(1000, np.int32)
            assert (array.get() == -1).all()
            array.fill(1)

    def test_a_copied_block_is_as_complete_as_its_source(self) -> None:
        blocks, code = cp.empty((2, 8), np.float32), flatten("copy_blocks.cu")
        blocks[0, :5].fill(3.0)
        copy = cp.RawModule(code=code).get_function("copy_blocks")
        arrays = np.array([blocks.data.ptr], np.uint64), np.array([32], np.int32), np.array([0, 1], np.int32)
        copy((1, 1), (32,), tuple(cp.asarray(array) for array in arrays))
        assert np.array_equal(blocks[1].get(), [3] * 5 + [np.nan] * 3, equal_nan=True)

    @pytest.mark.parametrize("missing", ["x", "weight", None])
    def test_a_product_reads_its_operands_and_writes_its_columns(self, missing: str | None) -> None:
        blas = Blas(cp, FakeBlas())
        x, weight = (
            cp.empty(16, np.float16) if name == missing else cp.zeros(16, np.float16) for name in ("x", "weight")
        )
        out = cp.empty((2, 10), np.float32)
        blas.linear(Output(out, "float", 10, 3), x, weight, 2, 2, 8, "half")
        if missing:
            with pytest.raises(KernelError, match="cublasGemmEx reads device memory that nobody has written"):
                cp.Device().synchronize()
        else:
            assert np.array_equal(out[1].get(), [np.nan] * 3 + [0] * 2 + [np.nan] * 5, equal_nan=True)


class TestGraphs:
    def test_replay_reads_new_values_at_the_same_addresses(self) -> None:
        array = cp.zeros(2, np.int32)
        with cp.cuda.Stream(non_blocking=True) as stream:
            cp.cuda.Stream.null.synchronize()
            stream.begin_capture()
            add_one(array)
            graph = stream.end_capture()
            assert array.get().tolist() == [0, 0]  # recorded, not run
            numbers = np.array([5, 6], np.int32)
            array.set(numbers)
            graph.launch(stream)
            graph.launch(stream)
            assert array.get().tolist() == [7, 8]

    def test_an_array_freed_since_the_capture_is_an_error(self) -> None:
        with cp.cuda.Stream(non_blocking=True) as stream:
            array = cp.zeros(2, np.int32)
            stream.synchronize()
            stream.begin_capture()
            add_one(array)
            graph = stream.end_capture()
            del array
            gc.collect()
            graph.launch(stream)
            with pytest.raises(KernelError, match="freed since the capture"):
                stream.synchronize()

    @pytest.mark.parametrize("what", ["get", "set", "fill", "synchronize", "event", "empty", "pinned"])
    def test_only_kernels_may_be_captured(self, what: str) -> None:
        array, event = cp.zeros(2, np.int32), cp.cuda.Event()
        with cp.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            actions: dict[str, Callable[[], object]] = {
                "get": array.get,
                "set": lambda: array.set(np.zeros(2, np.int32)),
                "fill": lambda: array.fill(1),
                "synchronize": stream.synchronize,
                "event": event.synchronize,
                "empty": lambda: cp.empty(1),
                "pinned": lambda: cp.cuda.alloc_pinned_memory(4),
            }
            with pytest.raises(RuntimeError, match="capturing"):
                actions[what]()
            stream.end_capture()

    def test_a_capture_forbids_allocation_on_every_stream(self) -> None:
        stream = cp.cuda.Stream(non_blocking=True)
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="allocating memory while a stream is capturing"):
            cp.empty(1)
        stream.end_capture()

    def test_a_kernel_must_have_run_before_it_is_captured(self) -> None:
        fresh, array = cp.RawModule(code=ADD_ONE).get_function("add_one"), cp.zeros(2, np.int32)
        with cp.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            with pytest.raises(RuntimeError, match="add_one is captured before its first launch"):
                fresh((1,), (2,), (array,))
            stream.end_capture()

    def test_the_default_stream_cannot_capture(self) -> None:
        with pytest.raises(RuntimeError, match="default"):
            cp.cuda.Stream.null.begin_capture()


class TestProducts:
    def test_a_shape_must_have_run_before_it_is_captured(self) -> None:
        blas, (x, weight, out) = Blas(cp, FakeBlas()), (cp.zeros((16, 16), np.float16) for _ in range(3))
        with cp.cuda.Stream(non_blocking=True) as stream:
            blas.linear(Output(out, "half", 16), x, weight, 2, 16, 16, "half")
            stream.begin_capture()
            blas.linear(Output(out, "half", 16), x, weight, 2, 16, 16, "half")
            with pytest.raises(BackendError, match="status 14"):
                blas.linear(Output(out, "half", 16), x, weight, 3, 16, 16, "half")
            stream.end_capture()

    @pytest.mark.parametrize("freed", ["x", "weight", "out", "workspace"])
    def test_a_graph_notices_that_an_array_has_been_freed(self, freed: str) -> None:
        blas: Any = Blas(cp, FakeBlas())
        arrays: dict[str, Any] = {name: cp.zeros((16, 16), np.float16) for name in ("x", "weight", "out")}
        cp.cuda.Stream.null.synchronize()
        with cp.cuda.Stream(non_blocking=True) as stream:
            for captured in (False, True):
                if captured:
                    stream.synchronize()
                    stream.begin_capture()
                blas.linear(Output(arrays["out"], "half", 16), arrays["x"], arrays["weight"], 2, 16, 16, "half")
            graph = stream.end_capture()
            arrays.pop(freed) if freed in arrays else delattr(blas, "_workspace")
            gc.collect()
            graph.launch(stream)
            with pytest.raises(KernelError, match="freed since the capture"):
                stream.synchronize()

    def test_a_product_beyond_its_arrays_is_an_error(self) -> None:
        blas, (x, weight, out) = Blas(cp, FakeBlas()), (cp.zeros((16, 16), np.float16) for _ in range(3))
        with pytest.raises(KernelError, match="lie in no array"):
            blas.linear(Output(out, "half", 16), x, weight, 17, 16, 16, "half")


class TestStrictness:
    def test_nothing_converts_implicitly(self) -> None:
        with pytest.raises(TypeError, match="implicit"):
            np.asarray(cp.empty(3))
        with pytest.raises(TypeError, match="no device array"):
            cp.RawModule(code=ADD_ONE).get_function("add_one")((1,), (1,), (np.zeros(1, np.int32),))

    def test_only_basic_indexing_and_no_hidden_copies(self) -> None:
        array = cp.empty((4, 4))
        with pytest.raises(TypeError, match="basic indexing"):
            array[[0, 1]]
        with pytest.raises(ValueError, match="copy"):
            array[:, :2].reshape(8)
        assert array[1:3, 2].shape == (2,)

    def test_set_and_get_want_the_same_shape_and_type(self) -> None:
        with pytest.raises(TypeError, match="float32"):
            cp.empty(3).set(np.zeros(3, np.int32))
        with pytest.raises(TypeError, match="float32"):
            cp.empty(3).get(out=np.zeros(4, np.float32))

    def test_memory_is_finite_and_comes_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gc.collect()
        before, total = cp.Device().mem_info
        array = cp.empty(1 << 20, np.uint8)
        assert cp.Device().mem_info == (before - (1 << 20), total)
        with pytest.raises(cp.cuda.memory.OutOfMemoryError):
            cp.empty(total, np.uint8)
        del array
        gc.collect()
        assert cp.Device().mem_info == (before, total)
