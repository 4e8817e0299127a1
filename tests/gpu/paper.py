"""Bytes and FLOPs of a step, counted from the instructions that a program would launch, without a GPU.

Owns the counting; predict.py makes times of it. A model is recorded and lowered as always, on arrays that are shapes
only; each instruction then says what it must move and compute. It must not know how to run anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from minserve.backend.base import Heads, StepLimits
from minserve.backend.cuda_backend import ops
from minserve.backend.cuda_backend.attention import Attention, Scratch, decode_launch, decode_splits
from minserve.backend.cuda_backend.kernels import DTYPES, Kernels, cdiv
from minserve.backend.cuda_backend.lowering import Lowering
from minserve.backend.cuda_backend.ops import Buffer, Instruction, Machine
from minserve.backend.cuda_backend.recorder import Recorder
from minserve.backend.cuda_backend.weights import Matrix, Rope, choose_format
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


Stored = Callable[[str], Encoding]


def q4_k_m(layers: int) -> Stored:
    """How llama.cpp's Q4_K_M stores a matrix (untied, of so many layers): half of v and down, and the head, in Q6_K."""

    def stored(name: str) -> Encoding:
        if match := re.search(r"\.(\d+)\.(?:self_attn\.v_proj|mlp\.down_proj)\.", name):
            i, eighth = int(match[1]), layers // 8
            more = i < eighth or i >= 7 * layers // 8 or (i - eighth) % 3 == 2
        else:
            more = name.startswith("lm_head")
        return Encoding.Q6_K if more else Encoding.Q4_K

    return stored


class PaperCheckpoint:
    """Shapes of a known model's tensors. stored: each matrix's encoding (norms and biases are in float32)."""

    def __init__(self, config: Mapping[str, Any], stored: Stored | Encoding) -> None:
        self.config, self._shapes = config, tensor_shapes(config)
        self._stored: Stored = (lambda _: stored) if isinstance(stored, Encoding) else stored

    def names(self) -> Iterable[str]:
        return self._shapes

    def tensor(self, name: str) -> HostTensor:
        shape = self._shapes[name]
        encoding = self._stored(name) if len(shape) == 2 else Encoding.F32
        ones = name.endswith("norm.weight")  # with zeros in the norms a step on a GPU would multiply zeros only
        data = np.full((1, shape[0] if len(shape) == 1 else 0), float(ones), np.float32).view(np.uint8)
        return HostTensor(name, shape, encoding, data)


