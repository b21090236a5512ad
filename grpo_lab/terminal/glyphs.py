"""The characters a panel is drawn with: Unicode, or ASCII where the terminal may not have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Glyphs:
    """`levels` from low to high; `segments` tell a bar's parts from each other without colour."""

    levels: str
    segments: str
    done: str
    todo: str
    point: str
    between: str
    mark: str
    bracket: str
    spinner: str
    minus: str
    plus_minus: str
    dot: str
    warning: str


UNICODE = Glyphs("▁▂▃▄▅▆▇█", "█▓▒░", "━", "─", "●", "─", "┼", "▒", "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "−", "±", "·", "▲")
ASCII = Glyphs("_.-~=+*#", "#=+.", "=", "-", "O", "-", "+", "#", "|/-\\", "-", "+-", "|", "!")


def speaks_unicode(encoding: str, environment: Mapping[str, str]) -> bool:
    """Whether a terminal takes more than ASCII: a UTF encoding, and no locale C or POSIX that the user chose.

    Python itself makes LC_CTYPE=C.UTF-8 of the locale C, so that value says nothing.
    """
    ctype = environment.get("LC_CTYPE", "")
    locale = environment.get("LC_ALL") or (ctype if ctype != "C.UTF-8" else "") or environment.get("LANG") or ""
    return encoding.lower().startswith("utf") and locale not in ("C", "POSIX")


def sparkline(values: Sequence[float], width: int, glyphs: Glyphs) -> str:
    """The last `width` values as levels between their least and largest; all at the lowest where they are equal."""
    shown = values[-width:] if width > 0 else []
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(glyphs.levels) - 1) / (high - low) if high > low else 0.0
    return "".join(glyphs.levels[round((value - low) * scale)] for value in shown)


def shares(values: Sequence[float], width: int) -> list[int]:
    """`width` cells dealt in proportion to the values, by largest remainder."""
    total = sum(values)
    if total <= 0 or width <= 0:
        return [0] * len(values)
    exact = [value / total * width for value in values]
    cells = [int(cell) for cell in exact]
    by_remainder = sorted(range(len(values)), key=lambda index: cells[index] - exact[index])
    for index in by_remainder[: width - sum(cells)]:
        cells[index] += 1
    return cells


def gauge(start: float, here: float, lower: float, upper: float, width: int, glyphs: Glyphs) -> str:
    """A line from the reference's F, which is marked, at the left, down to the floor at the right: where F is, and the floor's
    bracket. Where F lies outside, the line reaches up to it.
    """
    left, right = max(start, here, upper), min(lower, here)
    place = lambda value: round((left - value) / (left - right) * (width - 1)) if left > right else 0  # noqa: E731
    cells = [glyphs.between] * width
    for index in range(place(upper), place(lower) + 1):
        cells[index] = glyphs.bracket
    cells[place(start)] = glyphs.mark
    cells[place(here)] = glyphs.point
    return "".join(cells)
