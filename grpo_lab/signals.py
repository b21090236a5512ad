"""SIGTERM, SIGUSR1 and Ctrl-C ask a run to save and end, while it loads or samples at once, else after its step; asked twice,
it exits.

Under a launcher one Ctrl-C arrives twice, from the terminal and passed on by the launcher: the echo does not count.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from grpo_lab.library_logs import tell
from grpo_lab.storage import scratch

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_LAUNCHED, _ECHO_S = "TORCHELASTIC_RUN_ID", 3.0
_has_run = False  # whether a run has begun in this process


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
    global _has_run
    _has_run, request = True, StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if _is_repeated(request):
            return
        request.name, request.since = signal.Signals(number).name, time.monotonic()
        what = "saving" if request.interrupting else "finishing this step, then saving (it can take minutes)"
        tell(f"\n{request.name}: {what}; once more exits at once\n")
        if request.interrupting:
            request.interrupting = False
            raise Interrupted

    with _handlers(handle):
        yield request


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Inside, where nothing is to be saved, a stop signal ends what is under way and then the process, with one line."""
    request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if _is_repeated(request):
            return
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # ranks that end one after the other would wait for each other
            leave(number)
        request.name, request.since = signal.Signals(number).name, time.monotonic()
        raise Interrupted

    try:
        with _handlers(handle):
            yield
    except Interrupted:
        sys.stderr.write(_farewell(request.name))
        sys.exit(_status(request.name))


def leave(number: int, frame: FrameType | None = None) -> None:
    """The handler of a process that has begun nothing yet, not even its imports: it is gone at once."""
    name = signal.Signals(number).name
    if os.environ.get("RANK", "0") == "0":
        tell(_farewell(name), is_last=True)
    scratch.remove_own()
    os._exit(_status(name))


@contextmanager
def _handlers(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    previous = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _is_repeated(request: StopRequest) -> bool:
    """Whether `request` has come before; then the process ends here, unless this is its echo."""
    if not request:
        return False
    if _LAUNCHED in os.environ and time.monotonic() - request.since < _ECHO_S:
        return True
    tell("stopped at once; the newest complete checkpoint is unharmed\n", is_last=True)
    scratch.remove_own()
    os._exit(_status("SIGINT"))


def _farewell(name: str) -> str:
    before = " before the first step; nothing to save" if sys.argv[1:2] == ["train"] and not _has_run else ""
    return f"grpo-lab: stopped by {name}{before}\n"


def _status(name: str) -> int:
    """What a shell says of a process that the signal ended."""
    return 128 + signal.Signals[name]
