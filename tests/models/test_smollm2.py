"""SmolLM2-135M-Instruct (the default model's file) against transformers on the same dequantized weights."""

from __future__ import annotations

import numpy as np
import pytest

from minserve.backend.base import Program, StepLimits
from minserve.backend.numpy_backend import NumpyBackend
from minserve.config import Config
from minserve.models import load
from minserve.terminal import Style, generate_once
from minserve.weights.cache import DownloadError
from minserve.weights.checkpoint import load_checkpoint
from minserve.weights.hub import resolve
from tests.helpers import Part, make_batch
from tests.models.golden import SMOLLM2

BLOCKS = [5, 2, 7, 1, 6, 3, 4]


@pytest.fixture(scope="module")
def program() -> Program:
    try:
        path = resolve("smollm2-135m-instruct", offline=True)
    except DownloadError:
        pytest.skip("SmolLM2 is not in the cache folder (minserve pull fetches it)")
    backend = NumpyBackend(block_size=16)
    model = load(load_checkpoint(path).checkpoint, backend, 512)
    return backend.build(model.forward, model.spec, StepLimits(128, 1, 128, 512, 8))


@pytest.mark.parametrize("chunk", [128, 24])
@pytest.mark.parametrize("prompt", range(4))
def test_smollm2_logits_equal_transformers(program: Program, prompt: int, chunk: int) -> None:
    with np.load(SMOLLM2) as file:
        ids, top_ids, top_logits, largest, last = (
            file[f"{key}_{prompt}"] for key in ("ids", "top_ids", "top_logits", "max", "last")
        )
    chunks = [(at, ids[at : at + chunk].tolist()) for at in range(0, len(ids), chunk)]
    parts = [Part(at, tokens, BLOCKS, rows=range(len(tokens))) for at, tokens in chunks]
    logits = np.concatenate([program.logits(make_batch([part])) for part in parts])
    scale = largest.max()
    assert np.abs(np.take_along_axis(logits, top_ids, axis=1) - top_logits).max() <= 1e-4 * scale
    assert np.abs(np.abs(logits).max(axis=1) - largest).max() <= 1e-4 * scale
    assert np.abs(logits[-1] - last).max() <= 1e-4 * scale
    clear = top_logits[:, 0] - top_logits[:, 1] > 1e-3
    assert (logits.argmax(axis=1) == top_ids[:, 0])[clear].all()


def test_the_capital_of_france_is_paris(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole way, on the backend that this machine gets: text, chat template, engine, text. program: it is there."""
    style = Style(system=None, temperature=0.0, max_tokens=24, seed=None)
    assert generate_once(Config(), "What is the capital of France?", style, raw=False) == 0
    assert "Paris" in capsys.readouterr().out
