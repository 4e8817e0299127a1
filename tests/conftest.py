"""What holds for every test: logging is set up for the whole process, so it is put back after each; no case that
Hypothesis tries is timed, since others run beside it; and thousands of collected tests are kept from the garbage
collector, which would look at them again in every full collection."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import hypothesis
import pytest
import structlog

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    # Only what `observe.log.setup` adds: pytest puts its own handlers in place and takes them away by itself.
    for handler in root.handlers[:]:
        if handler not in handlers and isinstance(handler.formatter, structlog.stdlib.ProcessorFormatter):
            root.removeHandler(handler)
    root.setLevel(level)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
