"""Backends: the machines a forward pass runs on, and the choice between them.

Owns the choice. Each backend's module is imported only when it is chosen, so that nothing of Numba or CuPy is loaded,
or needed, otherwise. The packages numba_backend and cuda_backend have one entry, `create`, with create_backend's
arguments.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minserve.backend.base import Backend, BackendError

if TYPE_CHECKING:  # the CUDA backend runs on machines that have NumPy and CuPy only
    from minserve.config import EngineConfig, ModelConfig

NO_NUMBA = (
    "Numba is not installed, so the NumPy backend runs, several times slower; "
    "`pip install numba` where it has a wheel for this Python and processor."
)
NEEDS_NUMBA = "the numba backend needs Numba: `pip install numba`"


def create_backend(
    engine: EngineConfig,
    model: ModelConfig,
    *,
    weights_id: bytes = b"",
    progress: Callable[[str], None] = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
) -> Backend:
    """The backend that engine.backend and engine.device ask for.

    auto takes a GPU that works, else Numba, else NumPy, and gives `note` a sentence when it has to settle for less than
    the machine offers. What was asked for by name runs, or is a BackendError that says what is missing.
    weights_id names the weights, for backends that keep prepared ones between starts.
    """
    name, device = engine.backend, engine.device
    if (name, device) in {("cuda", "cpu"), ("numba", "cuda"), ("numpy", "cuda")}:
        raise BackendError(f"the {name} backend does not run on the device {device}")
    arguments: dict[str, Any] = {"weights_id": weights_id, "progress": progress}
    if name == "cuda" or device == "cuda":
        return _create("cuda_backend", engine, model, arguments)
    if name == "auto" and device == "auto" and _installed("cupy"):
        try:
            return _create("cuda_backend", engine, model, arguments)
        except BackendError as error:
            note(f"CuPy is installed, but no GPU can be used: {error}")
    if name == "numba":
        if not _installed("numba"):
            raise BackendError(NEEDS_NUMBA)
        try:
            return _create("numba_backend", engine, model, arguments)
        except ImportError as error:  # of a NumPy that is too new for it
            raise BackendError(f"numba is installed, but can't be imported: {error}") from error
    if name == "auto" and _installed("numba"):
        try:
            importlib.import_module("numba")
        except ImportError as error:
            note(f"Numba can't be imported, so the NumPy backend runs, several times slower: {error}")
        else:
            return _create("numba_backend", engine, model, arguments)
    elif name == "auto":
        note(NO_NUMBA)
    if model.quantize != "none":
        raise BackendError(f"quantize = {model.quantize!r} needs the numba backend; numpy computes in float32")
    from minserve.backend.numpy_backend import NumpyBackend

    return NumpyBackend(block_size=engine.block_size)


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _create(package: str, engine: EngineConfig, model: ModelConfig, arguments: dict[str, Any]) -> Backend:
    module: Any = importlib.import_module(f"minserve.backend.{package}")
    backend: Backend = module.create(engine, model, **arguments)
    return backend
