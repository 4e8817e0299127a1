"""What a user is told when no GPU can be used, and the small parts that need no GPU and hardly the emulator."""

from __future__ import annotations

import ctypes
import importlib
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from minserve.backend import cuda_backend
from minserve.backend.base import BackendError
from minserve.backend.cuda_backend import availability, blas, device, kernels
from minserve.backend.cuda_backend.backend import CudaBackend
from minserve.backend.cuda_backend.blas import Blas, Output
from minserve.backend.cuda_backend.kernels import Kernels, flatten
from minserve.config import EngineConfig, ModelConfig
from tests.simt import fakecupy
from tests.simt.fakeblas import FakeBlas


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""


def machine(**changes: Any) -> Any:
    """A CuPy namespace that says what a healthy machine says, but for the changes. asked, memory: the error when it is
    asked for GPUs, for their memory."""
    facts: dict[str, Any] = {
        "version": "14.2.0",
        "asked": None,
        "gpus": 1,
        "memory": None,
        "driver": 12080,
        "built": 12090,
        "capability": "90",
        "free": 70 << 30,
        "compile": None,
    } | changes

    class Module:
        def __init__(self, **_: Any) -> None: ...

        def get_function(self, name: str) -> None:
            if facts["compile"]:
                raise facts["compile"]

    def answer(error: str | None, value: Any) -> Any:
        if error:
            raise CUDARuntimeError(error)
        return value

    class Gpu:
        compute_capability = facts["capability"]
        mem_info = property(lambda self: answer(facts["memory"], (facts["free"], 80 << 30)))

    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=lambda: answer(facts["asked"], facts["gpus"]),
        driverGetVersion=lambda: facts["driver"],
        runtimeGetVersion=lambda: facts["built"],
        getDeviceProperties=lambda _: {"name": b"NVIDIA H100"},
    )
    cuda = SimpleNamespace(runtime=runtime, Device=lambda _: Gpu())
    return SimpleNamespace(__version__=facts["version"], cuda=cuda, RawModule=Module)


OLD_DRIVER = "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"


