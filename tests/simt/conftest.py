"""Tests here need the emulator: where it can't run they are skipped, and say why in one line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from minserve.backend.cuda_backend import kernels
from tests.simt import build, emulator, instances
from tests.simt.emulator import SimRawModule

# Another folder with kernels, for scripts/mutate_kernels: what it holds replaces the file of that name.
MUTANT = os.environ.get("MINSERVE_MUTANT")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = build.missing()
    for item in items:
        if reason and item.path.parent == Path(__file__).parent and item.get_closest_marker("simt"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def bundles() -> None:
    if MUTANT is None:
        for file, names in instances.INSTANCES.items():
            emulator.bundles[kernels.flatten(f"{file}.cu")] = names + instances.TEST_ONLY.get(file, [])


@pytest.fixture(autouse=True)
def mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    if MUTANT:
        original = kernels.read_source

        def read(name: str) -> str:
            path = Path(MUTANT) / name
            return path.read_text() if path.exists() else original(name)

        monkeypatch.setattr(kernels, "read_source", read)


@pytest.fixture(params=["forward", "reverse", "shuffle"])
def order(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run with each way in which threads take turns."""
    before = SimRawModule.order
    SimRawModule.order = request.param
    yield request.param
    SimRawModule.order = before
