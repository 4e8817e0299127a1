"""Two engines on the same random model: NumPy's, which says how sure each of its tokens is, and the CUDA backend's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from minserve.assemble import Assembly
from minserve.backend.cuda_backend.backend import CudaBackend
from minserve.backend.numpy_backend import NumpyBackend, NumpyProgram
from minserve.backend.sampling import Seats, kept_weights, sample
from minserve.batch import Batch, Float32, Sampled, SamplingArrays
from minserve.request import RequestOutcome, StepRecord, Submission
from tests.engines import Collected, tiny
from tests.simt import fakecupy
from tests.simt.fakeblas import FakeBlas


def cuda_backend(**options: Any) -> CudaBackend:
    return CudaBackend(fakecupy, FakeBlas(), **options)


@contextmanager
def on_cuda(**options: Any) -> Iterator[None]:
    """Engines that are assembled inside run on the CUDA backend, on the emulator."""

    def create(engine: Any, model: Any, **_: Any) -> CudaBackend:
        return cuda_backend(block_size=engine.block_size, **options)

    with patch("minserve.assemble.create_backend", create), patch.object(CudaBackend, "peaks", NumpyBackend.peaks):
        yield


def certainty(row: Float32, arrays: SamplingArrays, s: int, seats: Seats) -> float:
    """How far this row is from another token: in logits if greedy, else to the edge of the draw, in tenths.

    Tenths, since errors of the logits largely cancel in a cumulative probability.
    """
    logits = row.astype(np.float32)
    seats.penalize(logits, int(arrays.seats[s]), arrays.penalties[s])
    bias = slice(arrays.bias_starts[s], arrays.bias_starts[s + 1])
    np.add.at(logits, arrays.bias_ids[bias], arrays.bias_values[bias])
    if arrays.mask is not None:
        bits = np.unpackbits(arrays.mask[s].astype("<u4").view(np.uint8), bitorder="little")
        logits[bits[: len(logits)] == 0] = -np.inf
    if arrays.temperature[s] <= 0:
        first, second = np.sort(logits)[-2:][::-1]
        return float(first - second)
    edges = np.cumsum(kept_weights(logits, arrays, s), dtype=np.float64)
    return float(10 * np.abs(edges / edges[-1] - arrays.uniforms[s]).min())


class Witness(NumpyProgram):
    """The NumPy program, noting the certainty of each row of the last step."""

    rows: list[float]

    def run(self, batch: Batch) -> Sampled:
        logits = self.logits(batch)
        for reset in batch.resets:
            self._seats.reset(reset)
        self.rows = [certainty(row, batch.sampling, s, self._seats) for s, row in enumerate(logits)]
        return sample(logits, batch.sampling, self._seats)


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
