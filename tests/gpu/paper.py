"""Bytes and FLOPs of a step, counted from the instructions that a program would launch, without a GPU.

Owns the counting and the predictions in kernels_cuda/README.md. A model is recorded and lowered as always, on arrays
that are shapes only; each instruction then says what it must move and compute. It must not know how to run anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from minserve.backend.base import StepLimits
from minserve.backend.cuda_backend import ops
from minserve.backend.cuda_backend.kernels import Kernels
from minserve.backend.cuda_backend.lowering import Lowering
from minserve.backend.cuda_backend.ops import Buffer, Machine
from minserve.backend.cuda_backend.recorder import Recorder
from minserve.backend.cuda_backend.weights import BITS, Matrix, Rope, choose_format, chunks
from minserve.backend.tensor import Encoding, HostTensor
from minserve.models import load
from minserve.weights.dummy import PRESETS, tensor_shapes


@dataclass(frozen=True, slots=True)
class Paper:
    """An array that is a shape only."""

    shape: tuple[int, ...]
    itemsize: int = 1

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=0)

    def __getitem__(self, index: slice) -> Paper:
        return Paper((len(range(*index.indices(self.shape[0]))), *self.shape[1:]), self.itemsize)

    def view(self, dtype: Any) -> Paper:
        return Paper((self.nbytes // np.dtype(dtype).itemsize,), np.dtype(dtype).itemsize)

    def reshape(self, *shape: int) -> Paper:
        return Paper(shape, self.itemsize)


def empty(shape: int | Sequence[int], dtype: Any = np.float32) -> Paper:
    return Paper((shape,) if isinstance(shape, int) else tuple(shape), np.dtype(dtype).itemsize)


class PaperCheckpoint:
    """Shapes of a known model's tensors, all in one encoding (norms and biases in float32)."""

    def __init__(self, config: Mapping[str, Any], encoding: Encoding) -> None:
        self.config, self._encoding, self._shapes = config, encoding, tensor_shapes(config)

    def names(self) -> Iterable[str]:
        return self._shapes

    def tensor(self, name: str) -> HostTensor:
        shape = self._shapes[name]
        encoding = self._encoding if len(shape) == 2 else Encoding.F32
        ones = name.endswith("norm.weight")  # with zeros in the norms a step on a GPU would multiply zeros only
        data = np.full((1, shape[0] if len(shape) == 1 else 0), float(ones), np.float32).view(np.uint8)
        return HostTensor(name, shape, encoding, data)


