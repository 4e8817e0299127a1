"""How a process that serves is told to end, or to read its settings again.

Owns the handlers of signals. It must not know what ends, nor what is read.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence

from minserve.threads import call_threadsafe

_INTERRUPTED = 130  # what shells show for a process that a second Ctrl-C ended


def install_signals(
    stop: asyncio.Event, hangup: asyncio.Event | None = None, last: Sequence[Callable[[], None]] = ()
) -> None:
    """The first SIGINT or SIGTERM asks to drain, a second one exits at once, after `last`; SIGHUP sets `hangup`.

    A terminal that is closed sends SIGHUP too: then the server drains, instead of living on where nobody sees it.
    """
    loop = asyncio.get_running_loop()
    terminal = _at_terminal()

    def on_signal() -> None:
        if stop.is_set():
            try:
                for act in last:
                    act()
            finally:
                os._exit(_INTERRUPTED)
        stop.set()

    def on_hangup() -> None:
        assert hangup is not None
        if terminal and not _at_terminal():
            stop.set()
        else:
            hangup.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, on_signal)
        except NotImplementedError:  # Windows' event loops have none
            signal.signal(number, lambda *_: call_threadsafe(loop, on_signal))
    if hangup is not None and hasattr(signal, "SIGHUP"):
        terminal = terminal and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # nohup's
        loop.add_signal_handler(signal.SIGHUP, on_hangup)


def _at_terminal() -> bool:
    return any(os.isatty(number) for number in (0, 1, 2))
