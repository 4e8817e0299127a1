"""Models in Hugging Face repositories: which files are fetched, once. No network: the hub is played by a small class of
our own."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from minserve.weights import repository
from minserve.weights.cache import DownloadError
from minserve.weights.hub import cached, clear, resolve

FILES = {
    "config.json": 10,
    "tokenizer.json": 20,
    "model-00001-of-00002.safetensors": 100,
    "model-00002-of-00002.safetensors": 100,
    "model.safetensors.index.json": 5,
    "chat_template.jinja": 1,
    "consolidated.safetensors": 200,
    "original/params.json": 1,
    "pytorch_model.bin": 200,
    "README.md": 1,
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Holds our cache and the hub's."""
    monkeypatch.setenv("MINSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def served(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, int]], list[Any]]:
    """A hub with one repository, whose downloads are recorded."""
    requests: list[Any] = []

    def serve(files: Mapping[str, int]) -> list[Any]:
        class Api:
            def model_info(self, name: str, *, revision: str | None, files_metadata: bool) -> Any:
                if name != "owner/repo":
                    raise huggingface_hub.errors.OfflineModeIsEnabled("no such\nrepository")
                siblings = [SimpleNamespace(rfilename=name, size=size) for name, size in files.items()]
                return SimpleNamespace(sha="c0ffee", siblings=siblings)

        def download(name: str, *, revision: str, allow_patterns: list[str]) -> str:
            requests.append((name, revision, allow_patterns))
            folder = home / "hub" / revision
            for pattern in allow_patterns:
                path = folder / pattern.replace("[[]", "[")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"1" * files[pattern.replace("[[]", "[")])
            return str(folder)

        monkeypatch.setattr(huggingface_hub, "HfApi", Api)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))
        return requests

    return serve


def test_a_repository_is_fetched_once(home: Path, served: Callable[[Mapping[str, int]], list[Any]]) -> None:
    requests = served(FILES)
    with pytest.raises(DownloadError, match="owner/repo is not on this machine, and downloads are off"):
        resolve("owner/repo", offline=True)
    folder = resolve("owner/repo")
    assert folder == home / "hub" / "c0ffee"
    assert resolve("owner/repo", offline=True) == folder
    assert len(requests) == 1
    assert requests[0][:2] == ("owner/repo", "c0ffee")
    assert requests[0][2] == [
        "chat_template.jinja",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert resolve("owner/repo", revision="v2") == folder
    assert len(requests) == 2
    assert {(model.name, model.size) for model in cached()} == {("owner/repo", 236)}


def test_a_repositorys_gguf_file_is_chosen_by_quantization_or_name(
    home: Path, served: Callable[[Mapping[str, int]], list[Any]]
) -> None:
    served({"m-Q4_K_M.gguf": 4, "m-Q8_0.gguf": 8, "sub/m-F16[1].gguf": 16})
    assert resolve("owner/repo:q4_k_m") == home / "hub" / "c0ffee" / "m-Q4_K_M.gguf"
    assert resolve("owner/repo/m-Q8_0.gguf").read_bytes() == b"1" * 8
    with pytest.raises(DownloadError, match=r"no Q5_0 file; its GGUF files: m-Q4_K_M\.gguf, m-Q8_0\.gguf, sub/"):
        resolve("owner/repo:Q5_0")
    with pytest.raises(DownloadError, match="several GGUF files; name one"):
        resolve("owner/repo")
    with pytest.raises(DownloadError, match=r"no file 'x\.gguf'"):
        resolve("owner/repo/x.gguf")


def test_what_a_repository_lacks_is_said_before_the_download(served: Callable[[Mapping[str, int]], list[Any]]) -> None:
    requests = served({"model.safetensors": 1, "config.json": 1})
    with pytest.raises(DownloadError, match=r"has no tokenizer\.json, which minserve needs"):
        resolve("owner/repo")
    served({"pytorch_model.bin": 1})
    with pytest.raises(DownloadError, match="neither safetensors nor GGUF"):
        resolve("owner/repo")
    with pytest.raises(DownloadError, match=r"OfflineModeIsEnabled: no such \(private and gated"):
        resolve("owner/other")
    assert requests == []


def test_a_fetched_revision_is_removed(
    home: Path, served: Callable[[Mapping[str, int]], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    served(FILES)
    folder = resolve("owner/repo")
    removed: list[str] = []

    def delete_revisions(commit: str) -> Any:
        def execute() -> None:
            removed.append(commit)
            folder.rename(home / "gone")

        return SimpleNamespace(expected_freed_size=236, execute=execute)

    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: SimpleNamespace(delete_revisions=delete_revisions))
    assert clear("owner/repo") == 236
    assert removed == ["c0ffee"]
    assert cached() == []
    assert list((home / "cache" / "repositories").iterdir()) == []


def test_a_damaged_record_is_no_record(home: Path, served: Callable[[Mapping[str, int]], list[Any]]) -> None:
    requests = served(FILES)
    resolve("owner/repo")
    [record] = (home / "cache" / "repositories").iterdir()
    for damage in ("{", "[]", '{"name": "x"}', '{"name": "x", "path": "/no", "size": 1, "commit": "c"}'):
        record.write_text(damage)
        assert repository.records() == []
    resolve("owner/repo")
    assert len(requests) == 2
