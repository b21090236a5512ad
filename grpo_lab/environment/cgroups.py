"""Limits of the control groups that this process is in, versions 1 and 2; inf where there are none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60  # version 1 writes a number about as large as an address for "none"


def cpu_quota(mount: Path = _MOUNT, membership: Path = Path("/proc/self/cgroup")) -> float:
    """Cores' worth of time this process may use."""
    quotas = [math.inf]
    for folder in _folders("cpu", mount, membership):
        words = _read(folder / "cpu.max").split() or [
            _read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")
        ]
        if all(word.isdigit() for word in words) and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas)


def memory_limit(mount: Path = _MOUNT, membership: Path = Path("/proc/self/cgroup")) -> float:
    """Bytes of main memory this process and its neighbours in the group may use."""
    return _least("memory", ("memory.max", "memory.limit_in_bytes"), mount, membership)


def process_limit(mount: Path = _MOUNT, membership: Path = Path("/proc/self/cgroup")) -> float:
    """Processes and threads that may run in the group."""
    return _least("pids", ("pids.max",), mount, membership)


def _least(controller: str, names: tuple[str, ...], mount: Path, membership: Path) -> float:
    texts = [_read(folder / name) for folder in _folders(controller, mount, membership) for name in names]
    return min((int(text) for text in texts if text.isdigit() and int(text) < _NO_LIMIT), default=math.inf)


def _folders(controller: str, mount: Path, membership: Path) -> Iterator[Path]:
    """The group's folder and those above it, of whichever version; a limit above holds below too."""
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = mount / controllers if controllers else mount
        root = mount / controller if controllers and not root.is_dir() else root
        group = Path(path.lstrip("/"))
        yield from (root / part for part in (group, *group.parents))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