class PaperBackend:
    """The part of base.Backend that loading a model needs."""

    block_size = 16

    def prepare_linear(self, tensors: Sequence[HostTensor], bias: Any = None, *, pairs: bool = False) -> Matrix:
        n, k, format = sum(t.rows for t in tensors), tensors[0].cols, choose_format(tensors)
        vector = None if bias is None else empty(n)
        if format == "Dense":
            return Matrix(format, n, k, empty((n, 2 * k), np.uint8), bias=vector, pairs=pairs)
        groups = empty((n, chunks(format, k) * 16 // BITS[format]), np.float16)
        data, minima = empty((n, chunks(format, k) * 64), np.uint8), groups if format == "Int4Min" else None
        return Matrix(format, n, k, data, groups, minima, vector, pairs)

    def prepare_embedding(self, tensor: HostTensor, *, tied: bool) -> Matrix:
        return self.prepare_linear([tensor])

    def prepare_vector(self, tensor: HostTensor, *, offset: float = 0.0) -> Paper:
        return empty(tensor.cols)

    def prepare_rope(self, inverse_frequencies: Any, *, scale: float, max_len: int) -> Rope:
        table = empty((max_len, len(inverse_frequencies)))
        return Rope(table, table, len(inverse_frequencies), max_len)

    def nbytes(self, weight: Any) -> int:
        return 0 if isinstance(weight, Rope) else int(weight.nbytes)


@dataclass(frozen=True, slots=True)
class Work:
    """One launch: bytes to and from memory, FLOPs, and how many kernels it takes."""

    name: str
    bytes: int
    flops: int = 0
    kernels: int = 1


@dataclass(frozen=True, slots=True)
class Load:
    """A step: new tokens and tokens in the cache, of each request; every request gives one logit row."""

    counts: Sequence[int]
    contexts: Sequence[int]

    @property
    def tokens(self) -> int:
        return sum(self.counts)


class PaperProgram:
    """A model's instructions for one GPU. `preset` as in minserve.weights.dummy."""

    def __init__(self, preset: str, encoding: Encoding = Encoding.BF16, *, sms: int = 132) -> None:
        backend: Any = PaperBackend()
        model = load(PaperCheckpoint(PRESETS[preset], encoding), backend)
        cp = SimpleNamespace(empty=empty)
        self.machine = Machine(cp, Kernels(cp), None, "bf16", sms, 16, model.spec.max_model_len, None)  # type: ignore[arg-type]
        recorder, caches = Recorder(), [empty(1) for _ in model.spec.kv]
        output: Any = model.forward(recorder, None, caches)
        limits = StepLimits(8192, 256, 256, model.spec.max_model_len, 1)
        self.instructions = Lowering(self.machine, recorder, output, empty(1)).finish(limits).instructions
        self.spec = model.spec

    def works(self, load: Load) -> list[Work]:
        return [self._work(instruction, load) for instruction, _ in self.instructions]

    def _work(self, i: Any, load: Load) -> Work:
        count: Any = getattr(self, f"_{type(i).__name__}")
        work: Work = count(i, load)
        return work

    @staticmethod
    def _rows(buffer: Buffer, load: Load) -> int:
        return len(load.counts) if buffer.sampled else load.tokens

    def _Embed(self, i: ops.Embed, load: Load) -> Work:
        return Work("embed", load.tokens * (i._table.data.shape[1] + 4 * i._table.k))

    def _Norm(self, i: ops.Norm, load: Load) -> Work:
        n, x = self._rows(i._out, load) * i._x.cols, {"float": 4}.get(i._x.type, 2)
        branch = 0 if i._branch is None else 2 + (0 if i._gather else 4)  # read it, write the sum
        return Work("rms_norm", n * (x + branch + 2) + 4 * i._x.cols)

    def _Linear(self, i: ops.Linear, load: Load) -> Work:
        w, rows = i._weight, self._rows(i._out, load)
        moved = w.nbytes + 2 * rows * w.k + rows * i._out.cols * (4 if i._out.type == "float" else 2)
        flops = 2 * rows * w.n * w.k
        if rows <= ops.SKINNY_ROWS[w.format]:
            return Work("skinny_gemm", moved, flops)
        wide = 3 * 2 * rows * i._out.cols * 2 if i._glu is not None else 0  # gate and up out, and in again
        dense = 0 if w.format == "Dense" else 4 * w.n * w.k  # dequantized weights out and in
        return Work("cuBLAS", moved + wide + dense, flops, 1 + (i._glu is not None))

    def _AddBias(self, i: ops.AddBias, load: Load) -> Work:
        return Work("add_bias", 4 * self._rows(i._x, load) * i._x.cols)

    def _RopeKV(self, i: ops.RopeKV, load: Load) -> Work:
        return Work("rope_kv", load.tokens * (4 * i._heads.cols + 8 * i._rope.half))

    def _Attention(self, i: ops.Attention, load: Load) -> Work:
        h, bytes_, flops = i._heads, 0, 0
        window = h.window or 1 << 40
        splits = ops.decode_splits(self.machine, h, len(load.counts))
        for count, context in zip(load.counts, load.contexts, strict=True):
            keys = min(context, window + count - 1)
            pairs = sum(min(context - j, window) for j in range(count))
            bytes_ += keys * h.kv * 2 * h.dim * 2 + 2 * count * 2 * h.q * h.dim
            bytes_ += 2 * splits * h.q * (h.dim + 2) * 4 if count == 1 and splits > 1 else 0
            flops += 4 * h.q * h.dim * pairs
        decode = max(load.counts) == 1
        name = "decode_attention" if decode else "prefill_attention"
        return Work(name, bytes_, flops, 2 if decode and splits > 1 else 1)


# ---- predictions ---------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Gpu:
    """Published peaks: bytes/s and dense bfloat16 FLOP/s."""

    name: str
    bandwidth: float
    flops: float
    sms: int = 132


GPUS = (Gpu("H100 SXM", 3.35e12, 989e12), Gpu("H200", 4.8e12, 989e12))
COPY = 0.91  # of the published bandwidth that a plain copy reaches (88 - 93 %)
LATENCY = 2.0e-6  # of a kernel that has next to nothing to do, as a node of a graph, start to start
# Of copy bandwidth, where bytes bind, and of the dense rate, where arithmetic does: estimates until measured.
REACHED = {"skinny_gemm": 0.92, "decode_attention": 0.88, "cuBLAS": 0.90, "prefill_attention": 0.40}
RATE = {"cuBLAS": 0.70, "prefill_attention": 0.40, "skinny_gemm": 0.30, "decode_attention": 0.30}


def floor(work: Work, gpu: Gpu) -> float:
    """Seconds that the published peaks allow at best."""
    return max(work.bytes / gpu.bandwidth, work.flops / gpu.flops)


def predicted(work: Work, gpu: Gpu) -> float:
    reached = gpu.bandwidth * COPY * REACHED.get(work.name, 0.7)
    rate = gpu.flops * RATE.get(work.name, 0.1)
    return max(work.bytes / reached, work.flops / rate) + work.kernels * LATENCY


def sampling(rows: int, vocab: int) -> Work:
    """Greedy: one pass over the row, a block each; and the launch."""
    return Work("sampling", 4 * rows * vocab)


CONTEXT, BATCHES = 1024, (1, 8, 64)


def steps_table(program: PaperProgram) -> list[str]:
    """A line per batch size: what a step moves, and its time at the floor and as predicted."""
    lines = [
        f"| batch | weights | KV | GFLOP | {' | '.join(gpu.name for gpu in GPUS)} |",
        "|---|---|---|---|" + "---|" * len(GPUS),
    ]
    weights = program.spec.weight_bytes
    for batch in BATCHES:
        works = step_works(program, batch)
        kv = sum(4 * layer.kv_heads * layer.head_dim for layer in program.spec.kv) * CONTEXT * batch
        flops = sum(work.flops for work in works)
        cells = []
        for gpu in GPUS:
            low = floor(Work("step", weights + kv, flops), gpu)
            high = sum(predicted(work, gpu) for work in works)
            share = f"{low / high:.0%} of the peak, {low / high / COPY:.0%} of a copy"
            cells.append(f"{low * 1e3:.2f} ms, {high * 1e3:.2f} ms: {share}; {batch / high:,.0f} tokens/s")
        lines.append(
            f"| {batch} | {weights / 1e9:.2f} GB | {kv / 1e9:.2f} GB | {flops / 1e9:,.0f} | {' | '.join(cells)} |"
        )
    return lines


def kernels_table(program: PaperProgram) -> list[str]:
    """A line per kernel: launches, MB and microseconds (floor, predicted) of a step on the first GPU."""
    sizes = (BATCHES[0], BATCHES[-1])
    heads = [f"batch {batch}: launches | MB | {GPUS[0].name}, us" for batch in sizes]
    lines = [f"| kernel | {' | '.join(heads)} |", "|---|" + "---|---|---|" * len(sizes)]
    works = {batch: step_works(program, batch) for batch in sizes}
    for name in dict.fromkeys(work.name for batch in sizes for work in works[batch]):
        cells = []
        for batch in sizes:
            mine = [work for work in works[batch] if work.name == name]
            low, high = (sum(f(work, GPUS[0]) for work in mine) * 1e6 for f in (floor, predicted))
            moved, launches = sum(work.bytes for work in mine) / 1e6, sum(work.kernels for work in mine)
            cells.append(f"{launches} | {moved:,.1f} | {low:,.0f}, {high:,.0f}" if mine else "- | - | -")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def step_works(program: PaperProgram, batch: int) -> list[Work]:
    load = Load([1] * batch, [CONTEXT] * batch)
    return [*program.works(load), sampling(batch, program.spec.vocab_size)]


def report() -> str:
    """The generated part of kernels_cuda/README.md that needs no compiler."""
    program = PaperProgram("llama-8b")
    return "\n".join([*steps_table(program), "", *kernels_table(program)])
