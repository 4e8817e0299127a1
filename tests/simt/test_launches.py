"""What instructions launch: the grids that kernels_cuda/README.md promises."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minserve.backend.base import Heads
from minserve.backend.cuda_backend import ops
from minserve.backend.cuda_backend.attention import Attention, Scratch, decode_splits
from minserve.backend.cuda_backend.backend import MAX_REQUESTS
from minserve.backend.cuda_backend.blas import Output
from minserve.backend.cuda_backend.kernels import Kernels
from minserve.backend.cuda_backend.ops import Buffer, Instruction, Machine, NormWeight
from minserve.backend.cuda_backend.step import Shape, Step
from minserve.backend.cuda_backend.weights import Matrix, Rope
from tests.simt.emulator import MAX_GRID_YZ
from tests.simt.kernel_readme import README

Launch = tuple[str, tuple[int, ...], int]  # kernel, grid, threads
INPUTS: Mapping[str, Any] = defaultdict(lambda: None)


class Recording:
    """A CuPy namespace whose kernels only note how they were launched."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def RawModule(self, **_: Any) -> Any:
        def get_function(name: str) -> Any:
            def launch(grid: tuple[int, ...], block: tuple[int, ...], *_: Any, **__: Any) -> None:
                self.launches.append((name.split("<")[0], grid, block[0]))

            return launch

        return SimpleNamespace(get_function=get_function)


def machine(cp: Recording, linear: Callable[..., None] = lambda *_: None) -> Machine:
    """linear: what cuBLAS does."""
    blas: Any = SimpleNamespace(linear=linear)
    return Machine(cp, Kernels(cp), blas, "half", sms=4, block_size=16, max_model_len=512, slab=None)


def launched(cp: Recording, m: Machine, instruction: Instruction, step: Step) -> list[Launch]:
    m.kernels.compile()
    cp.launches.clear()
    instruction(step)
    return list(cp.launches)


def step(tokens: int, requests: int = 1, rows: int = 1, longest: int = 1) -> Step:
    return Step(Shape(tokens, requests, rows), longest, longest == 1, INPUTS)


def buffer(cols: int, *, sampled: bool = False) -> Buffer:
    return Buffer("half", cols, sampled)


