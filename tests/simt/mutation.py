"""Break the kernels on purpose, one place at a time, and see whether the checks notice.

Owns the kinds of mutants (a barrier, fence or wait dropped, a comparison flipped, an index or a step from a pointer
shifted by one) and which checks belong to which file; survivors.py says why each survivor does no harm.
scripts/mutate_kernels is its command; it takes more than an hour on two cores and is no part of the test suite.
"""

from __future__ import annotations

import multiprocessing
import re
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minserve.backend.cuda_backend import kernels
from minserve.backend.cuda_backend.blas import Blas
from tests.simt import checks_attention, checks_linear, checks_rows, checks_sampling, fakecupy
from tests.simt.emulator import SimRawModule
from tests.simt.fakeblas import FakeBlas
from tests.simt.kit import Check, Kit
from tests.simt.survivors import SURVIVORS

FOLDER = Path(__file__).parents[2] / "kernels_cuda"
CPU_S = 240  # a mutant may loop for ever; processor time, so that a busy or paused machine makes no difference
CHECKS = checks_rows.CHECKS | checks_linear.CHECKS | checks_attention.CHECKS | checks_sampling.CHECKS
# File -> which checks see it, as a pattern of their names; headers through what includes them.
RELEVANT = {
    "activation.cuh": r"glu|gated Dense",
    "add.cu": r"add|cast",
    "attention.cuh": r"attention",
    "common.cuh": r"norm|glu|cast|logprobs 50|linear (Dense|Int4)|prefill attention: a warp",
    "copy_blocks.cu": r"copy_blocks",
    "decode_attention.cu": r"decode attention|beside decodes",
    "dequantize.cu": r"large product|linear .* 17x",
    "embed.cu": r"embed|take",
    "glu.cu": r"glu|gated .* 20",
    "logprobs.cu": r"logprobs|infinities",
    "mma.cuh": r"attention|linear",
    "prefill_attention.cu": r"prefill attention",
    "repack.cu": r"packing",
    "rms_norm.cu": r"norm",
    "rope_kv.cu": r"rope_kv",
    "sampling.cu": r"sampling|logprobs",
    "sampling.cuh": r"sampling|logprobs",
    "seats.cu": r"penalties",
    "seats.cuh": r"penalties",
    "skinny_gemm.cu": r"linear|gated",
    "weights.cuh": r"linear|gated|packing|embed|large product",
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """old at `start` of the file becomes new."""

    file: str
    start: int
    line: int
    kind: str
    old: str
    new: str
    text: str  # the whole line, stripped
    column: int  # in it
    nth: str = ""  # which one, where the same line stands in the file more than once

    @property
    def key(self) -> str:
        """Names it, alone, in SURVIVORS: stays the same when lines move."""
        return f"{self.file}: {self.text} | at {self.column}: {self.old} -> {self.new}{self.nth}"

    def apply(self, source: str) -> str:
        return source[: self.start] + self.new + source[self.start + len(self.old) :]


# ---- making mutants ----------------------------------------------------------------
FLIPPED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_WAIT = re.compile(r"__syncthreads\(\);|__syncwarp\(\);|__threadfence\(\);|cp_async_wait<\d>\(\);|cp_async_commit\(\);")
_COMPARISON = re.compile(r"(?<= )(<=|>=|==|!=|<|>)(?= )")
_DECLARED = re.compile(
    r"\s*(?:extern\s+|const\s+|constexpr\s+|static\s+)*(?:__shared__|struct|template|float|int|bool|char|u8|u16|u32|u64|half|bf16|T|Packed|Vec<[^=]*?>)\s[^=]*$"
)


def untested(source: str) -> str:
    """The source with blanks where nothing is mutated: comments, directives, PTX, and what only the emulator runs."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    source = re.sub(r"#ifdef __SIMT__[\s\S]*?#(?:else|endif)", blank, source)
    source = re.sub(r"asm volatile\([\s\S]*?\);", blank, source)
    return re.sub(r"//[^\n]*|^\s*#[^\n]*|static_assert[^\n]*", blank, source, flags=re.M)


def mutants(file: str, source: str) -> list[Mutant]:
    found = list(_mutants(file, source))
    total, seen = Counter(m.key for m in found), Counter[str]()
    for i, m in enumerate(found):
        if total[m.key] > 1:
            seen[m.key] += 1
            found[i] = replace(m, nth=f" ({seen[m.key]} of {total[m.key]})")
    return found


def _mutants(file: str, source: str) -> Iterator[Mutant]:
    visible = untested(source)

    def mutant(kind: str, start: int, old: str, new: str) -> Mutant:
        begin = source.rfind("\n", 0, start) + 1
        end = source.find("\n", start)
        text = source[begin:end]
        column = start - begin - (len(text) - len(text.lstrip()))
        return Mutant(file, start, source.count("\n", 0, start) + 1, kind, old, new, text.strip(), column)

    for match in _WAIT.finditer(visible):
        yield mutant("wait dropped", match.start(), match[0], ";")
    for match in _COMPARISON.finditer(visible):
        yield mutant("comparison flipped", match.start(), match[0], FLIPPED[match[0]])
    for start, end in indices(visible):
        yield mutant("index shifted", start, source[start:end], source[start:end] + " + 1")
    for start, factor, end in steps(visible):
        yield mutant("pointer shifted", start, source[start:end], f"({source[start:factor]} + 1){source[factor:end]}")


def indices(visible: str) -> Iterator[tuple[int, int]]:
    """Where subscripts stand, without their brackets; not the sizes of declared arrays, nor lambdas' captures."""
    for match in re.finditer(r"[\w\])]\[", visible):
        start, depth = match.end(), 1
        end = start
        while depth:
            depth += {"[": 1, "]": -1}.get(visible[end], 0)
            end += 1
        line = visible[visible.rfind("\n", 0, start) + 1 : match.start() + 1]
        if _DECLARED.match(line) or re.search(r"\(&\w+\)(\[\w+\])*$", line) or visible[end : end + 4] == " = {":
            continue
        yield start, end - 1


def steps(visible: str) -> Iterator[tuple[int, int, int]]:
    """Where the summands stand that are added to a pointer (i * stride and column of `base + i * stride + column`):
    start, end of the first factor, end."""
    names = "|".join(set(re.findall(r"\w\*\s+(?:__restrict__\s+)?(\w+)", visible))) or "(?!)"
    for base in re.finditer(rf"(?:(?<!Dim\.)\b(?:{names})|reinterpret_cast<[^<>]*>\([^()]*\)) \+\s+", visible):
        start = end = base.end()
        depth, factor = 0, 0
        while depth or not re.match(r"[,);\]]|\s+[-+:]\s", visible[end : end + 80]):
            depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(visible[end], 0)
            if not depth and not factor and visible.startswith(" * ", end):
                factor = end
            end += 1
            more = re.compile(r"\s+[-+]\s+").match(visible, end)
            if more and not depth:
                yield start, factor or end, end
                start, factor = more.end(), 0
                end = start
        yield start, factor or end, end


# ---- trying them -------------------------------------------------------------------
def relevant(file: str) -> dict[str, Check]:
    return {name: check for name, check in CHECKS.items() if re.search(RELEVANT[file], name)}


def try_mutant(mutant: Mutant, checks: Sequence[str]) -> str | None:
    """What the first check that notices says, or None."""
    original = kernels.read_source
    source = original(mutant.file)

    def read(name: str) -> str:
        return mutant.apply(source) if name == mutant.file else original(name)

    kernels.read_source = read
    for compute, order in (("half", "forward"), ("half", "reverse"), ("half", "shuffle"), ("bf16", "forward")):
        SimRawModule.order = order
        for name in checks:
            try:
                CHECKS[name](Kit(fakecupy, Blas(fakecupy, FakeBlas()), compute))
            except Exception as error:
                said = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
                return f"{name} ({compute}, {order}): {said}"
    return None


def _child(mutant: Mutant, checks: Sequence[str], pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 5))
    pipe.send(try_mutant(mutant, checks))


