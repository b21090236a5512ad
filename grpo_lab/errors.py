"""Errors a user can cause. Their text is the whole message: what happened, what was given, what is allowed, what to do."""

import difflib
import re
import traceback
from collections.abc import Iterable, Sequence

_SECRET = re.compile(r"(?<=://)[^\s/'\"]+@")
_UNSEEN = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_TURNS = {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}  # these reorder a line


class UserError(ValueError):
    """Base of everything the command line prints as one line instead of a traceback."""

    exit_code = 1


class ConfigError(UserError):
    """Found before any model loads: a wrong key, value, name or file. Exit code 2."""

    exit_code = 2


class RunError(UserError):
    """Found while running: the run stops, and what was saved stays. Exit code 1."""


def unknown_name(kind: str, given: str, known: Iterable[str], meant: Sequence[str] = ()) -> ConfigError:
    """The error for a name that does not exist, with what may be `meant` (else the near ones) first."""
    names = sorted(set(known))
    near = meant or difflib.get_close_matches(given, names, n=2, cutoff=0.6)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return ConfigError(f"unknown {kind} {given!r}: {hint}allowed: {', '.join(names)}")


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 problem", "2,048 problems", "3 batches"."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def shown(text: str) -> str:
    """Text as it is safe on a terminal and in a log: control characters spelt out, passwords in addresses left out."""
    return _SECRET.sub("***@", text.translate(_UNSEEN | _TURNS))


def in_words(error: Exception) -> str:
    """An exception of somebody else's code in one line: its kind, text and place."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]} ({place.filename}, line {place.lineno})"


def spelled(value: object) -> str:
    """A value that somebody else's code gave, short and in one line; its kind where it has no repr, as 10**5000 has none."""
    try:
        return " ".join(repr(value).split())[:150]
    except Exception:
        return f"a {type(value).__name__} that cannot be printed"
