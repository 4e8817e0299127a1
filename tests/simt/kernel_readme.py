"""The generated parts of kernels_cuda/README.md: the compile report, and bytes and times on paper.

Owns where they stand in the file and whether they are up to date. scripts/compile_report is its command.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from tests.gpu import predict
from tests.simt import nvrtc
from tests.simt.instances import INSTANCES
from tests.simt.nvrtc import ARCHITECTURES, compile_file, launch_shape, occupancy

README = Path(__file__).parents[2] / "kernels_cuda" / "README.md"


def compile_rows() -> Iterator[str]:
    """bfloat16 only: float16 differs by a register or two."""
    for file, names in INSTANCES.items():
        reports = [compile_file(file, names, sm.name) for sm in ARCHITECTURES]
        for name in names:
            if "half" in name:
                continue
            threads, dynamic = launch_shape(file, name)
            shared = reports[0][name].shared + dynamic
            cells = [f"`{name}`", str(threads), f"{shared / 1024:.1f}" if shared else "0"]
            for report, sm in zip(reports, ARCHITECTURES, strict=True):
                usage = report[name]
                spill = f", {usage.spill} B spilled" if usage.spill else ""
                cells.append(f"{usage.registers}{spill}; {occupancy(usage, threads, dynamic, sm)}/{sm.warps}")
            yield f"| {' | '.join(cells)} |"


def compile_report() -> str:
    heads = " | ".join(sm.name for sm in ARCHITECTURES)
    lines = [f"NVRTC {nvrtc.version()}.", "", f"| kernel | threads | shared | {heads} |"]
    return "\n".join([*lines, "|---|---|---|" + "---|" * len(ARCHITECTURES), *compile_rows()])


PARTS = {"paper": predict.report, "compile report": compile_report}


def marks(part: str) -> tuple[str, str]:
    return f"<!-- {part}: written by scripts/compile_report -->\n", f"\n<!-- end of {part} -->"


def stored(part: str) -> str:
    text, (begin, end) = README.read_text(encoding="utf-8"), marks(part)
    return text[text.index(begin) + len(begin) : text.index(end)]


def write(part: str) -> None:
    text, (begin, end) = README.read_text(encoding="utf-8"), marks(part)
    text = text[: text.index(begin) + len(begin)] + PARTS[part]() + text[text.index(end) :]
    README.write_text(text, encoding="utf-8")


def main() -> int:
    """Write both parts; with --check, only compare."""
    if nvrtc.library() is None:
        print(nvrtc.MISSING, file=sys.stderr)
        return 1
    if "--check" not in sys.argv[1:]:
        for part in PARTS:
            write(part)
        return 0
    old = [part for part, make in PARTS.items() if stored(part) != make()]
    print(f"out of date: {', '.join(old)}; run scripts/compile_report" if old else "up to date")
    return int(bool(old))