class TestAvailability:
    def test_a_healthy_machine(self) -> None:
        assert availability(machine(), object()) is None

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"version": "12.3.0"}, r"CuPy 12\.3\.0 is too old: 13 or later is needed"),
            ({"asked": OLD_DRIVER, "driver": 0}, r"No NVIDIA driver was found: install it"),
            (
                {"asked": OLD_DRIVER, "driver": 11040},
                r"supports CUDA 11\.4, but this CuPy is made for CUDA 12\.9: update the driver$",
            ),
            (
                {"asked": OLD_DRIVER, "driver": 12080, "built": 13000},
                r"update the driver, or `pip uninstall cupy-cuda13x` and `pip install 'minserve\[cuda12\]'`$",
            ),
            ({"gpus": 0}, r"No NVIDIA GPU is visible: check `nvidia-smi` and CUDA_VISIBLE_DEVICES"),
            (
                {"asked": "cudaErrorNoDevice: no CUDA-capable device is detected"},
                r"No NVIDIA GPU is visible: check `nvidia-smi` and CUDA_VISIBLE_DEVICES",
            ),
            (
                {"asked": "cudaErrorSystemNotReady: system not yet initialized"},
                r"The GPU can't be used \(cudaErrorSystemNotReady: system not yet initialized\): `nvidia-smi` shows",
            ),
            (
                {"memory": "cudaErrorMemoryAllocation: out of memory"},  # there is none for a context
                r"The GPU can't be used \(cudaErrorMemoryAllocation: out of memory\): `nvidia-smi` shows",
            ),
            ({"capability": "75"}, r"NVIDIA H100 has compute capability 7\.5; the kernels need 8\.0"),
            ({"free": 200 << 20}, r"NVIDIA H100 has 0\.2 of 85\.9 GB free; stop what else uses it"),
            (
                {"compile": RuntimeError("Failed to find CUDA headers\nand more")},
                r"pip install 'cuda-toolkit\[nvrtc,cudart\]==12\.\*'` brings NVRTC.*\(Failed to find CUDA headers\)$",
            ),
            (
                {"compile": PermissionError(13, "Permission denied", "/.cupy")},  # CuPy 13
                r"CuPy can't keep compiled kernels \(.*'/\.cupy'\): set CUPY_CACHE_DIR to a folder that can be written",
            ),
        ],
    )
    def test_each_missing_piece_is_one_sentence_that_says_what_to_do(
        self, changes: dict[str, Any], sentence: str
    ) -> None:
        message = availability(machine(**changes), object())
        assert message is not None
        assert "\n" not in message
        with pytest.raises(BackendError, match=sentence):
            device.check_device(machine(**changes))

    def test_a_newer_architecture_is_fine(self) -> None:
        assert availability(machine(capability="120"), object()) is None

    def test_no_cupy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cupy", None)
        assert availability() == device.NO_CUPY

    def test_a_cupy_that_cannot_be_imported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(name: str) -> Any:
            raise ImportError("libsomething.so: not found")

        monkeypatch.setattr(importlib, "import_module", broken)
        assert "libsomething.so" in (availability() or "")

    def test_a_cupy_that_lacks_something_itself_is_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(name: str) -> Any:
            raise ModuleNotFoundError("No module named 'fastrlock'", name="fastrlock")

        monkeypatch.setattr(importlib, "import_module", broken)
        assert availability() == "CuPy is installed but can't be imported: No module named 'fastrlock'"

    def test_a_home_that_cannot_be_written(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """CuPy 14 makes a folder there while it is imported."""

        def broken(name: str) -> Any:
            raise PermissionError(13, "Permission denied", "/.cupy")

        monkeypatch.setattr(importlib, "import_module", broken)
        assert "set CUPY_CACHE_DIR" in (availability() or "")

    def test_no_cublas(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(name: str) -> Any:
            raise OSError(name)

        monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
        monkeypatch.setattr(ctypes, "CDLL", missing)
        assert "cuda-toolkit[cublas]==12.*" in (availability(machine()) or "")

    @pytest.mark.parametrize(
        ("cuda", "installed", "found"), [(12, "12", "12"), (12, "13", "13"), (12, "1213", "12"), (13, "1213", "13")]
    )
    def test_cublas_by_its_usual_name(
        self, cuda: int, installed: str, found: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of several that of CuPy's CUDA: the driver may be too old for the other."""

        def load(name: str) -> str:
            version = next(version for version in ("12", "13") if version in name)
            if version not in installed:
                raise OSError(name)
            return name

        monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
        monkeypatch.setattr(ctypes, "CDLL", load)
        assert blas.load_library(cuda) in (f"libcublas.so.{found}", f"cublas64_{found}.dll")

    def test_requantizing_is_the_cpus_business(self) -> None:
        with pytest.raises(BackendError, match="quantize = 'q8' needs the numba backend"):
            cuda_backend.create(EngineConfig(), ModelConfig(quantize="q8"))


@pytest.mark.simt
class TestCreate:
    """The first work on a GPU that looked as if it could be used."""

    @pytest.fixture(autouse=True)
    def emulated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device, "import_cupy", lambda: fakecupy)
        monkeypatch.setattr(device, "check_device", lambda _: None)
        monkeypatch.setattr(device, "cuda_major", lambda _: 12)
        monkeypatch.setattr(blas, "load_library", lambda _: FakeBlas())

    def test_it_works(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(CudaBackend, "peaks", lambda _: None)
        backend = cuda_backend.create(EngineConfig(block_size=32), ModelConfig())
        assert (backend.name, backend.block_size) == ("cuda", 32)

    @pytest.mark.parametrize(
        ("error", "sentence"),
        [
            (
                fakecupy.CUDARuntimeError("cudaErrorECCUncorrectable: memory"),
                r"The GPU can't be used \(cudaErrorECC.*\):",
            ),
            (fakecupy.OutOfMemoryError("Out of memory allocating 5 bytes"), r"GPU memory is full: .* Stop what else"),
        ],
    )
    def test_it_fails(self, error: Exception, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(CudaBackend, "peaks", Mock(side_effect=error))
        with pytest.raises(BackendError, match=sentence):
            cuda_backend.create(EngineConfig(), ModelConfig())


class TestSources:
    FILES = {  # noqa: RUF012
        "a.cu": '#include "b.cuh"\n#include "c.cuh"\nint a;',
        "b.cuh": '#pragma once\n#include "c.cuh"\nint b;',
        "c.cuh": "#pragma once\n#include <cuda_fp16.h>\nint c;",
    }

    def test_includes_are_pasted_once_with_line_marks(self) -> None:
        assert flatten("a.cu", self.FILES.__getitem__).splitlines() == [
            '#line 1 "a.cu"',
            '#line 1 "b.cuh"',
            "",
            '#line 1 "c.cuh"',
            "",
            "#include <cuda_fp16.h>",
            "int c;",
            '#line 3 "b.cuh"',
            "int b;",
            '#line 2 "a.cu"',
            "",
            "int a;",
        ]

    def test_the_installed_kernels_are_found(self) -> None:
        assert "__global__" in flatten("rms_norm.cu")
        assert '#include "' not in flatten("prefill_attention.cu")

    def test_names_and_the_largest_shared_memory(self) -> None:
        wanted = Kernels(object())
        first = wanted.get("file", "f", "half", 8, True, shared=10)
        assert wanted.get("file", "f", "half", 8, True, shared=70000) is first
        assert (first.name, first.shared) == ("f<half,8,true>", 70000)
        assert wanted.get("file", "g").name == "g"
        assert wanted.names() == [("file", "f<half,8,true>"), ("file", "g")]

    def test_only_what_is_new_is_compiled_and_large_shared_memory_opted_into(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compiled: list[tuple[str, ...]] = []

        class Module:
            def __init__(self, code: str, options: tuple[str, ...], name_expressions: tuple[str, ...]) -> None:
                compiled.append(name_expressions)

            def get_function(self, name: str) -> Any:
                if name == "bad":
                    raise RuntimeError("does not compile")
                return SimpleNamespace(max_dynamic_shared_size_bytes=0)

        monkeypatch.setattr(kernels, "read_source", lambda name: name)
        wanted, lines = Kernels(SimpleNamespace(RawModule=Module)), list[str]()
        small, large = wanted.get("x", "small", shared=47 * 1024), wanted.get("x", "large", shared=47 * 1024 + 1)
        wanted.compile(lines.append)
        wanted.compile(lines.append)
        assert (compiled, lines) == ([("small", "large")], ["compiling x.cu (2 kernels)"])
        assert small._function.max_dynamic_shared_size_bytes == 0
        assert large._function.max_dynamic_shared_size_bytes == 47 * 1024 + 1
        wanted.get("y", "bad")
        with pytest.raises(BackendError, match=r"y\.cu could not be compiled for this GPU: does not compile"):
            wanted.compile()


class TestBlas:
    def test_a_failing_call_is_named(self) -> None:
        library = SimpleNamespace(
            cublasCreate_v2=lambda handle: 0,
            cublasSetMathMode=lambda *_: 0,
            cublasSetStream_v2=lambda *_: 0,
            cublasSetWorkspace_v2=lambda *_: 0,
            cublasGemmEx=lambda *_: 13,
        )
        array = SimpleNamespace(data=SimpleNamespace(ptr=0))
        cp = SimpleNamespace(
            empty=lambda *_: array, cuda=SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=0))
        )
        handle = Blas(cp, library)
        with pytest.raises(BackendError, match="cublasGemmEx failed with cuBLAS status 13"):
            handle.linear(Output(array, "half", 4), array, array, 1, 4, 8, "half")
