"""The servers that minserve is compared with, each got ready once in a folder of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

CACHE = Path(os.environ.get("PEERS_CACHE", Path.home() / ".cache" / "minserve-peers"))


def sh(*command: str, cwd: Path | None = None) -> None:
    subprocess.run(command, cwd=cwd, check=True)