# ---- the table ---------------------------------------------------------------------
def table() -> dict[str, str]:
    """Kernel -> its cell "grid x threads"."""
    cells = [line.split(" | ") for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return {name: row[2] for row in cells if len(row) == 5 for name in re.findall(r"`(\w+)`", row[0])}


def promised(cell: str, symbols: Mapping[str, int]) -> tuple[tuple[int, ...], int]:
    """Grid and threads of a cell: of its last alternative whose condition, before a colon, holds."""

    def value(words: str) -> int:
        expression = re.sub(r"(\w) (?=\w)", r"\1 * ", words)  # "n k" is a product
        return math.ceil(eval(expression, {}, dict(symbols)))

    shape = ""
    for alternative in cell.split("; "):
        condition, _, rest = alternative.rpartition(": ")
        if not condition or eval(condition, {}, dict(symbols)):
            shape = rest
    grid, threads = shape.rsplit(" x ", 1)
    return tuple(value(size) for size in grid.split(", ")), value(threads)


def cases(m: Machine) -> Iterator[tuple[str, Instruction, Step, dict[str, int]]]:
    """Each instruction once for each alternative of its kernel's cell, with the table's symbols."""
    d, f, tokens, rows = 96, 40, 301, 7
    many = {"T": tokens, "S": rows, "elements": tokens * d, "sampled": False}
    at, weight, x = step(tokens, rows=rows), Matrix("Dense", 72, d, None), buffer(d)
    norm = NormWeight(None, 1e-5)
    yield "embed", ops.Embed(m, x, weight, 1.0), at, many
    yield "take", ops.Take(m, buffer(d, sampled=True), x), at, many
    yield "rms_norm", ops.Norm(m, x, x, norm), at, many
    yield "rms_norm", ops.Norm(m, buffer(d, sampled=True), x, norm), at, many | {"sampled": True}
    yield "add", ops.Add(m, x, x, x), at, many
    yield "cast", ops.Cast(m, x, buffer(d)), at, many
    yield "add_bias", ops.AddBias(m, x, None), at, many
    yield "glu", ops.Glu(m, buffer(f), buffer(2 * f), "silu"), at, many | {"F": f}
    for glu in (False, True):
        out = buffer(36 if glu else 72)
        linear = ops.Linear(m, out, x, weight, "silu" if glu else None, buffer(72) if glu else None)
        yield "skinny_gemm", linear, step(5), {"n": out.cols, "glu": glu}
    quantized = Matrix("Int8", 72, d, None)
    yield "dequantize", ops.Linear(m, buffer(72), x, quantized), at, {"n": 72, "k": d}
    scratch = Scratch(np.empty(1 << 20), None)
    for dim in (96, 256):
        heads = Heads(6, 2, dim, 1.0)
        sizes = {"H": 6, "KV": 2, "D": dim, "T": tokens, "R": 3}
        rope = ops.RopeKV(m, buffer(heads.cols), heads, Rope(None, None, dim // 2), None)
        yield "rope_kv", rope, at, sizes
        attention = Attention(m, buffer(6 * dim), buffer(heads.cols), heads, None, scratch)
        yield "prefill_attention", attention, step(tokens, 3, longest=100), sizes | {"rows": 300}
        splits = decode_splits(m, heads, 3)
        assert splits > 1
        yield "decode_attention", attention, step(3, 3), sizes | {"splits": splits}


def test_the_readmes_grids_and_threads_are_those_that_are_launched() -> None:
    cp, cells = Recording(), table()
    m = machine(cp)
    for name, instruction, at, symbols in cases(m):
        found = [(grid, threads) for kernel, grid, threads in launched(cp, m, instruction, at) if kernel == name]
        assert found == [promised(cells[name], symbols)], f"{name} with {symbols}"


def test_no_step_asks_for_more_blocks_than_a_grid_has() -> None:
    """65,535 along y and z; as many tokens as memory holds, since those are counted along x."""
    cp = Recording()
    m = machine(cp)
    for name, instruction, *_ in cases(m):
        for longest in (1, 1_000_000):
            large = Step(Shape(1_000_000, MAX_REQUESTS, MAX_REQUESTS), longest, longest == 1, INPUTS)
            for _, grid, _ in launched(cp, m, instruction, large):
                assert grid[0] < 2**31, name
                assert max(grid[1:], default=1) <= MAX_GRID_YZ, name


@pytest.mark.parametrize("k", [64, 4096, 8960, 11008, 14336, 18944, 53248])
def test_slabs_of_dequantized_weights_begin_at_aligned_columns(k: int) -> None:
    outputs: list[Output] = []
    cp, n = Recording(), 50_000
    m = machine(cp, lambda out, *_: outputs.append(out))
    launched(cp, m, ops.Linear(m, buffer(n), buffer(k), Matrix("Int8", n, k, None)), step(17))
    firsts = [out.first for out in outputs]
    assert all(2 * first % 16 == 0 for first in firsts)
    assert all((b - a) * 2 * k <= ops.SLAB_BYTES for a, b in pairwise([*firsts, n]))


@pytest.mark.parametrize("cell", ["n / 4 x 32", "n / 4, T x 32", "n / 4 x 32; D > 64: 2 T x 64"])
def test_how_the_table_is_read(cell: str) -> None:
    symbols = {"n": 9, "T": 5, "D": 128}
    assert (
        promised(cell, symbols)
        == {
            "n / 4 x 32": ((3,), 32),
            "n / 4, T x 32": ((3, 5), 32),
            "n / 4 x 32; D > 64: 2 T x 64": ((10,), 64),
        }[cell]
    )
