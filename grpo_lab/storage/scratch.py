"""What lies on the disk for a while: folders of a process, files and folders on their way to being whole or gone.

Unfinished files and folders have hidden names: nothing takes them for whole, and what a killed process left is found.
"""

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from grpo_lab.errors import RunError

PARTIAL, DELETING = ".partial-", ".deleting-"
ADVICE = "free some space or choose another folder"
_own: set[Path] = set()  # folders this process made


def scratch_folder(purpose: str, parent: Path | None = None) -> Path:
    """A new folder `grpo_lab-<purpose>-<host>-<pid>-...` below `parent` (default: the temporary directory), this user's alone.

    Folders of the same purpose and host whose process is gone are removed first (where /proc tells); other machines may share
    `parent`.
    """
    parent = parent or Path(tempfile.gettempdir())
    prefix = f"grpo_lab-{purpose}-{socket.gethostname()}-"
    for stale in parent.glob(f"{prefix}*"):
        owner = stale.name.removeprefix(prefix).split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists() and Path("/proc/self").exists():
            shutil.rmtree(stale, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent))
    _own.add(folder)
    return folder


def remove_own() -> None:
    """Remove every folder this process (not the one it was forked from) made, where it ends without tidying up."""
    for folder in _own:
        if f"-{os.getpid()}-" in folder.name:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def whole_file(path: Path, advice: str = ADVICE) -> Iterator[Path]:
    """A name beside `path` to write to; it is flushed to the disk and becomes `path` when the block ends well, else it goes.

    The folder is made where it is missing. RunError, ending with `advice`, when the disk refuses.
    """
    partial = path.with_name(f"{PARTIAL}{path.name}-{socket.gethostname()}-{os.getpid()}")
    with disk_errors(path, advice):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield partial
            flush(partial)
            partial.replace(path)
            flush(path.parent)
        finally:
            with suppress(OSError):
                partial.unlink()


def write_whole(path: Path, text: str, advice: str = ADVICE) -> None:
    """Have `path` contain `text`, or what it contained before. RunError, ending with `advice`, when the disk refuses."""
    with whole_file(path, advice) as partial:
        partial.write_text(text, encoding="utf-8")


def remove_folder(folder: Path) -> None:
    """Delete `folder` (OSError); a deletion that is killed leaves a hidden name and nothing that looks whole."""
    doomed = folder.with_name(DELETING + folder.name)
    shutil.rmtree(doomed, ignore_errors=True)
    folder.replace(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Remove what killed processes left half-written or half-deleted in `parent`, which nobody else may be writing to."""
    for leftover in (*parent.glob(f"{PARTIAL}*"), *parent.glob(f"{DELETING}*")):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            with suppress(OSError):
                leftover.unlink()


def flush(path: Path) -> None:
    """Wait until the file, or the names in the folder, are on the disk. Folders only where the file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(path: Path, advice: str = ADVICE) -> Iterator[None]:
    """Inside, the system's refusal to write `path` becomes a RunError that names it and the reason."""
    try:
        yield
    except Exception as error:
        reason = disk_reason(error)
        if reason is None:
            raise
        raise RunError(f"cannot write {path}: {reason}; {advice}") from None


def disk_reason(error: BaseException) -> str | None:
    """Why the system refused a file, "No space left on device"; None where the error is not about files.

    Libraries in Rust and C++ raise errors of their own types, with the system's number in their text.
    """
    if isinstance(error, RunError):
        return None
    number = re.search(r"(?:os error|errno) (\d+)", str(error), re.IGNORECASE)
    if number:
        return os.strerror(int(number[1]))
    return (error.strerror or " ".join(str(error).split())) if isinstance(error, OSError) else None
