"""What the kernel checks stand on: a machine (emulated or real), and arrays of the compute type on it.

The checks in checks_*.py are plain functions of a Kit, so that tests run them on the emulator and scripts/gpu_check on
a GPU, where neither pytest nor ml_dtypes may be installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from minserve.backend.cuda_backend.blas import Blas
from minserve.backend.cuda_backend.kernels import DTYPES, Kernels
from minserve.backend.cuda_backend.ops import SLAB_BYTES, Buffer, Instruction, Machine
from minserve.backend.cuda_backend.step import Shape, Step
from minserve.backend.tensor import BLOCKS, Encoding, HostTensor, bfloat16_to_float32, float32_to_bfloat16
from tests.simt.reference import Float64

# Largest |got - want| / (1 + |want|): a few roundings of the type.
TOLERANCE = {"half": 1.5e-3, "bf16": 1.2e-2, "float": 2e-5}
Check = Callable[["Kit"], None]
SCALES = {  # byte of a float16 -> its usual size, for weights near 1
    Encoding.Q8_0: ((0, 1 / 74),),
    Encoding.Q5_0: ((0, 1 / 9.2),),
    Encoding.Q4_0: ((0, 1 / 4.6),),
    Encoding.Q4_1: ((0, 1 / 4.6), (2, -1.0)),
    Encoding.Q5_1: ((0, 1 / 9.2), (2, -1.0)),
    Encoding.Q4_K: ((0, 1 / 170), (2, 1 / 37)),
    Encoding.Q5_K: ((0, 1 / 340), (2, 1 / 37)),
    Encoding.Q6_K: ((208, 1 / 1370),),
}


@dataclass
class Kit:
    """cp: CuPy or its stand-in. compute: half or bf16."""

    cp: Any
    blas: Blas
    compute: str

    def machine(self, *, sms: int = 4, block_size: int = 16, max_model_len: int = 512) -> Machine:
        slab = self.cp.empty(SLAB_BYTES // 2, DTYPES[self.compute])
        return Machine(self.cp, Kernels(self.cp), self.blas, self.compute, sms, block_size, max_model_len, slab)

    # -- arrays ------------------------------------------------------------------
    def array(self, values: npt.NDArray[Any], kind: str | None = None) -> Any:
        """A device array of the compute type, or of `kind` (also where that is empty)."""
        kind = kind or self.compute
        if kind == "bf16":
            return self.cp.asarray(float32_to_bfloat16(np.asarray(values, np.float32)))
        return self.cp.asarray(np.ascontiguousarray(values, np.float16 if kind == "half" else np.float32))

    def ints(self, values: Any) -> Any:
        return self.cp.asarray(np.ascontiguousarray(values, np.int32))

    def rounded(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """What `array` keeps of these values."""
        if self.compute == "bf16":
            return bfloat16_to_float32(float32_to_bfloat16(np.asarray(values, np.float32)))
        return np.asarray(values, np.float16).astype(np.float32)

    def host(self, array: Any) -> Float64:
        """The numbers of a device array; uint16 are bfloat16s."""
        values = self.cp.asnumpy(array)
        return (bfloat16_to_float32(values) if values.dtype == np.uint16 else values).astype(np.float64)

    def buffer(self, values: npt.NDArray[Any], kind: str | None = None, *, sampled: bool = False) -> Buffer:
        return Buffer(kind or self.compute, values.shape[1], sampled, self.array(values, kind))

    def result(self, rows: int, cols: int, kind: str | None = None, *, sampled: bool = False) -> Buffer:
        """For an instruction to write: starts as NaN."""
        return self.buffer(np.full((rows, cols), np.nan, np.float32), kind, sampled=sampled)

    # -- running -----------------------------------------------------------------
    def run(self, machine: Machine, instruction: Instruction, step: Step) -> None:
        machine.kernels.compile()
        instruction(step)
        self.cp.cuda.get_current_stream().synchronize()

    def compare(self, got: Any, want: npt.NDArray[Any], kind: str | None = None, *, scale: float = 1) -> None:
        """AssertionError unless every number is there within the type's rounding (times `scale`)."""
        values = got if isinstance(got, np.ndarray) else self.host(got)
        error = np.abs(values - want) / (1 + np.abs(want))
        limit = TOLERANCE[kind or self.compute] * scale
        assert values.shape == want.shape, f"shape {values.shape} instead of {want.shape}"
        if want.size:
            at = tuple(int(i) for i in np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape))
            assert error[at] < limit, (
                f"{values[at]} instead of {want[at]} at {at}: error {error[at]:.2e} >= {limit:.1e}"
            )


def step_of(tokens: int, rows: int = 0, *, inputs: Mapping[str, Any] | None = None, counts: Sequence[int] = ()) -> Step:
    """A step of so many tokens and logit rows; counts: new tokens of each request."""
    counts = counts or [tokens]
    return Step(Shape(tokens, len(counts), rows), max(counts), 1 in counts, inputs or {})


def normal(seed: int, *shape: int, scale: float = 1) -> npt.NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def host_tensor(seed: int, rows: int, cols: int, encoding: Encoding) -> HostTensor:
    """Random weights as a file holds them. Quantized: any integers, each block with its own scale and minimum."""
    rng = np.random.default_rng(seed)
    if encoding is Encoding.F32:
        return HostTensor.from_array("weight", rng.standard_normal((rows, cols)).astype(np.float32))
    block = BLOCKS[encoding]
    data = rng.integers(0, 256, (rows, cols // block.weights, block.nbytes), np.uint8)
    for at, size in SCALES[encoding]:
        numbers = rng.uniform(0.5, 1.5, data.shape[:2]) * size
        data[..., at : at + 2] = numbers.astype(np.float16)[..., None].view(np.uint8)
    return HostTensor("weight", (rows, cols), encoding, data.reshape(rows, -1))


def quantized_weights(tensor: HostTensor) -> Float64:
    """The weights that a quantized tensor has on the device: scales and minima in half precision."""
    groups, (n, k) = tensor.groups(), tensor.shape
    scale, minimum = (
        np.float64(0) if a is None else a.astype(np.float16).astype(np.float64).reshape(n, -1, 1)
        for a in (groups.scale, groups.minimum)
    )
    return (groups.q.reshape(n, -1, groups.size) * scale + minimum).reshape(n, k)
