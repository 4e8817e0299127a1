"""Two engines on the same random model: NumPy's, which says how sure each of its tokens is, and the CUDA backend's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from minserve.assemble import Assembly
from minserve.backend.cuda_backend.backend import CudaBackend
from minserve.backend.numpy_backend import NumpyBackend
from minserve.request import RequestOutcome, StepRecord, Submission
from tests.engines import Collected, tiny
from tests.simt import fakecupy
from tests.simt.fakeblas import FakeBlas
from tests.simt.witness import Witness


def cuda_backend(**options: Any) -> CudaBackend:
    return CudaBackend(fakecupy, FakeBlas(), **options)


@contextmanager
def on_cuda(**options: Any) -> Iterator[None]:
    """Engines that are assembled inside run on the CUDA backend, on the emulator."""

    def create(engine: Any, model: Any, **_: Any) -> CudaBackend:
        return cuda_backend(block_size=engine.block_size, **options)

    with patch("minserve.assemble.create_backend", create), patch.object(CudaBackend, "peaks", NumpyBackend.peaks):
        yield


class Certainties:
    """Drives an engine whose program is a Witness. tokens: (group, choice) -> tokens; sure: likewise."""

    def __init__(self, model: str, **engine: Any) -> None:
        with patch("minserve.backend.numpy_backend.NumpyProgram", Witness):
            self.engine = tiny(model, backend="numpy", **engine).engine
        self.collected = Collected()
        self.sure: dict[str, list[float]] = {}

    def run(self, *submissions: Submission) -> None:
        program: Any = self.engine.runner.program
        for each in submissions:
            self.engine.submit(each)
        while self.engine.has_work:
            step = self.engine.begin()
            result = self.engine.run(step)
            row = 0
            for chunk in step.plan.chunks:
                row += chunk.scored
                for name in (*[chunk.request_id] * chunk.samples, *chunk.forks):
                    self.sure.setdefault(name, []).append(program.rows[row])
                    row += 1
            self.collected.add(self.engine.complete(step, result))


class Recorded:
    """What an engine did, for a test to look at."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def __call__(self, record: StepRecord | RequestOutcome) -> None:
        if isinstance(record, StepRecord):
            self.steps.append(record)


def cuda_engine(model: str, observer: Recorded, options: dict[str, Any], **engine: Any) -> Assembly:
    with on_cuda(**options):
        return tiny(model, observers=[observer], **engine)
