"""SIGTERM, SIGUSR1 and Ctrl-C ask a run to save and end, while it samples at once, else after its step; asked twice, it exits.

Under a launcher one Ctrl-C arrives twice, from the terminal and passed on by the launcher: the echo does not count.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_LAUNCHED, _ECHO_S = "TORCHELASTIC_RUN_ID", 3.0


class Interrupted(BaseException):
    """A stop signal came where the work at hand can be given up. No Exception: nothing on its way takes it for a failure."""


@dataclass
class StopRequest:
    """Whether somebody asked the run to stop, and by which signal."""

    name: str = ""
    since: float = 0.0
    interrupting: bool = False

    def __bool__(self) -> bool:
        return bool(self.name)

    @contextmanager
    def interrupts(self) -> Iterator[None]:
        """Inside, in the main thread, a stop signal raises Interrupted; so does entering after one has come."""
        if self:
            raise Interrupted
        self.interrupting = True
        try:
            yield
        finally:
            self.interrupting = False


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Collect stop signals while inside; the previous handlers come back afterwards."""
    request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if request and _LAUNCHED in os.environ and time.monotonic() - request.since < _ECHO_S:
            return
        if request:
            os.write(2, b"stopped at once; the newest complete checkpoint is unharmed\n")
            os._exit(130)
        request.name, request.since = signal.Signals(number).name, time.monotonic()
        what = "saving" if request.interrupting else "finishing this step, then saving (it can take minutes)"
        os.write(2, f"\n{request.name}: {what}; once more exits at once\n".encode())
        if request.interrupting:
            request.interrupting = False
            raise Interrupted

    previous = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
