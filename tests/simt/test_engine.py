"""The whole engine on the CUDA backend: the tokens of the NumPy backend, for every model family.

A 16-bit forward pass rounds, so tokens must agree as long as the NumPy backend is sure of them: the best logit ahead by
more than 1e-2 in float16 (5e-2 in bfloat16, whose mantissa is three bits shorter), or the random number
more than 1e-3 away from the edge between two tokens. A request is compared up to its first unsure token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from minserve.assemble import Assembly
from minserve.backend.tensor import HostTensor
from minserve.request import Submission
from minserve.weights.dummy import PRESETS, DummyCheckpoint
from tests.engines import Collected, run, submission
from tests.gpu.paper import q4_k_m
from tests.simt import instances
from tests.simt.engines import Certainties, Recorded, cuda_engine
from tests.simt.fakestream import Graph, Stream
from tests.simt.witness import SURE

pytestmark = pytest.mark.simt
# Small enough that four requests don't fit: somebody is preempted.
LIMITS: dict[str, Any] = {
    "block_size": 16,
    "num_blocks": 10,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "max_model_len": 128,
    "max_logit_rows": 24,
}
SYSTEM = [(i * 37 + 11) % 256 for i in range(35)]  # a shared prefix of two blocks and a bit
WIDE = PRESETS["llama-tiny"] | {  # K-quants come in blocks of 256 weights
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "head_dim": 64,
}


def prompt(seed: int, length: int) -> list[int]:
    return SYSTEM + [(i * i * 7 + i * 13 + seed * 29) % 256 for i in range(length)]


def first_wave() -> list[Submission]:
    """No top_k or top_p: at their edge a rounding decides whether a token belongs, and so moves every draw."""
    return [
        submission(prompt(1, 20), "greedy", max_tokens=26, ignore_eos=True),
        submission(prompt(2, 9), "seeded", max_tokens=30, temperature=0.3, seed=5, ignore_eos=True),
        submission(prompt(3, 4)[30:], "forked", n=3, max_tokens=6, temperature=0.4, seed=9),
        submission([5], "one token", max_tokens=40, repetition_penalty=1.3, presence_penalty=0.4, logprobs=3),
        submission(prompt(4, 30), "penalized", max_tokens=24, frequency_penalty=0.8, temperature=0.2, seed=3),
        submission(
            prompt(5, 2),
            "restricted",
            max_tokens=6,
            logit_bias={17: 1.5, 200: -3.0},
            banned_token_ids=frozenset(range(0, 256, 3)),
            min_tokens=3,
        ),
        # Small random models repeat themselves, and are often undecided: this prompt's 20 tokens are neither.
        submission(prompt(13, 12), "varied", max_tokens=20, frequency_penalty=1.0, ignore_eos=True),
    ]


def short_wave() -> list[Submission]:
    """For what depends on the weights alone: a prompt in two chunks, one that decodes beside it, one of one token."""
    return [
        submission(prompt(1, 20), "greedy", max_tokens=18, ignore_eos=True),
        submission(prompt(2, 9), "seeded", max_tokens=18, temperature=0.3, seed=5, ignore_eos=True),
        submission([5], "one token", max_tokens=24, repetition_penalty=1.3, presence_penalty=0.4, logprobs=3),
    ]


def second_wave() -> list[Submission]:
    """Prompts whose beginning is in the prefix index by now."""
    return [
        submission(prompt(1, 20), "again", max_tokens=6),
        submission(prompt(7, 6), "same system prompt", max_tokens=4, prompt_logprobs=2),
    ]


Compared = dict[tuple[str, int], list[int]]  # (group, choice) -> tokens


def compare(sure: dict[str, list[float]], want: Collected, got: Collected, threshold: float) -> Compared:
    """The tokens that were compared. AssertionError where a sure one differs."""
    compared: Compared = {}
    for (group, choice), tokens in want.tokens.items():
        ours, same = got.tokens[group, choice], compared.setdefault((group, choice), [])
        for i, token in enumerate(tokens):
            if sure[f"{group}#{choice}"][i] <= threshold:
                break
            assert i < len(ours), f"{group}#{choice}: {ours} instead of {tokens}"
            assert ours[i] == token, f"{group}#{choice}: {ours} instead of {tokens}, from token {i} on"
            same.append(token)
    return compared


class Launches:
    """Counts graph launches, and the kernels that graphs leave out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graphs = 0
        launch = Graph.launch

        def counted(graph: Graph, stream: Stream | None = None) -> None:
            self.graphs += 1
            launch(graph, stream)

        monkeypatch.setattr(Graph, "launch", counted)


