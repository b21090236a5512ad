"""What libraries, native code and a task's own code print, kept in a file: the terminal has only what grpo_lab says and errors.

Python's warnings and loggers, `print`, and what C++ writes to the descriptors 1 and 2 all end in the file.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO

from grpo_lab.storage.scratch import scratch_folder

FOLDER = "logs"  # of a run


class LibraryLogs:
    """A context: inside, descriptors 1 and 2 are a file, a temporary one until `move_to`; afterwards they are what they were.

    `terminal` is the standard output as it was and `errors` the descriptor of the standard error as it was, for those who have
    something to say meanwhile; a fatal signal's traceback goes to `errors` too. A file that stayed empty is removed.
    `listener` is who shows what `tell` tells, if it can (see there).
    """

    current: LibraryLogs | None = None  # descriptors are the process's, so there is one

    def __init__(self) -> None:
        self.file, self._before = scratch_folder(FOLDER) / "libraries.log", 0
        self.listener: Callable[[str, bool], bool] | None = None
        self._saved = (os.dup(1), os.dup(2))
        self.errors = self._saved[1]
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        self.terminal: IO[str] = os.fdopen(self._saved[0], "w", encoding=encoding, errors="replace", closefd=False)
        self._tells_faults = not faulthandler.is_enabled()

    def __enter__(self) -> LibraryLogs:
        self._write_to(self.file)
        LibraryLogs.current = self
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)  # what was printed is there when the process hangs
        if self._tells_faults:
            faulthandler.enable(self.errors)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        has_content = self.has_content
        LibraryLogs.current = None
        if self._tells_faults:
            faulthandler.disable()
        with contextlib.suppress(OSError):  # nobody may be reading any more
            self.terminal.flush()
        for number, copy in enumerate(self._saved, start=1):
            os.dup2(copy, number)
            os.close(copy)
        stopped = kind is not None and not issubclass(kind, Exception)  # by a signal, before there was a run
        if not self._before and (stopped or not has_content):
            self._remove()

    @property
    def has_content(self) -> bool:
        """Whether anything was written by this process."""
        _flush()
        return self.file.is_file() and self.file.stat().st_size > self._before

    def move_to(self, file: Path) -> None:
        """Go on at the end of `file`, with what was written so far; the temporary file stays where that cannot be written."""
        _flush()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            before = file.stat().st_size if file.exists() else 0
            with self.file.open("rb") as old, file.open("ab") as new:
                shutil.copyfileobj(old, new)
        except OSError:
            return
        self._write_to(file)
        self._remove()
        self.file, self._before = file, before

    def _remove(self) -> None:
        with contextlib.suppress(OSError):  # other logs may lie in the folder
            self.file.unlink()
            self.file.parent.rmdir()

    def _write_to(self, file: Path) -> None:
        _flush()
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for number in (1, 2):
            os.dup2(descriptor, number)
        os.close(descriptor)


def tell(text: str, is_last: bool = False) -> None:
    """For a signal's handler: `text` on the standard error as it was, unless somebody shows it. `is_last`: the process ends."""
    logs = LibraryLogs.current
    if logs is None or logs.listener is None or not logs.listener(text, is_last):
        os.write(logs.errors if logs else 2, text.encode())


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
