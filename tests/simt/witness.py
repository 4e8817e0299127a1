"""The NumPy program, noting how sure it is of each token: what 16-bit arithmetic may not change.

A forward pass in 16 bits rounds, so its tokens must agree with NumPy's as long as NumPy is sure of them. Needs NumPy
only: scripts/gpu_check uses it on a bare machine.
"""

from __future__ import annotations

import numpy as np

from minserve.backend.numpy_backend import NumpyProgram
from minserve.backend.sampling import Seats, adjusted, kept_weights, sample
from minserve.batch import Batch, Float32, Sampled, SamplingArrays

# Up to this a token is not compared: logits of float16 and bfloat16 passes differ by about half as much.
SURE = {"half": 1e-2, "bf16": 5e-2}


def certainty(row: Float32, arrays: SamplingArrays, s: int, seats: Seats) -> float:
    """How far this row is from another token: in logits if greedy, else to the edge of the draw, in tenths.

    Tenths, since errors of the logits largely cancel in a cumulative probability.
    """
    logits = adjusted(row, arrays, s, seats)
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
