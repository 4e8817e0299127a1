"""`minserve generate`, `chat` and `pull`: the engine driven by a for-loop, no server.

Owns the terminal. Shows how little the synchronous core needs: submit, step until done, print.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from minserve.assemble import Assembly, assemble
from minserve.backend.base import BackendError, CheckpointError
from minserve.config import Config
from minserve.config_rules import require_valid
from minserve.request import FinishReason, RequestError, RequestOutcome, SamplingParams, Submission, TextDelta
from minserve.weights.cache import DownloadError
from minserve.weights.hub import resolve

_ids = itertools.count()


@dataclass(frozen=True, slots=True)
class Style:
    """How to answer."""

    system: str | None
    temperature: float
    max_tokens: int
    seed: int | None


def stream(assembly: Assembly, prompt: list[int], style: Style) -> Iterator[tuple[TextDelta, RequestOutcome | None]]:
    """Deltas of one answer, as they come. Closing the iterator early aborts the request."""
    if not prompt:
        raise RequestError("The prompt is empty, and this model has no token that begins a text.", param="prompt")
    engine = assembly.engine
    room = assembly.max_model_len - len(prompt)
    if room < 1:
        raise RequestError(
            f"This model's maximum context length is {assembly.max_model_len} tokens. However, the conversation has "
            f"{len(prompt)}.",
            code="context_length_exceeded",
        )
    params = SamplingParams(
        max_tokens=min(style.max_tokens, room),
        temperature=style.temperature,
        seed=style.seed,
        stop_token_ids=assembly.tokenizer.end_ids,
    )
    submission = Submission(f"terminal-{next(_ids)}", tuple(prompt), params)
    engine.submit(submission)
    try:
        while engine.has_work:
            for delivery in engine.step():
                yield delivery.delta, delivery.outcome
    finally:
        engine.abort(submission.id)


def load(config: Config, console: Console) -> Assembly | None:
    """An engine, with a spinner; None (and a readable reason) if that fails."""
    try:
        require_valid(config)
        fetch(config)
        with console.status("starting") as status:
            assembly = assemble(config, progress=status.update)
    except (CheckpointError, BackendError, DownloadError, OSError, ValueError) as error:
        console.print(f"minserve: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return None
    for note in assembly.notes:
        console.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)
    return assembly


def generate_once(config: Config, text: str, style: Style, *, raw: bool) -> int:
    """Print one answer to standard output; everything else goes to standard error."""
    errors = Console(stderr=True, highlight=False)
    messages = _messages(style, [], text)
    try:
        _check(messages)  # before anything is loaded for it
        assembly = load(config, errors)
        if assembly is None:
            return 1
        try:
            prompt = assembly.tokenizer.encode(text, bos=True) if raw else assembly.template.encode(messages)
            return _print(assembly, prompt, style, errors)[1]
        finally:
            assembly.engine.runner.close()
    except RequestError as error:
        errors.print(error.message, style="red", markup=False)
        return 1


def chat_loop(config: Config, style: Style) -> int:
    """Ask, answer, repeat. Ctrl-C stops an answer or drops a line, Ctrl-D ends."""
    console = Console(stderr=True, highlight=False)
    assembly = load(config, console)
    if assembly is None:
        return 1
    console.print(f"{assembly.name} on {assembly.backend.description}. /new starts over, Ctrl-D ends.", style="dim")
    history: list[dict[str, Any]] = []
    _tolerate_bytes()
    while True:
        try:
            text = _ask(console).strip()
        except EOFError:
            console.print()
            break
        except KeyboardInterrupt:  # perhaps meant for an answer that has just ended
            console.print()
            continue
        if text == "/new":
            history.clear()
        elif text:
            messages = _messages(style, history, text)
            try:
                _check(messages)
                answer, code = _print(assembly, assembly.template.encode(messages), style, console)
            except RequestError as error:
                console.print(error.message, style="red", markup=False)
                continue
            if code == 0:
                history += [messages[-1], {"role": "assistant", "content": answer}]
    assembly.engine.runner.close()
    return 0


def _ask(console: Console) -> str:
    """A line. At a terminal with the keys that edit it and bring back earlier ones."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return console.input("> ")
    with contextlib.suppress(ImportError):  # Windows' terminals edit by themselves
        importlib.import_module("readline")
    return input("> ")


def read_input() -> str:
    """All of standard input."""
    _tolerate_bytes()
    return sys.stdin.read()


def _tolerate_bytes() -> None:
    """Bytes of standard input that are no UTF-8 come as lone surrogates, as those of arguments do: `_check` says so."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def _messages(style: Style, history: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": style.system}] if style.system else []
    return [*system, *history, {"role": "user", "content": text}]


def _check(messages: list[dict[str, Any]]) -> None:
    """RequestError if a text is not valid UTF-8."""
    for message in messages:
        try:
            message["content"].encode()
        except UnicodeEncodeError:
            raise RequestError(f"The {message['role']} text is not valid UTF-8.") from None


def _print(assembly: Assembly, prompt: list[int], style: Style, console: Console) -> tuple[str, int]:
    """(the answer, exit code). Numbers go to standard error after it."""
    text, started, code = "", time.monotonic(), 0
    outcome: RequestOutcome | None = None
    try:
        for delta, ended in stream(assembly, prompt, style):
            outcome = ended or outcome
            text += delta.text
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            if delta.error is not None:
                console.print(f"\n{delta.error.message}", style="red", markup=False)
                code = 1
    except KeyboardInterrupt:
        console.print("\n(stopped)", style="dim")
    print(flush=True)
    if outcome is not None and outcome.ttft is not None and outcome.finish in (FinishReason.STOP, FinishReason.LENGTH):
        decode, later = outcome.total - outcome.ttft, outcome.usage.completion - 1
        rate = f"{later / decode:.0f} tokens/s, " if later and decode > 0 else ""
        console.print(
            f"{outcome.usage.completion} tokens, {rate}first after {outcome.ttft * 1e3:.0f} ms, "
            f"{time.monotonic() - started:.1f} s in all",
            style="dim",
        )
    return text, code


def fetch(config: Config) -> Path:
    """Make sure the model's files are here, with a progress bar while they come."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=console, transient=True)
    tasks: dict[str, Any] = {}

    def report(what: str, done: int, total: int | None) -> None:
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=total)
            if console.is_terminal:
                bar.start()
            else:  # no bar can move there, so say at least what is going on
                console.print(f"{what} ...", markup=False, highlight=False, soft_wrap=True)
        bar.update(tasks[what], completed=done, total=total)

    try:
        return resolve(config.model.name, revision=config.model.revision, progress=report)
    finally:
        if tasks and console.is_terminal:
            bar.stop()
