"""SmolLM2's own tokenizer, where its file is on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minserve.text.tokenizer import Tokenizer
from minserve.weights.cache import DownloadError
from minserve.weights.checkpoint import load_checkpoint
from minserve.weights.hub import resolve
from minserve.weights.loaded import LoadedModel


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    named = os.environ.get("MINSERVE_TEST_GGUF")
    try:
        path = Path(named) if named else resolve("smollm2-135m-instruct", offline=True)
    except DownloadError:
        pytest.skip("SmolLM2 is not in the cache: run `minserve pull` or set MINSERVE_TEST_GGUF")
    return load_checkpoint(path)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: LoadedModel) -> Tokenizer:
    return Tokenizer.from_source(smollm2.tokenizer)