def judge(mutant: Mutant) -> str | None:
    """As try_mutant, in a process of its own, which may hang or crash."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(mutant, list(relevant(mutant.file)), theirs))
    process.start()
    theirs.close()
    try:
        verdict: str | None = ours.recv()
        return verdict
    except EOFError:
        process.join()
        return f"still running after {CPU_S} s" if process.exitcode == -signal.SIGXCPU else "the process died"
    finally:
        process.kill()
        process.join()


def main(arguments: Sequence[str], say: Callable[[str], None] = print) -> int:
    """Arguments: files (default: all), --list to only show the mutants, --kind=pointer (only those whose kind begins
    so), --jobs=2, --every=1 (of how many, one)."""
    numbers = {"jobs": 2, "every": 1}
    for name in numbers:
        numbers[name] = next((int(a.split("=")[1]) for a in arguments if a.startswith(f"--{name}=")), numbers[name])
    kind = next((a.split("=")[1] for a in arguments if a.startswith("--kind=")), "")
    files = [a for a in arguments if not a.startswith("--")] or sorted(RELEVANT)
    found = [m for file in files for m in mutants(file, (FOLDER / file).read_text()) if m.kind.startswith(kind)]
    found = found[:: numbers["every"]]
    if "--list" in arguments:
        for m in found:
            say(f"{m.file}:{m.line}: {m.kind}: {m.old} -> {m.new}    in    {m.text}")
        say(f"{len(found)} mutants")
        return 0
    began, killed, unexplained = time.time(), 0, 0
    with ThreadPoolExecutor(numbers["jobs"]) as pool:
        for m, verdict in zip(found, pool.map(judge, found), strict=True):
            place = f"{m.file}:{m.line}: {m.kind}: {m.old} -> {m.new}"
            if verdict is not None:
                killed += 1
                say(f"killed    {place}: {verdict}")
            elif m.key in SURVIVORS:
                say(f"harmless  {place}: {SURVIVORS[m.key]}")
            else:
                unexplained += 1
                say(f"SURVIVED  {m.key}")
    share, took = killed / len(found), time.time() - began
    say(f"{killed} of {len(found)} killed ({share:.1%}), {unexplained} unexplained, {took:.0f} s")
    return int(killed < 0.95 * len(found) or unexplained > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
