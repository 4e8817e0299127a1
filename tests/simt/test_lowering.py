"""What is fused and where results lie; models that are not ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from minserve.backend.base import Heads, KVSpec, ModelSpec
from minserve.backend.cuda_backend.attention import Scratch
from minserve.backend.cuda_backend.lowering import Lowering, live_ranges
from minserve.backend.cuda_backend.program import CudaProgram
from minserve.backend.cuda_backend.recorder import Recorder
from minserve.backend.numpy_backend import NumpyBackend
from minserve.backend.tensor import HostTensor
from minserve.models import load
from minserve.weights.dummy import load_dummy
from tests.helpers import Part, make_batch
from tests.simt import fakecupy
from tests.simt.engines import cuda_backend
from tests.simt.kit import normal
from tests.simt.programs import IDS, LIMITS, program

pytestmark = pytest.mark.simt


def lowered(model: str) -> tuple[list[str], CudaProgram]:
    built = program(model)
    return [type(instruction).__name__ for instruction, _ in built._lowered.instructions], built


class TestLowering:
    def test_llama_is_eight_instructions_a_layer(self) -> None:
        layer = ["Linear", "RopeKV", "Attention", "Linear", "Norm", "Linear", "Linear", "Norm"]
        assert lowered("dummy:llama-tiny:F16")[0] == ["Embed", "Norm", *layer, *layer, "Linear"]

    def test_gemmas_norms_after_a_branch_cost_no_launch(self) -> None:
        layer = ["Linear", "RopeKV", "Attention", "Linear", "Norm", "Linear", "Linear", "Norm"]
        assert lowered("dummy:gemma3-tiny:F16")[0] == ["Embed", "Norm", *layer * 4, "Linear"]

    def test_a_bias_of_qkv_is_added_by_the_rotation(self) -> None:
        assert "AddBias" not in lowered("dummy:qwen2-tiny:F16")[0]

    def test_buffers_that_share_memory_never_live_together(self) -> None:
        backend = cuda_backend(compute="half")
        loaded = load(load_dummy("dummy:gemma3-tiny:F16").checkpoint, backend, 96)
        machine = backend.machine(LIMITS)
        recorder = Recorder()
        caches = [fakecupy.empty(8, np.float16) for _ in loaded.spec.kv]
        output: Any = loaded.forward(recorder, None, caches)
        lowering = Lowering(machine, recorder, output, Scratch(None, None))
        done = lowering.finish(LIMITS)
        ranges = live_ranges([buffers for _, buffers in lowering._uses], done.logits)
        assert len(done.arenas) < len(ranges) / 3
        for (a, (a_first, a_last)), (b, (b_first, b_last)) in combinations(ranges, 2):
            if a.array._memory is b.array._memory:
                assert a_last < b_first or b_last < a_first

    def test_shapes_that_do_not_fit_are_refused(self) -> None:
        backend = cuda_backend(compute="half")
        matrix = backend.prepare_linear([HostTensor.from_array("w", normal(0, 16, 32))])
        recorder = Recorder()
        x = recorder.embed(matrix, None)
        broken: list[Callable[[], Any]] = [
            lambda: recorder.linear(recorder.linear(x, matrix), matrix),
            lambda: recorder.rms_norm(x, fakecupy.empty(8), 1e-5),
            lambda: recorder.add(x, recorder.linear(x, matrix)),
            lambda: recorder.rope_write_kv(x, Heads(1, 1, 16, 1.0), None, None, None),  # type: ignore[arg-type]
            lambda: recorder.attention(x, Heads(2, 2, 16, 1.0), None, None),
        ]
        for mistake in broken:
            with pytest.raises(ValueError, match=r"columns|returned"):
                mistake()


# ---- models that are not ours --------------------------------------------------
class Toy:
    """One layer of width 32 with two heads, and weights by name; `body` is its forward pass."""

    heads = Heads(2, 1, 16, 0.25)

    def __init__(self, body: Callable[[Any, Any, Any, Any], Any], backend: Any) -> None:
        def matrix(seed: int, n: int, k: int, bias: bool = False, pairs: bool = False) -> Any:
            weight = HostTensor.from_array(
                f"w{seed}", normal(seed, n, k, scale=k**-0.5).astype(np.float16).astype("f4")
            )
            extra = HostTensor.from_array(f"b{seed}", normal(seed + 50, n)) if bias else None
            return backend.prepare_linear([weight], extra, pairs=pairs)

        self.embed = backend.prepare_embedding(
            HostTensor.from_array("e", normal(1, 40, 32).astype(np.float16).astype("f4")), tied=False
        )
        self.qkv, self.qkv_bias = matrix(2, 64, 32), matrix(2, 64, 32, bias=True)
        self.o, self.o_bias = matrix(3, 32, 32), matrix(3, 32, 32, bias=True)
        self.up, self.up_bias = matrix(4, 48, 32, pairs=True), matrix(4, 48, 32, bias=True, pairs=True)
        self.down, self.square = matrix(5, 32, 24), matrix(8, 32, 32)
        self.head, self.head_bias = matrix(6, 40, 32), matrix(6, 40, 32, bias=True)
        self.norm = backend.prepare_vector(HostTensor.from_array("n", normal(7, 32) + 1))
        self.rope = backend.prepare_rope(10.0 ** -np.arange(8.0), scale=1.0, max_len=96)
        self.body = body
        self.spec = ModelSpec("toy", 40, 96, (KVSpec(1, 16),), 0, 0, 0)

    def forward(self, ops: Any, batch: Any, kv: Any) -> Any:
        return self.body(self, ops, batch, kv[0])

    def attend(self, ops: Any, x: Any, batch: Any, cache: Any, bias: bool = False) -> Any:
        q = ops.rope_write_kv(ops.linear(x, self.qkv_bias if bias else self.qkv), self.heads, self.rope, batch, cache)
        return ops.attention(q, self.heads, batch, cache)

    def logits(self, ops: Any, x: Any, batch: Any) -> Any:
        return ops.linear(ops.rms_norm(ops.take(x, batch), self.norm, 1e-5), self.head)


def parallel_branches(m: Toy, ops: Any, batch: Any, cache: Any) -> Any:
    """As in GPT-J: both branches from one norm, their sum added at once."""
    x = ops.embed(m.embed, batch, 2.0)
    h = ops.rms_norm(x, m.norm, 1e-5)
    attended = ops.linear(m.attend(ops, h, batch, cache), m.o)
    mlp = ops.linear(ops.glu(ops.linear(h, m.up), "silu"), m.down)
    return m.logits(ops, ops.add(x, ops.add(attended, mlp)), batch)


def norms_after_branches_only(m: Toy, ops: Any, batch: Any, cache: Any) -> Any:
    """As in OLMo 2: products right on the residual stream."""
    x = ops.embed(m.embed, batch)
    x = ops.add(x, ops.rms_norm(ops.linear(m.attend(ops, x, batch, cache, bias=True), m.o), m.norm, 1e-5))
    x = ops.add(x, ops.rms_norm(ops.linear(ops.glu(ops.linear(x, m.up), "gelu"), m.down), m.norm, 1e-3))
    return ops.linear(ops.take(x, batch), m.head)


def biases_everywhere(m: Toy, ops: Any, batch: Any, cache: Any) -> Any:
    x = ops.embed(m.embed, batch)
    attended = m.attend(ops, ops.rms_norm(x, m.norm, 1e-5), batch, cache, bias=True)
    x = ops.add(x, ops.linear(attended, m.o_bias))
    gated = ops.glu(ops.linear(ops.rms_norm(x, m.norm, 1e-5), m.up_bias), "silu")
    x = ops.add(x, ops.linear(gated, m.down))
    return ops.linear(ops.rms_norm(ops.take(x, batch), m.norm, 1e-5), m.head_bias)


def sum_used_twice(m: Toy, ops: Any, batch: Any, cache: Any) -> Any:
    """A sum that is needed after its norm, a residual that is needed after the sum, a product used twice."""
    x = ops.embed(m.embed, batch)
    attended = ops.linear(m.attend(ops, ops.rms_norm(x, m.norm, 1e-5), batch, cache), m.o)
    y = ops.add(x, attended)
    z = ops.add(x, ops.linear(ops.rms_norm(y, m.norm, 1e-5), m.square))
    z = ops.add(ops.add(y, z), attended)
    return m.logits(ops, z, batch)


def sampled_rows_go_on(m: Toy, ops: Any, batch: Any, cache: Any) -> Any:
    """A whole branch after take, and the sum of all rows used besides."""
    x = ops.embed(m.embed, batch)
    x = ops.add(x, ops.linear(m.attend(ops, ops.rms_norm(x, m.norm, 1e-5), batch, cache), m.o))
    y = ops.add(ops.take(x, batch), ops.take(ops.linear(ops.rms_norm(x, m.norm, 1e-5), m.square), batch))
    y = ops.add(y, ops.linear(ops.rms_norm(y, m.norm, 1e-5), m.square))
    return ops.linear(ops.rms_norm(y, m.norm, 1e-5), m.head)


@pytest.mark.parametrize(
    "body",
    [parallel_branches, norms_after_branches_only, biases_everywhere, sum_used_twice, sampled_rows_go_on],
)
def test_any_model_made_of_the_operations_gives_the_numpy_backends_logits(body: Any) -> None:
    """Prompt, chunk beside a decode, decode: with few rows and with more than skinny_gemm takes."""
    built = []
    for backend in (NumpyBackend(), cuda_backend(compute="half")):
        toy = Toy(body, backend)
        built.append(backend.build(toy.forward, toy.spec, LIMITS))
    ids = [i % 40 for i in IDS]
    for batch in (
        make_batch([Part(0, ids[:19], [0, 1], rows=range(19))]),
        make_batch([Part(19, ids[19:20], [0, 1]), Part(0, ids[:7], [5], rows=range(7))]),
        make_batch([Part(20, ids[20:21], [0, 1]), Part(7, ids[7:8], [5])]),
    ):
        want, got = (each.logits(batch) for each in built)
        assert np.abs(got - want).max() < 0.02 * np.abs(want).max()


def test_a_forward_pass_must_end_in_logits_of_the_vocabulary() -> None:
    def no_head(m: Toy, ops: Any, batch: Any, cache: Any) -> Any:
        return ops.rms_norm(ops.take(ops.embed(m.embed, batch), batch), m.norm, 1e-5)

    def narrow_head(m: Toy, ops: Any, batch: Any, cache: Any) -> Any:
        return ops.linear(ops.rms_norm(ops.take(ops.embed(m.embed, batch), batch), m.norm, 1e-5), m.o)

    for body, message in ((no_head, "end with a linear layer"), (narrow_head, "32 columns, the vocabulary has 40")):
        backend = cuda_backend(compute="half")
        toy = Toy(body, backend)
        with pytest.raises(ValueError, match=message):
            backend.build(toy.forward, replace(toy.spec, vocab_size=40), LIMITS)
