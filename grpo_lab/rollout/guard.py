"""Runs a command and sees to its end: `python guard.py COMMAND...`, the owner holding the other end of standard input.

When standard input closes (the owner ended, however it ended) or SIGTERM comes, the command gets SIGTERM, and SIGKILL with
all its children after a grace period; a byte on standard input means SIGKILL at once. When the command ends by itself, what
it left in its process group is killed. Its temporary files, sockets of vLLM's processes among them, lie in a folder that
goes with it. Standard library only: it starts in milliseconds.
"""

import contextlib
import ctypes
import glob
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator

GRACE_S = 10.0
_TRACKER_S = 2.0
_LONGEST_PARENT = 30  # characters: a Unix socket's path, which vLLM makes below it, may have about 100
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _end_with_the_guard() -> None:
    """In the child: SIGTERM when the guard itself is killed, which nothing else would notice (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _adopt_orphans() -> None:
    """Make this process the parent of the command's orphans, so that none stays a zombie where process 1 reaps nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


class _Command:
    """The command in a process group of its own, and its status once it has ended."""

    def __init__(self, words: list[str], environment: dict[str, str]) -> None:
        self.pid = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, env=environment, process_group=0, preexec_fn=_end_with_the_guard
        ).pid
        self.status: int | None = None

    def reap(self) -> bool:
        """Collect what has ended, orphans too; whether the command itself has."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.pid:
                    self.status = os.waitstatus_to_exitcode(ended[1])
        return self.status is not None

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        """SIGKILL to the whole group; Python's resource tracker last, which then frees the shared memory of the others."""
        for pid in _members(self.pid):
            if b"resource_tracker" not in _command_line(pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _TRACKER_S
        while self.group_lives() and time.monotonic() < deadline:
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def group_lives(self) -> bool:
        self.reap()
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def _members(group: int) -> list[int]:
    """The processes of a group, as /proc tells; none where there is no /proc."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if name.isdigit() and os.getpgid(int(name)) == group:
                found.append(int(name))
    return found


def _command_line(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _heard(seconds: float) -> bytes | None:
    """What comes on standard input within `seconds`: b"" when it closes, a byte for an end at once, None for nothing."""
    readable, _, _ = select.select([sys.stdin.fileno()], [], [], seconds)
    return os.read(sys.stdin.fileno(), 1) if readable else None


@contextlib.contextmanager
def _own_temporary() -> Iterator[dict[str, str]]:
    """The environment with a temporary directory that is removed afterwards; torch's cache of compiled code stays outside."""
    usual = tempfile.gettempdir()
    parent = usual if len(usual) <= _LONGEST_PARENT else "/tmp"
    here = f"grpo_lab-{zlib.crc32(socket.gethostname().encode()):08x}-"  # other machines may share the parent
    for stale in glob.glob(f"{parent}/{here}*"):  # of guards that were killed
        owner = os.path.basename(stale).removeprefix(here).split("-")[0]
        if os.path.exists("/proc/self") and not os.path.exists(f"/proc/{owner}"):
            shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{here}{os.getpid()}-", dir=parent, ignore_cleanup_errors=True) as folder:
        cache = os.path.join(usual, f"torchinductor_{os.getuid()}")
        yield {"TORCHINDUCTOR_CACHE_DIR": cache, **os.environ, "TMPDIR": folder}


def main() -> int:
    """The exit status of the command, 128 + n when signal n ended it."""
    asked = [False]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: asked.__setitem__(0, True))
    # SIGUSR1 asks the owner to save, which still needs the command; the command inherits this
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    _adopt_orphans()
    with _own_temporary() as environment:
        status = _see_to(_Command(sys.argv[1:], environment), asked)
    return status if status >= 0 else 128 - status


def _see_to(command: _Command, asked: list[bool]) -> int:
    """The command's status once it and all it started are gone; `asked` becomes true when the guard itself is to end."""
    word: bytes | None = None
    while not command.reap() and not asked[0] and word is None:
        word = _heard(0.2)
    if not command.reap() and not word:
        command.signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while command.group_lives() and time.monotonic() < deadline and not word:
            if word is None:
                word = _heard(0.05)
            else:  # closed: nothing more will come
                time.sleep(0.05)
    command.kill_group()
    while not command.reap():
        time.sleep(0.01)
    return command.status or 0


if __name__ == "__main__":
    sys.exit(main())
