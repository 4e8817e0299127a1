"""What the checks run on: a real GPU, or the emulator.

Owns the difference between the two: CuPy's namespace, cuBLAS, and one compilation per kernel file instead of one per
check, which is most of the time on either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minserve.backend.cuda_backend.backend import CudaBackend
from minserve.backend.cuda_backend.blas import Blas, load_library
from minserve.backend.cuda_backend.device import check_device, cuda_major, import_cupy
from minserve.backend.cuda_backend.kernels import flatten
from tests.simt.instances import INSTANCES, TEST_ONLY
from tests.simt.kit import Kit


class Bundled:
    """CuPy's namespace, but a module compiles every instantiation that its file is known for, once."""

    def __init__(self, cp: Any) -> None:
        self._cp, self._modules = cp, dict[str, Any]()
        self._bundles = {flatten(f"{f}.cu"): [*names, *TEST_ONLY.get(f, ())] for f, names in INSTANCES.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cp, name)

    def RawModule(self, *, code: str, options: Sequence[str], name_expressions: Sequence[str]) -> Any:
        names = self._bundles.get(code, [])
        if not set(name_expressions) <= set(names):
            return self._cp.RawModule(code=code, options=options, name_expressions=name_expressions)
        if code not in self._modules:
            self._modules[code] = self._cp.RawModule(code=code, options=options, name_expressions=tuple(names))
        return self._modules[code]


@dataclass(frozen=True)
class Target:
    """cp: CuPy or its stand-in. blas: cuBLAS as a ctypes library, or its stand-in."""

    cp: Any
    blas: Any
    simulated: bool

    def kit(self, compute: str) -> Kit:
        return Kit(self.cp, Blas(self.cp, self.blas), compute)

    def backend(self, compute: str, *, graphs: bool = True) -> CudaBackend:
        return CudaBackend(self.cp, self.blas, compute=compute, graphs=graphs)


def gpu() -> Target:
    """BackendError with one sentence if there is none."""
    cp = import_cupy()
    check_device(cp)
    return Target(Bundled(cp), load_library(cuda_major(cp)), simulated=False)


def emulator() -> Target:
    from tests.simt import build, fakecupy
    from tests.simt.fakeblas import FakeBlas

    reason = build.missing()
    if reason:
        raise RuntimeError(reason)
    return Target(Bundled(fakecupy), FakeBlas(), simulated=True)
