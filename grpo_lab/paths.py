"""Where things lie on this machine: the cache folder, and paths with `~` and `$VARIABLES`."""

from __future__ import annotations

import os
from pathlib import Path
from string import Template


def cache_folder() -> Path:
    """Where models written on this machine lie: $GRPO_LAB_CACHE, else grpo_lab below $XDG_CACHE_HOME or ~/.cache."""
    parent = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("GRPO_LAB_CACHE") or Path(parent) / "grpo_lab").expanduser()


def obstacle(folder: Path) -> str:
    """What stops `folder` from being there and written to, in words; "" when nothing does."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not nearest.is_dir():
        return f"{str(nearest)!r} is not a folder"
    return "" if os.access(nearest, os.W_OK | os.X_OK) else f"{str(nearest)!r} is not writable"


def expand_path(text: str) -> str:
    """`~` and `$VARIABLES` of a path replaced ($GRPO_LAB_CACHE has a default); hub ids pass unchanged."""
    variables = {**os.environ, "GRPO_LAB_CACHE": str(cache_folder())}
    return os.path.expanduser(Template(text).safe_substitute(variables))
