"""One process at a time on a file or folder. It must not know what is kept there.

SQLite's own file lock does the work: it is the same on every platform, needs no process ids, and the operating system
releases it when the process dies. The lock's file stays: another process may be about to open it.
"""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path


class FileLock:
    def __init__(self, path: Path) -> None:
        """path: the lock's own file. BlockingIOError if it is held already, OSError if it can't be made."""
        path.touch()
        try:
            self._database = sqlite3.connect(path, timeout=0.0, isolation_level=None)
            try:
                self._database.execute("BEGIN EXCLUSIVE")
            except sqlite3.Error:
                self._database.close()
                raise
        except sqlite3.Error as error:
            held = error.sqlite_errorcode == sqlite3.SQLITE_BUSY
            raise OSError(errno.EAGAIN if held else errno.EIO, str(error)) from None

    def release(self) -> None:
        """Idempotent."""
        self._database.close()


def beside(file: Path) -> Path:
    """The path of a file's lock. A link to a file is the same file."""
    real = file.resolve()
    return real.with_name(real.name + ".lock")
