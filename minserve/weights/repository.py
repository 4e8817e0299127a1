"""Models in Hugging Face repositories: which of their files are needed, and fetching them.

Owns the choice of files, and the record of what was fetched (so that a second start asks the network nothing). The
files themselves live in huggingface_hub's own cache, which resumes downloads and shares files with other tools; HF_HOME
moves it. The only module that imports huggingface_hub, and only when something is fetched or removed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from minserve.weights.cache import (
    DownloadError,
    DownloadProgress,
    cache_dir,
    folder_size,
    locked,
    need_space,
    slug,
    watched,
)

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAME = re.compile(rf"({_PART}/{_PART})(?::([A-Za-z0-9_]+)|/((?:{_PART}/)*{_PART}\.gguf))?")


@dataclass(frozen=True, slots=True)
class Record:
    """What a name was resolved to. path: a snapshot's folder, or a .gguf file in it. size: bytes of the files."""

    name: str
    path: str
    size: int
    commit: str


@dataclass(frozen=True, slots=True)
class RepositoryName:
    """owner/repo, with a GGUF's quantization (owner/repo:Q4_K_M) or file (owner/repo/file.gguf)."""

    name: str
    repository: str
    quantization: str | None
    file: str | None


def parse_name(name: str) -> RepositoryName | None:
    """None if no repository can be called so (or if it looks like a .gguf file that should be on this disk)."""
    match = _NAME.fullmatch(name)
    if match is None or (name.endswith(".gguf") and match[3] is None):
        return None
    return RepositoryName(name, match[1], match[2], match[3])


def resolve_repository(
    name: RepositoryName, revision: str | None, progress: DownloadProgress, *, offline: bool
) -> Path:
    """The folder or .gguf file, fetched if no record says that it is here."""
    path = _records() / (slug(f"{name.name}@{revision or 'main'}") + ".json")
    record = _read(path)
    if record is None:
        with locked(name.name, progress):
            record = _read(path)
            if record is None:
                if offline:
                    raise DownloadError(f"{name.name} is not on this machine, and downloads are off.")
                record = _fetch(name, revision, progress)
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_suffix(".part")
                part.write_text(json.dumps(asdict(record)), encoding="utf-8")
                part.replace(path)
    return Path(record.path)


def records() -> list[Record]:
    """What was fetched completely and is still there."""
    found = (_read(path) for path in sorted(_records().glob("*.json")))
    return [record for record in found if record is not None]


def remove(record: Record) -> int:
    """Delete the fetched revision from huggingface_hub's cache. Returns the bytes freed."""
    from huggingface_hub import scan_cache_dir

    strategy = scan_cache_dir().delete_revisions(record.commit)
    strategy.execute()
    for path in _records().glob("*.json"):
        if _read(path) in (None, record):
            path.unlink()
    return int(strategy.expected_freed_size)


def _records() -> Path:
    return cache_dir() / "repositories"


def _read(path: Path) -> Record | None:
    try:
        record = Record(**json.loads(path.read_text(encoding="utf-8")))
        return record if Path(record.path).exists() else None
    except (OSError, ValueError, TypeError):
        return None


def _fetch(name: RepositoryName, revision: str | None, progress: DownloadProgress) -> Record:
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.utils.tqdm import disable_progress_bars

    repository = name.repository
    try:
        info = huggingface_hub.HfApi().model_info(repository, revision=revision, files_metadata=True)
        commit = info.sha or ""
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        wanted = choose_files(repository, sizes, name.quantization, name.file)
        total = sum(sizes[path] for path in wanted)
        store = Path(HF_HUB_CACHE)
        store.mkdir(parents=True, exist_ok=True)
        here = store / f"models--{repository.replace('/', '--')}"
        need_space(store, max(0, total - folder_size(here)))
        disable_progress_bars()
        with watched(here, f"downloading {name.name}", total, progress):
            patterns = [re.sub(r"([*?[])", r"[\1]", path) for path in wanted]
            snapshot = huggingface_hub.snapshot_download(repository, revision=commit, allow_patterns=patterns)
    except DownloadError:
        raise
    except Exception as error:  # the hub's errors, its HTTP library's and the disk's have no common base
        lines = str(error).strip().splitlines() or [""]
        raise DownloadError(
            f"{repository} could not be fetched from Hugging Face: {type(error).__name__}: {lines[0]} "
            "(private and gated models need HF_TOKEN; or name a folder or a .gguf file that you have)"
        ) from error
    path = Path(snapshot, wanted[0]) if wanted[0].endswith(".gguf") else Path(snapshot)
    return Record(name.name, str(path), total, commit)


def choose_files(
    repository: str, files: Mapping[str, int], quantization: str | None = None, file: str | None = None
) -> list[str]:
    """Which of a repository's files to fetch: one .gguf file, or the safetensors with their companions."""
    ggufs = sorted(path for path in files if path.lower().endswith(".gguf"))
    if file is not None:
        if file not in files:
            raise DownloadError(f"{repository} has no file {file!r}; its GGUF files: {_some(ggufs)}")
        return [file]
    if quantization is not None:
        ending = re.compile(rf"(?:^|[-._/]){re.escape(quantization)}\.gguf", re.IGNORECASE)
        return [_only([path for path in ggufs if ending.search(path)], repository, quantization, ggufs)]
    if "model.safetensors" not in files and "model.safetensors.index.json" not in files:
        return [_only(ggufs, repository, "GGUF", ggufs)]
    missing = [path for path in ("config.json", "tokenizer.json") if path not in files]
    if missing:
        raise DownloadError(f"{repository} has no {' and no '.join(missing)}, which minserve needs")
    needed = re.compile(r"model[^/]*\.safetensors|[^/]+\.json|[^/]+\.jinja")
    return sorted(path for path in files if needed.fullmatch(path))


def _only(paths: Sequence[str], repository: str, what: str, ggufs: Sequence[str]) -> str:
    if len(paths) == 1:
        return paths[0]
    if not ggufs:
        raise DownloadError(f"{repository} has neither safetensors nor GGUF files")
    if not paths:
        raise DownloadError(f"{repository} has no {what} file; its GGUF files: {_some(ggufs)}")
    raise DownloadError(f"{repository} has several {what} files; name one, as {repository}/FILE: {_some(paths)}")


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:12]) + (f" and {len(paths) - 12} more" if len(paths) > 12 else "") or "none"