def both(
    model: str, compute: str, waves: Sequence[list[Submission]], sure: float
) -> tuple[Compared, Collected, Recorded, Assembly]:
    """Run the waves on both engines and compare: (the tokens compared, CUDA's tokens, its steps, its engine)."""
    witness, recorded = Certainties(model, **LIMITS), Recorded()
    assembly = cuda_engine(model, recorded, {"compute": compute}, **LIMITS)
    got, compared = Collected(), Compared()
    for wave in waves:
        witness.run(*wave)
        result = run(assembly.engine, *wave)
        compared |= compare(witness.sure, witness.collected, result, sure)
        got.tokens |= result.tokens
        got.last |= result.last
        got.outcomes |= result.outcomes
        witness.collected, witness.sure = Collected(), {}
    program: Any = assembly.engine.runner.program
    known = {
        (file, name) for table in (instances.INSTANCES, instances.TEST_ONLY) for file in table for name in table[file]
    }
    assert set(program._m.kernels.names()) <= known, "tests/simt/instances.py lacks a kernel"
    return compared, got, recorded, assembly


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "phi3"])
def test_same_tokens_as_the_numpy_backend(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked prefill, prefix hits, preemption, forks, graphs, penalties, bias, masks and seeds, for each family."""
    launches = Launches(monkeypatch)
    compared, got, recorded, _ = both(f"dummy:{family}-tiny:F16", "half", [first_wave(), second_wave()], SURE["half"])
    steps = recorded.steps
    varied = compared["varied", 0]
    assert len(varied) >= 16, "too few sure tokens to say anything"
    assert len(set(varied)) >= 9, "too few different ones"
    assert sum(map(len, compared.values())) >= 75
    assert launches.graphs > 10
    assert sum(step.preempted for step in steps) > 0
    assert any(step.decode_tokens and step.prefill_tokens for step in steps), "no step mixed prompts and decodes"
    assert got.outcomes["again", 0].usage.cached >= 32
    assert not [step.failed for step in steps if step.failed]
    assert len(got.tokens) == 11


@pytest.mark.parametrize(
    ("encoding", "compute", "format"),
    [
        ("BF16", "bf16", "Dense"),
        ("Q8_0", "bf16", "Int8"),
        ("Q8_0", "half", "Int8"),
        ("Q5_0", "half", "Int6Min"),
        ("Q5_1", "bf16", "Int5Min"),
        ("Q4_0", "half", "Int4"),
        ("Q4_1", "half", "Int4Min"),
        ("Q4_K", "half", "Int4Min"),
        ("Q5_K", "half", "Int5Min"),
        ("Q6_K", "half", "Int6Min"),
    ],
)
def test_encodings(encoding: str, compute: str, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantized files stay quantized, bfloat16 files compute in bfloat16."""
    monkeypatch.setitem(PRESETS, "llama-wide", WIDE)
    model = f"dummy:llama-{'wide' if encoding.endswith('_K') else 'tiny'}:{encoding}"
    compared, _, _, assembly = both(model, compute, [short_wave()], SURE[compute])
    assert sum(map(len, compared.values())) > (20 if compute == "half" else 8)
    assert compute.replace("half", "float16").replace("bf16", "bfloat16") in assembly.backend.description
    assert formats(assembly) == {format}


def formats(assembly: Assembly) -> set[str]:
    """Of the matrices that some product reads."""
    program: Any = assembly.engine.runner.program
    return {name.split(",")[2] for file, name in program._m.kernels.names() if file == "skinny_gemm"}


def test_a_mixture_of_encodings_as_llama_cpp_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Q4_K_M: q, k and v are read as one, v in another encoding than the others."""
    tensor, stored = DummyCheckpoint.tensor, q4_k_m(WIDE["num_hidden_layers"])

    def mixed(self: DummyCheckpoint, name: str) -> HostTensor:
        self._encoding = stored(name)
        return tensor(self, name)

    monkeypatch.setattr(DummyCheckpoint, "tensor", mixed)
    monkeypatch.setitem(PRESETS, "llama-wide", WIDE)
    compared, _, _, assembly = both("dummy:llama-wide:Q4_K", "half", [short_wave()], SURE["half"])
    assert sum(map(len, compared.values())) > 20
    assert formats(assembly) == {"Int4Min", "Int6Min"}
