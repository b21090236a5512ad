"""One process at a time writes to a run's folder: a lock that the kernel lets go when its holder ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from grpo_lab.errors import ConfigError
from grpo_lab.storage.scratch import disk_reason

FILE = ".lock"
_PATIENCE_S = 120.0  # a file server holds on to the lock of a machine that died, as a rule for 90 s
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_held = set[int]()


@contextmanager
def run_lock(folder: Path, say: Callable[[str], None], patience: float = _PATIENCE_S) -> Iterator[None]:
    """Inside, no other process is inside for the same `folder`.

    ConfigError names the one that is. One on another machine may have died with it, so it gets `patience` seconds to be let go.
    Where the file system has no locks, that is said and nothing is locked.
    """
    try:
        descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ConfigError(
            f"cannot write to run {folder}: {disk_reason(error)}; free some space, or give it back its rights to be written"
        ) from None
    _held.add(descriptor)
    try:
        _take(descriptor, folder, say, patience)
        _sign(descriptor)
        yield
    finally:
        _release(descriptor)


def lock_holder(folder: Path) -> str | None:
    """The process that holds the lock of `folder`, in words; None when there is none, or it cannot be known."""
    try:
        descriptor = os.open(folder / FILE, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except OSError as error:
        return _holder(descriptor)[0] if error.errno in _TAKEN else None
    finally:
        os.close(descriptor)


def _take(descriptor: int, folder: Path, say: Callable[[str], None], patience: float) -> None:
    start, said = time.monotonic(), False
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                say(
                    f"note       the file system of {folder} has no locks ({error.strerror}): nothing keeps a second process "
                    "from writing to this run"
                )
                return
            if error.errno not in _TAKEN:
                raise
        who, is_here = _holder(descriptor)
        if is_here or time.monotonic() - start >= patience:
            raise ConfigError(
                f"run {folder} is in use by {who}: one process at a time may write to it; wait for its end or stop it (a stop "
                "signal has it save first), then give this command again"
            )
        if not said:
            say(f"waiting    run {folder} is in use by {who}; if that machine died, it is let go within two minutes")
            said = True
        time.sleep(min(1.0, patience))


def _sign(descriptor: int) -> None:
    """Leave word of who holds the lock; a full disk does not matter, the lock itself needs no space."""
    words = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(words).encode(), 0)


def _holder(descriptor: int) -> tuple[str, bool]:
    """Who signed the lock, in words, and whether it is a process of this machine."""
    try:
        words = json.loads(os.pread(descriptor, 1000, 0))
        text = f"process {words['pid']} on {words['host']} since {words['since']}"
        return text, words["host"] == socket.gethostname()
    except (OSError, ValueError, KeyError, TypeError):
        return "another process", True


def _release(descriptor: int) -> None:
    if descriptor in _held:
        _held.discard(descriptor)
        os.close(descriptor)


def _let_go_in_child() -> None:
    """A forked child shares the lock and would keep it for as long as it lives, past the end of the process that took it."""
    for descriptor in tuple(_held):
        _release(descriptor)


os.register_at_fork(after_in_child=_let_go_in_child)
