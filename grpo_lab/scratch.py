"""Temporary folders that belong to a process: named by its id, so that what killed processes left is found and removed."""

import os
import shutil
import socket
import tempfile
from pathlib import Path


def scratch_folder(purpose: str, parent: Path | None = None) -> Path:
    """A new folder `grpo_lab-<purpose>-<host>-<pid>-...` below `parent` (default: the temporary directory).

    Folders of the same purpose and host whose process is gone are removed first (where /proc tells); other machines may share
    `parent`.
    """
    parent = parent or Path(tempfile.gettempdir())
    prefix = f"grpo_lab-{purpose}-{socket.gethostname()}-"
    for stale in parent.glob(f"{prefix}*"):
        owner = stale.name.removeprefix(prefix).split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists() and Path("/proc/self").exists():
            shutil.rmtree(stale, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent))
