"""What the survey is made of: one fact a line, and the words for its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["pass", "warn", "FAIL"]


@dataclass(frozen=True)
class Fact:
    """One line: what is here; where something is wrong, what that prevents and what puts it right."""

    name: str
    state: State
    text: str


def size(count: float) -> str:
    """A number of bytes in words: "1.5 GiB", "64 MiB"."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def reason(error: BaseException) -> str:
    """An error as one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}".removesuffix(": ")
