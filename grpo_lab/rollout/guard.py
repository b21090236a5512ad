"""Runs a command and sees to its end: `python guard.py COMMAND...`, the owner holding the other end of standard input.

When standard input closes (the owner ended, however it ended) or SIGTERM comes, the command gets SIGTERM, and SIGKILL with
all its children after a grace period; a byte on standard input means SIGKILL at once. When the command ends by itself, what
it left in its process group is killed, and its exit status returned. Standard library only: it starts in milliseconds.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1


def _end_with_the_guard() -> None:
    """In the child: SIGTERM when the guard itself is killed, which nothing else would notice (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _kill_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def main() -> int:
    """The exit status of the command, or 128 + 9 when it had to be killed."""
    asked = [False]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: asked.__setitem__(0, True))
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_end_with_the_guard)
    at_once = False
    while child.poll() is None and not asked[0]:
        readable, _, _ = select.select([sys.stdin.fileno()], [], [], 0.2)
        if readable:
            at_once = bool(os.read(sys.stdin.fileno(), 1))
            break
    if child.poll() is None and not at_once:
        child.terminate()
    deadline = time.monotonic() + (0.0 if at_once else GRACE_S)
    while _group_lives(child.pid) and time.monotonic() < deadline:
        child.poll()
        time.sleep(0.05)
    _kill_group(child.pid, signal.SIGKILL)
    status = child.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
