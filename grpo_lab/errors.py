"""Errors a user can cause. Their text is the whole message: what happened, what was given, what is allowed, what to do."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Base of everything the command line prints as one line instead of a traceback."""

    exit_code = 1


class ConfigError(UserError):
    """Found before any model loads: a wrong key, value, name or file. Exit code 2."""

    exit_code = 2


class RunError(UserError):
    """Found while running: the run stops, and what was saved stays. Exit code 1."""


def unknown_name(kind: str, given: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that does not exist, with the near ones first."""
    names = sorted(set(known))
    near = difflib.get_close_matches(given, names, n=2, cutoff=0.6)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return ConfigError(f"unknown {kind} {given!r}: {hint}allowed: {', '.join(names)}")
