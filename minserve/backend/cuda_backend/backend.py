"""The CUDA backend: weights, sizes and programs for one NVIDIA GPU.

Owns the choice of the compute type and the accounting of memory. CuPy's namespace and cuBLAS are handed in, so that
tests can put stand-ins there. It must not know files, requests or HTTP.

Weights of float16 files compute in float16, everything else in bfloat16; the residual stream and all sums are float32.
The KV cache has the compute type.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from minserve.backend.base import BackendError, Forward, KVSpec, ModelSpec, Peaks, StepLimits
from minserve.backend.cuda_backend.blas import Blas, Output
from minserve.backend.cuda_backend.device import enough_memory
from minserve.backend.cuda_backend.kernels import DTYPES, Kernels, Progress
from minserve.backend.cuda_backend.ops import SLAB_BYTES, Machine
from minserve.backend.cuda_backend.program import CudaProgram, scratch_memory
from minserve.backend.cuda_backend.weights import Matrix, Rope, Uploader
from minserve.backend.tensor import Encoding, HostTensor

MAX_HEAD_DIM = 256
MAX_REQUESTS = 65535  # blocks of a grid along y and z
RESERVED_BYTES = 128 << 20  # graphs, modules, what a step allocates by the way: not for the KV cache
WEIGHTS_ADVICE = (
    "The weights don't fit: take a smaller model, or a GGUF file, which stays quantized: Q8_0 takes 8.5 bits a weight, "
    "Q6_K 7.5, Q5_K 6, Q4_K 5, Q4_0 4.5; F16, BF16 and F32 take 16 bits a weight."
)
PEAK_COPY_BYTES = 1 << 28  # read, and as many written
PEAK_COPY_BLOCK = 1 << 16
PEAK_GEMM = 4096  # a product of three square matrices of this size


class CudaBackend:
    """See base.Backend."""

    name = "cuda"

    def __init__(
        self,
        cp: Any,
        blas_library: Any,
        *,
        block_size: int = 16,
        compute: str | None = None,
        graphs: bool = True,
        progress: Progress = lambda _: None,
    ) -> None:
        """compute: half or bf16; None lets the first matrix decide."""
        self._cp, self._compute, self._graphs, self._progress = cp, compute, graphs, progress
        self.block_size = block_size
        self._blas = Blas(cp, blas_library)
        self._slab = cp.empty(SLAB_BYTES, np.uint8)
        self._device = cp.cuda.Device(0)

    @property
    def description(self) -> str:
        name = self._cp.cuda.runtime.getDeviceProperties(0)["name"].decode()
        capability, total = str(self._device.compute_capability), self._device.mem_info[1] / 1e9
        kind = {"half": "float16", "bf16": "bfloat16", None: "16-bit"}[self._compute]
        version = f"compute capability {capability[:-1]}.{capability[-1]}"
        return f"{name}, {version}, {total:.0f} GB, {kind} activations and KV cache, CuPy {self._cp.__version__}"

    def bytes_per_block(self, kv: Sequence[KVSpec]) -> int:
        return sum(2 * 2 * layer.kv_heads * layer.head_dim for layer in kv) * self.block_size

    def free_memory(self) -> int:
        self._cp.get_default_memory_pool().free_all_blocks()
        return max(0, int(self._device.mem_info[0]) - RESERVED_BYTES)

    def scratch_memory(self, forward: Forward, spec: ModelSpec, limits: StepLimits) -> int:
        return scratch_memory(self.machine(limits), forward, spec, limits)

    def peaks(self) -> Peaks:
        return self._peaks

    @cached_property
    def _peaks(self) -> Peaks:
        """What a copy (read + write) by a kernel of ours and a product by cuBLAS reach here."""
        with self._cp.cuda.Stream(non_blocking=True) as stream:
            return Peaks(2 * PEAK_COPY_BYTES / self._time_copy(stream), 2 * PEAK_GEMM**3 / self._time_product(stream))

    def _time_copy(self, stream: Any) -> float:
        cp, kernels = self._cp, Kernels(self._cp)
        copy = kernels.get("copy_blocks", "copy_blocks")
        kernels.compile()
        blocks = PEAK_COPY_BYTES // PEAK_COPY_BLOCK
        memory = cp.zeros(2 * PEAK_COPY_BYTES, np.uint8)
        pools, sizes = np.array([memory.data.ptr], np.uint64), np.array([PEAK_COPY_BLOCK], np.int32)
        pairs = np.arange(2 * blocks, dtype=np.int32).reshape(2, blocks).T
        arguments = [cp.asarray(np.ascontiguousarray(array)) for array in (pools, sizes, pairs)]
        return fastest(lambda: copy((blocks, 1), 256, *arguments), stream)

    def _time_product(self, stream: Any) -> float:
        cp, n = self._cp, PEAK_GEMM
        some = np.random.default_rng(0).integers(0x3C00, 0x4000, 1 << 16, np.uint16)  # zeros would draw less power
        a, b = (cp.asarray(np.resize(some, (n, n))) for _ in range(2))
        out = Output(cp.empty((n, n), np.uint16), "bf16", n)
        return fastest(lambda: self._blas.linear(out, a, b, n, n, n, "bf16"), stream)

    def _uploader(self, tensor: HostTensor) -> Uploader:
        if self._compute is None:
            self._compute = "half" if tensor.encoding is Encoding.F16 else "bf16"
        return Uploader(self._cp, self._compute)

    def prepare_linear(
        self, tensors: Sequence[HostTensor], bias: HostTensor | None = None, *, pairs: bool = False
    ) -> Matrix:
        with enough_memory(self._cp, WEIGHTS_ADVICE):
            return self._uploader(tensors[0]).matrix(tensors, bias, pairs=pairs)

    def prepare_embedding(self, tensor: HostTensor, *, tied: bool) -> Matrix:
        return self.prepare_linear([tensor])

    def prepare_vector(self, tensor: HostTensor, *, offset: float = 0.0) -> Any:
        with enough_memory(self._cp, WEIGHTS_ADVICE):
            return self._cp.asarray(np.ascontiguousarray(tensor.float32() + np.float32(offset)))

    def prepare_rope(self, inverse_frequencies: npt.NDArray[np.float64], *, scale: float, max_len: int) -> Rope:
        angles = np.arange(max_len)[:, None] * inverse_frequencies  # float64
        cos, sin = (np.ascontiguousarray(f(angles) * scale, np.float32) for f in (np.cos, np.sin))
        with enough_memory(self._cp, "Lower max_model_len."):
            return Rope(self._cp.asarray(cos), self._cp.asarray(sin), angles.shape[1])

    def nbytes(self, weight: Matrix | Rope | Any) -> int:
        if isinstance(weight, Rope):
            return int(weight.cos.nbytes + weight.sin.nbytes)
        return int(weight.nbytes)

    def build(self, forward: Forward, spec: ModelSpec, limits: StepLimits) -> CudaProgram:
        check_sizes(spec, limits)
        self._cp.cuda.get_current_stream().synchronize()  # uploads, before another stream reads them
        with enough_memory(self._cp, "Lower memory_fraction, max_num_batched_tokens or max_logit_rows."):
            machine = self.machine(limits)
            return CudaProgram(machine, forward, spec, limits, graphs=self._graphs, progress=self._progress)

    def machine(self, limits: StepLimits) -> Machine:
        """What the instructions of a program are made for."""
        compute = self._compute or "bf16"
        return Machine(
            cp=self._cp,
            kernels=Kernels(self._cp),
            blas=self._blas,
            compute=compute,
            sms=int(self._device.attributes["MultiProcessorCount"]),
            block_size=self.block_size,
            max_model_len=limits.max_model_len,
            slab=self._slab.view(DTYPES[compute]),
        )


def check_sizes(spec: ModelSpec, limits: StepLimits) -> None:
    if limits.max_requests > MAX_REQUESTS:
        raise BackendError(f"max_num_seqs is {limits.max_requests}: a GPU takes at most {MAX_REQUESTS}")
    for kv in spec.kv:
        if kv.head_dim % 16 or not 16 <= kv.head_dim <= MAX_HEAD_DIM:
            raise BackendError(
                f"heads of {kv.head_dim} numbers are not supported on a GPU, only multiples of 16 up to {MAX_HEAD_DIM}"
            )


def fastest(work: Callable[[], None], stream: Any, *, rounds: int = 4, repeats: int = 8) -> float:
    """Seconds of one call, the best of a few rounds of calls in a row (the first also compiles and warms up)."""
    seconds = []
    for _ in range(rounds):
        stream.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        stream.synchronize()
        seconds.append((time.perf_counter() - start) / repeats)
    return min(seconds)
