"""What the shell offers after a TAB: methods, recipes and keys of the configuration. Imports no torch."""

from __future__ import annotations

from typing import get_args


def methods(incomplete: str) -> list[str]:
    """Names of methods that begin so."""
    from grpo_lab.methods import METHODS

    return [name for name in METHODS if name.startswith(incomplete)]


def recipes(incomplete: str) -> list[str]:
    """Names of recipes that begin so."""
    from grpo_lab.config import Config

    return [name for name in get_args(Config.model_fields["recipe"].annotation) if name.startswith(incomplete)]


def keys(incomplete: str) -> list[tuple[str, str]]:
    """Keys and sections that begin so, with what they mean."""
    from grpo_lab.config.names import fields

    return [(key, field.description or "") for key, field in fields().items() if key.startswith(incomplete)]


def assignments(incomplete: str) -> list[tuple[str, str]]:
    """Keys that begin so, as `--set` takes them: key=."""
    from grpo_lab.config.names import fields, section_of

    values = [(key, field.description or "") for key, field in fields().items() if not section_of(field)]
    return [(f"{key}=", text) for key, text in values if key.startswith(incomplete)]
