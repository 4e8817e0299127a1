"""The CPU backend: weights packed for the vector units, a forward pass recorded once and replayed by a team of threads.

Owns the contract's Backend. Start with README.md; then packing (how weights lie), linear (the kernel that matters),
lower and tape (how a forward pass becomes rows), team (who replays them).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Literal

import numba
import numpy as np
import numpy.typing as npt

from minserve.backend.base import BackendError, Forward, KVSpec, ModelSpec, Peaks, StepLimits
from minserve.backend.memory import available_memory
from minserve.backend.numba_backend import amx, dot, jit
from minserve.backend.numba_backend.arena import Arena, Bytes, aligned
from minserve.backend.numba_backend.layout import AS_INT8, AS_INT12, BLOCK, width
from minserve.backend.numba_backend.packing import (
    BF16,
    FLOATS,
    FORMATS,
    Q4_1,
    Q8_0,
    ROWS,
    Format,
    Matrix,
    Segment,
    check_columns,
    pack,
)
from minserve.backend.numba_backend.peaks import bandwidth, dot_rate
from minserve.backend.numba_backend.program import NumbaProgram
from minserve.backend.numba_backend.recorder import Rope
from minserve.backend.numba_backend.store import PackedStore
from minserve.backend.tensor import HostTensor
from minserve.config import EngineConfig, ModelConfig

Weight = Matrix | Rope | npt.NDArray[np.float32]


def create(
    engine: EngineConfig, model: ModelConfig, *, weights_id: bytes, progress: Callable[[str], None]
) -> NumbaBackend:
    """The entry of backend.create_backend."""
    if engine.block_size != BLOCK:
        raise BackendError(f"block_size = {engine.block_size}: the numba backend has blocks of {BLOCK} tokens")
    return NumbaBackend(
        threads=engine.threads,
        activations=engine.activations,
        quantize=model.quantize,
        weights_id=weights_id,
        progress=progress,
    )


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class NumbaBackend:
    """threads 0: all usable cores. activations: how they are rounded before they meet quantized weights. quantize: what
    becomes of weights of a float encoding. weights_id: names the weights, so that packed ones can be kept on disk."""

    name = "numba"
    block_size = BLOCK

    def __init__(
        self,
        *,
        threads: int = 0,
        activations: Literal["accurate", "int8"] = "accurate",
        quantize: Literal["none", "q8", "q4"] = "none",
        weights_id: bytes = b"",
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.threads = threads or usable_cores()
        self._accurate = activations == "accurate"
        self._floats = {"none": BF16, "q8": Q8_0, "q4": Q4_1}[quantize]
        self._progress = progress
        self._arena = Arena()
        self._store = PackedStore(f"{weights_id.hex()[:32]}-{quantize}" if weights_id else "")
        self._bf16_bytes = self._int_bytes = 0
        self._loaded: list[Bytes] = []
        self._peaks: Peaks | None = None

    @property
    def description(self) -> str:
        path = "AVX-512 VNNI" if dot.HAS_VNNI else "AVX2" if dot.HAS_AVX2 else "portable vectors"
        path += " and AMX" if amx.HAS_AMX else ""
        bits = "12- to 16-bit" if self._accurate else "8-bit (prompts: bf16)" if amx.HAS_AMX else "8-bit"
        cores = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"Numba {numba.__version__} on {jit.cpu_name()}, {cores}, {path}, {bits} activations, bf16 KV cache"

    def bytes_per_block(self, kv: Sequence[KVSpec]) -> int:
        return sum(2 * 2 * layer.kv_heads * layer.head_dim for layer in kv) * BLOCK

    def free_memory(self) -> int:
        return available_memory()

    def scratch_memory(self, forward: Forward, spec: ModelSpec, limits: StepLimits) -> int:
        return 0

    def peaks(self) -> Peaks:
        """Measured once, in about 0.1 s. Operations are those that a prompt takes in the encoding that most weights
        have, at the dot products of accurate activations."""
        if self._peaks is None:
            bf16 = self._bf16_bytes > self._int_bytes or (amx.HAS_AMX and not self._accurate)
            rate = dot_rate(self.threads, bf16=bf16)
            if self._accurate and not bf16:
                rate *= AS_INT8 / AS_INT12
            self._peaks = Peaks(bandwidth(self.threads, self._loaded), rate)
        return self._peaks

    def _format(self, tensor: HostTensor) -> Format:
        return self._floats if tensor.encoding in FLOATS else FORMATS[tensor.encoding]

    def _packed(self, key: str, form: Format, nbytes: int, write: Callable[[Bytes], None]) -> Bytes:
        """Packed weights: from the store, or written now."""
        key = f"{key} {form.name}"
        data = self._store.get(key, nbytes)
        if data is None:
            data = self._arena.take(nbytes)
            write(data)
            self._store.add(key, data)
        self._loaded.append(data)
        if form is BF16:
            self._bf16_bytes += nbytes
        else:
            self._int_bytes += nbytes
        return data

    def prepare_linear(
        self, tensors: Sequence[HostTensor], bias: HostTensor | None = None, *, pairs: bool = False
    ) -> Matrix:
        cols = check_columns(tensors)
        forms = [self._format(tensor) for tensor in tensors]
        if pairs and len(set(forms)) == 1:
            return self._prepare_pairs(tensors, bias, forms[0])
        groups = [list(tensors)] if len(set(forms)) == 1 else [[tensor] for tensor in tensors]
        segments, start = [], 0
        for i, (form, group) in enumerate(zip(forms, groups, strict=False)):
            last = i + 1 == len(groups)
            rows = sum(tensor.rows for tensor in group)
            if rows % ROWS and not last:
                raise BackendError(f"{group[0].name}: its rows, in an encoding of their own, are not a multiple of 16")
            block = form.block_bytes(width(cols))
            padded = width(start + rows) - start if last else rows  # fills a buffer's row with zeros to its end

            def write(out: Bytes, group: list[HostTensor] = group, form: Format = form, block: int = block) -> None:
                pack(joined(group), form, out.reshape(-1, block))

            data = self._packed(" ".join(tensor.name for tensor in group), form, padded // ROWS * block, write)
            segments.append(Segment(form, start, rows, data, block))
            start += rows
        added = None if bias is None else padded_vector(bias.float32(), start)
        return Matrix(tensors[0].name, start, cols, tuple(segments), added)

    def _prepare_pairs(self, tensors: Sequence[HostTensor], bias: HostTensor | None, form: Format) -> Matrix:
        gate, up = tensors
        if gate.rows != up.rows:
            raise BackendError(f"{gate.name} has {gate.rows} rows, {up.name} {up.rows}")
        block = form.block_bytes(width(gate.cols))

        def write(out: Bytes) -> None:
            blocks = out.reshape(-1, block)
            pack(gate, form, blocks[0::2])
            pack(up, form, blocks[1::2])

        nbytes = 2 * width(gate.rows) // ROWS * block
        data = self._packed(f"{gate.name} | {up.name}", form, nbytes, write)
        both = None
        if bias is not None:  # alternate in blocks of 16, as the rows do
            parts = np.zeros((2, width(gate.rows)), np.float32)
            parts[:, : gate.rows] = bias.float32().reshape(2, -1)
            both = np.ascontiguousarray(parts.reshape(2, -1, 16).swapaxes(0, 1)).reshape(-1)
        return Matrix(gate.name, gate.rows, gate.cols, (Segment(form, 0, gate.rows, data, block),), both, pairs=True)

    def prepare_embedding(self, tensor: HostTensor, *, tied: bool) -> Matrix:
        return self.prepare_linear([tensor])

    def prepare_vector(self, tensor: HostTensor, *, offset: float = 0.0) -> npt.NDArray[np.float32]:
        return padded_vector(tensor.float32() + np.float32(offset), tensor.cols)

    def prepare_rope(self, inverse_frequencies: npt.NDArray[np.float64], *, scale: float, max_len: int) -> Rope:
        angles = np.arange(max_len)[:, None] * inverse_frequencies
        tables = []
        for values in (np.cos(angles), np.sin(angles)):
            table = aligned(values.size * 4).view(np.float32).reshape(values.shape)
            table[:] = values * scale
            tables.append(table)
        return Rope(*tables)

    def nbytes(self, weight: Weight) -> int:
        if isinstance(weight, Rope):
            return weight.cos.nbytes + weight.sin.nbytes
        return weight.nbytes

    def build(self, forward: Forward, spec: ModelSpec, limits: StepLimits) -> NumbaProgram:
        program = NumbaProgram(
            forward, spec, limits, threads=self.threads, accurate=self._accurate, progress=self._progress
        )
        self._store.save()
        return program


def padded_vector(values: npt.NDArray[np.float32], cols: int) -> npt.NDArray[np.float32]:
    """Aligned, and as long as a row of a buffer: the padding holds zeros."""
    out = aligned(width(cols) * 4).view(np.float32)
    out[: len(values)] = values
    return out


def joined(tensors: Sequence[HostTensor]) -> HostTensor:
    """The rows of all tensors as one tensor. Float encodings may differ."""
    if len(tensors) == 1:
        return tensors[0]
    first = tensors[0]
    rows = sum(tensor.rows for tensor in tensors)
    if len({tensor.encoding for tensor in tensors}) == 1:
        return HostTensor(first.name, (rows, first.cols), first.encoding, np.concatenate([t.data for t in tensors]))
    return HostTensor.from_array(first.name, np.concatenate([tensor.float32() for tensor in tensors]))