class PaperBackend:
    """The part of base.Backend that loading a model needs."""

    block_size = 16

    def prepare_linear(self, tensors: Sequence[HostTensor], bias: Any = None, *, pairs: bool = False) -> Matrix:
        n, k, format = sum(t.rows for t in tensors), tensors[0].cols, choose_format(tensors)
        return Matrix.make(empty, format, n, k, bias=None if bias is None else empty(n), pairs=pairs)

    def prepare_embedding(self, tensor: HostTensor, *, tied: bool) -> Matrix:
        return self.prepare_linear([tensor])

    def prepare_vector(self, tensor: HostTensor, *, offset: float = 0.0) -> Paper:
        return empty(tensor.cols)

    def prepare_rope(self, inverse_frequencies: Any, *, scale: float, max_len: int) -> Rope:
        table = empty((max_len, len(inverse_frequencies)))
        return Rope(table, table, len(inverse_frequencies))

    def nbytes(self, weight: Any) -> int:
        return 0 if isinstance(weight, Rope) else int(weight.nbytes)


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes to and from memory, FLOPs, and the launches it takes; joins: whether its last block joins splits."""

    name: str
    bytes: int
    flops: int = 0
    kernels: int = 1
    joins: bool = False


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

    def __init__(self, preset: str, stored: Stored | Encoding = Encoding.BF16, *, sms: int = 132) -> None:
        backend: Any = PaperBackend()
        model = load(PaperCheckpoint(PRESETS[preset], stored), backend)
        cp = SimpleNamespace(empty=empty)
        self.machine = Machine(cp, Kernels(cp), None, "bf16", sms, 16, model.spec.max_model_len, None)  # type: ignore[arg-type]
        recorder, caches = Recorder(), [empty(1) for _ in model.spec.kv]
        output: Any = model.forward(recorder, None, caches)
        limits = StepLimits(8192, 256, 256, model.spec.max_model_len, 1)
        scratch = Scratch(empty(1), empty(1))
        self.instructions = Lowering(self.machine, recorder, output, scratch).finish(limits).instructions
        self.spec = model.spec

    def works(self, load: Load) -> list[Work]:
        return [work for instruction, _ in self.instructions for work in self._work(instruction, load)]

    def _work(self, instruction: Instruction, load: Load) -> Iterator[Work]:
        match instruction:
            case ops.Embed():
                return self._embed(instruction, load)
            case ops.Norm():
                return self._norm(instruction, load)
            case ops.Linear():
                return self._linear(instruction, load)
            case ops.AddBias():
                return self._add_bias(instruction, load)
            case ops.RopeKV():
                return self._rope_kv(instruction, load)
            case Attention():
                return self._attention(instruction, load)
        raise NotImplementedError(type(instruction).__name__)  # of no model that we have

    @staticmethod
    def _rows(buffer: Buffer, load: Load) -> int:
        return len(load.counts) if buffer.sampled else load.tokens

    def _embed(self, i: ops.Embed, load: Load) -> Iterator[Work]:
        yield Work("embed", load.tokens * (i._table.data.shape[1] + 4 * i._table.k), load.tokens * i._table.k)

    def _norm(self, i: ops.Norm, load: Load) -> Iterator[Work]:
        n, x = self._rows(i._out, load) * i._x.cols, DTYPES[i._x.type].itemsize
        added = i._branch is not None
        branch = added * (2 + (0 if i._gather else 4))  # read it, write the sum
        yield Work("rms_norm", n * (x + branch + 2) + 4 * i._x.cols, n * (4 + added))

    def _linear(self, i: ops.Linear, load: Load) -> Iterator[Work]:
        w, rows, x = i._weight, self._rows(i._out, load), 2 * self._rows(i._out, load) * i._weight.k
        size, flops = DTYPES[i._out.type].itemsize, 2 * rows * w.n * w.k
        if rows <= ops.SKINNY_ROWS[w.format]:
            yield Work("skinny_gemm", w.nbytes + x + size * rows * i._out.cols, flops)
            return
        slabs = 1 if w.format == "Dense" else cdiv(w.n, ops.slab_rows(w.k))
        if w.format != "Dense":
            yield Work("dequantize", w.nbytes + 2 * w.n * w.k, w.n * w.k, slabs)
        yield Work("cuBLAS", 2 * w.n * w.k + slabs * x + size * rows * w.n, flops, slabs)
        if i._glu is not None:
            yield Work("glu", 6 * rows * i._out.cols, 5 * rows * i._out.cols)

    def _add_bias(self, i: ops.AddBias, load: Load) -> Iterator[Work]:
        n = self._rows(i._x, load) * i._x.cols
        yield Work("add_bias", 4 * n, n)

    def _rope_kv(self, i: ops.RopeKV, load: Load) -> Iterator[Work]:
        rotated = (i._heads.q + i._heads.kv) * 2 * i._rope.half
        yield Work("rope_kv", load.tokens * (4 * i._heads.cols + 8 * i._rope.half), load.tokens * 3 * rotated)

    def _attention(self, i: Attention, load: Load) -> Iterator[Work]:
        h, requests = i._heads, list(zip(load.counts, load.contexts, strict=True))
        chunks = [(count, context) for count, context in requests if count > 1]
        singles = [(count, context) for count, context in requests if count == 1]
        if chunks:
            yield Work("prefill_attention", *attended(h, chunks))
        if singles:
            splits, (moved, flops) = decode_splits(self.machine, h, len(requests)), attended(h, singles)
            used = [count for _, context in singles if (count := used_splits(h, context, splits)) > 1]
            parts = sum(used) * h.q * (h.dim + 2) * 4  # written, and read by the block that joins them
            yield Work("decode_attention", moved + 2 * parts, flops + parts // 2, joins=bool(used))


def used_splits(h: Heads, context: int, splits: int) -> int:
    """Splits that get any tokens of a context, as decode_attention.cu cuts it."""
    tokens = decode_launch(h.dim)[0] // 2  # 16 for each warp
    whole = context - max(0, context - (h.window or context)) // 16 * 16
    return cdiv(whole, cdiv(whole, splits * tokens) * tokens)


def attended(h: Heads, requests: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Bytes and FLOPs of attention for (new tokens, context) of each request: the cache once, q in, the result out."""
    window, moved, flops = h.window or 1 << 40, 0, 0
    for count, context in requests:
        keys, pairs = min(context, window + count - 1), sum(min(context - j, window) for j in range(count))
        moved += keys * h.kv * 2 * h.dim * 2 + 2 * count * 2 * h.q * h.dim
        flops += 4 * h.q * h.dim * pairs
    return moved, flops


def sampling(rows: int, vocab: int) -> Work:
    """Greedy: one pass over the row, a block each; and the launch."""
    return Work("sample", 4 * rows * vocab, rows * vocab)
