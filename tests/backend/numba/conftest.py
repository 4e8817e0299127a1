"""Kernels compiled by tests are kept in the checkout's cache, so that a second run needs seconds instead of minutes."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("MINSERVE_CACHE", str(Path(__file__).parents[3] / ".cache" / "minserve"))
