"""What gpu_check found: results by section, what was skipped and why, as JSON and as Markdown.

Owns the budget of time too: a section that can't be finished in what is left is skipped, and the report says so.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Table:
    title: str
    columns: Sequence[str]
    rows: list[Sequence[Any]] = field(default_factory=list)

    def markdown(self) -> list[str]:
        lines = [f"| {' | '.join(self.columns)} |", "|" + "---|" * len(self.columns)]
        return [f"### {self.title}", "", *lines, *(f"| {' | '.join(map(_cell, row))} |" for row in self.rows), ""]


def _cell(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else "-" if value is None else str(value)


class Report:
    """Sections in the order they ran. `seconds` is the time there is for everything."""

    def __init__(self, seconds: float, say: Callable[[str], None] = print) -> None:
        self.facts: dict[str, Any] = {}
        self.tables: list[Table] = []
        self.failures: list[str] = []
        self.skipped: list[str] = []
        self._say, self._began, self._seconds = say, time.perf_counter(), seconds

    @property
    def left(self) -> float:
        return self._seconds - (time.perf_counter() - self._began)

    def skip(self, what: str, why: str) -> None:
        self.skipped.append(f"{what}: {why}")
        self._say(f"skipped   {what}: {why}")

    @contextmanager
    def section(self, name: str, needs: float = 0.0) -> Iterator[bool]:
        """`with report.section("x", needs=seconds) as run: if run: ...`. An exception becomes a failure."""
        if self.left < needs:
            self.skip(name, f"{needs:.0f} s needed, {max(self.left, 0):.0f} s left")
            yield False
            return
        self._say(f"running   {name}")
        began = time.perf_counter()
        try:
            yield True
        except Exception:
            self.fail(f"{name}: {traceback.format_exc()}")
        self._say(f"          {time.perf_counter() - began:.1f} s")

    def fail(self, message: str) -> None:
        self.failures.append(message)
        self._say(f"FAILED    {message}")

    def table(self, title: str, *columns: str) -> Table:
        made = Table(title, columns)
        self.tables.append(made)
        return made

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tables = [{"title": t.title, "columns": list(t.columns), "rows": t.rows} for t in self.tables]
        data = {"facts": self.facts, "failures": self.failures, "skipped": self.skipped, "tables": tables}
        (folder / "gpu_check.json").write_text(json.dumps(data, indent=1, default=str), encoding="utf-8")
        (folder / "gpu_check.md").write_text(self.markdown(), encoding="utf-8")

    def markdown(self) -> str:
        lines = ["# gpu_check", "", *(f"- {name}: {value}" for name, value in self.facts.items()), ""]
        for title, items in (("Failures", self.failures), ("Skipped", self.skipped)):
            lines += [f"## {title}", "", *(f"- {item}" for item in items or ["none"]), ""]
        return "\n".join(lines + [line for table in self.tables for line in table.markdown()])
