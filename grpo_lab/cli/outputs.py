"""Places a command will write to, looked at before it computes for minutes."""

from __future__ import annotations

from pathlib import Path

from grpo_lab.errors import ConfigError
from grpo_lab.paths import obstacle


def check_folder(option: str, folder: Path | None) -> None:
    """ConfigError when `folder`, given as `option`, cannot be made or written to."""
    if folder is not None and (reason := obstacle(folder)):
        raise ConfigError(f"{option} {folder}: {reason}; give a folder that can be written to")


def check_file(option: str, file: Path | None) -> None:
    """ConfigError when `file`, given as `option`, is a folder or lies where nothing can be written."""
    if file is not None and (reason := "is a folder" if file.is_dir() else obstacle(file.parent)):
        raise ConfigError(f"{option} {file}: {reason}; give a file in a folder that can be written to")
