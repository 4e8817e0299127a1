"""What a user is told when no GPU can be used, and the small parts that need neither a GPU nor the emulator."""

from __future__ import annotations

import ctypes
import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from minserve.backend import cuda_backend
from minserve.backend.base import BackendError
from minserve.backend.cuda_backend import availability, blas, device, kernels
from minserve.backend.cuda_backend.blas import Blas, Output
from minserve.backend.cuda_backend.kernels import Kernels, flatten
from minserve.config import EngineConfig, ModelConfig


def machine(**changes: Any) -> Any:
    """A CuPy namespace that says what a healthy machine says, but for the changes."""
    facts: dict[str, Any] = {
        "available": True,
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
                raise RuntimeError(facts["compile"])

    runtime = SimpleNamespace(
        driverGetVersion=lambda: facts["driver"],
        runtimeGetVersion=lambda: facts["built"],
        getDeviceProperties=lambda _: {"name": b"NVIDIA H100"},
    )
    gpu = SimpleNamespace(compute_capability=facts["capability"], mem_info=(facts["free"], 80 << 30))
    cuda = SimpleNamespace(is_available=lambda: facts["available"], runtime=runtime, Device=lambda _: gpu)
    return SimpleNamespace(cuda=cuda, RawModule=Module)


class TestAvailability:
    def test_a_healthy_machine(self) -> None:
        assert availability(machine(), object()) is None

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"available": False, "driver": 0}, r"No NVIDIA driver was found: install it"),
            (
                {"available": False, "driver": 11040},
                r"supports CUDA 11\.4, but this CuPy is made for CUDA 12\.9: update.*or `pip install cupy-cuda11x`",
            ),
            ({"available": False}, r"No NVIDIA GPU is visible: check `nvidia-smi` and CUDA_VISIBLE_DEVICES"),
            ({"capability": "75"}, r"NVIDIA H100 has compute capability 7\.5; the kernels need 8\.0"),
            ({"free": 200 << 20}, r"NVIDIA H100 has 0\.2 of 85\.9 GB free; stop what else uses it"),
            (
                {"compile": "Failed to find CUDA headers\nand more"},
                r"pip install 'cuda-toolkit\[nvrtc,cudart\]==12\.\*'` brings NVRTC.*\(Failed to find CUDA headers\)$",
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

    def test_no_cublas(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(name: str) -> Any:
            raise OSError(name)

        monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
        monkeypatch.setattr(ctypes, "CDLL", missing)
        assert "cuda-toolkit[cublas]" in (availability(machine()) or "")

    def test_cublas_by_its_usual_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def only_12(name: str) -> str:
            if "13" in name:
                raise OSError(name)
            return name

        monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
        monkeypatch.setattr(ctypes, "CDLL", only_12)
        assert blas.load_library() in ("libcublas.so.12", "cublas64_12.dll")

    def test_requantizing_is_the_cpus_business(self) -> None:
        with pytest.raises(BackendError, match="quantize = 'q8' needs the numba backend"):
            cuda_backend.create(EngineConfig(), ModelConfig(quantize="q8"))


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
