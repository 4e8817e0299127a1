"""Which backend runs: what was asked for, else the best that works, and a word where it is less."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import minserve.backend
from minserve.backend import create_backend
from minserve.backend.base import BackendError
from minserve.config import EngineConfig, ModelConfig


def choose(
    monkeypatch: pytest.MonkeyPatch, installed: set[str], quantize: Any = "none", **engine: Any
) -> tuple[Any, list[str]]:
    """What create_backend gives where only `installed` is installed, and what it tells."""
    monkeypatch.setattr(minserve.backend, "_installed", lambda module: module in installed)
    lines: list[str] = []
    return create_backend(EngineConfig(**engine), ModelConfig(quantize=quantize), note=lines.append), lines


def test_numpy_runs_when_asked_for_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, lines = choose(monkeypatch, {"numba", "cupy"}, backend="numpy", block_size=32)
    assert (backend.name, backend.block_size, lines) == ("numpy", 32, [])


def test_numpy_steps_in_for_numba_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, lines = choose(monkeypatch, set())
    assert backend.name == "numpy"
    assert lines == [minserve.backend.NO_NUMBA]


def test_numpy_steps_in_for_a_numba_that_can_not_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a NumPy that is too new for it."""
    monkeypatch.setitem(sys.modules, "numba", None)
    backend, lines = choose(monkeypatch, {"numba"})
    assert backend.name == "numpy"
    assert len(lines) == 1
    assert "Numba can't be imported, so the NumPy backend runs" in lines[0]
    monkeypatch.setitem(sys.modules, "minserve.backend.numba_backend", None)
    with pytest.raises(BackendError, match="numba is installed, but can't be imported"):
        choose(monkeypatch, {"numba"}, backend="numba")


@pytest.mark.parametrize(("installed", "name"), [({"cupy", "numba"}, "numba"), ({"cupy"}, "numpy")])
def test_a_gpu_that_can_not_be_used_is_told_and_the_cpu_steps_in(
    installed: set[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CUDARuntimeError(RuntimeError):
        pass

    def no_driver() -> int:
        raise CUDARuntimeError("cudaErrorInsufficientDriver")

    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=no_driver,
        driverGetVersion=lambda: 0,
        runtimeGetVersion=lambda: 12090,
    )
    cupy = SimpleNamespace(__version__="13.6.0", cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    backend, lines = choose(monkeypatch, installed)
    assert backend.name == name
    assert "CuPy is installed, but no GPU can be used: No NVIDIA driver was found" in lines[0]
    assert lines[1:] == ([] if name == "numba" else [minserve.backend.NO_NUMBA])
    with pytest.raises(BackendError, match="No NVIDIA driver was found"):
        choose(monkeypatch, installed, device="cuda")


@pytest.mark.parametrize(
    ("engine", "quantize", "message"),
    [
        ({"backend": "numba"}, "none", "needs Numba: `pip install numba`"),
        ({"backend": "cuda"}, "none", "CuPy is not installed: `pip install"),
        ({"device": "cuda"}, "none", "CuPy is not installed: `pip install"),
        ({"backend": "cuda", "device": "cpu"}, "none", "the cuda backend does not run on the device cpu"),
        ({"backend": "numpy", "device": "cuda"}, "none", "the numpy backend does not run on the device cuda"),
        ({"backend": "numpy"}, "q8", "quantize = 'q8' needs the numba backend"),
    ],
)
def test_what_was_asked_for_and_cannot_run_is_an_error(
    monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any], quantize: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendError, match=message):
        choose(monkeypatch, set(), quantize, **engine)
