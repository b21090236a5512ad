"""What a key of the configuration means, as lines: its kind, default, what methods set it to, what a resumed run may do."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from grpo_lab.config import Config
from grpo_lab.config.file import build_config, in_yaml, is_free
from grpo_lab.config.names import fields, known_part, section_of, unknown_key
from grpo_lab.methods import METHODS
from grpo_lab.objective.axes import CORRECTION_OPTIONS, Objective, resolve
from grpo_lab.plugins import names

_PLUGINS = {
    "data.task": "grpo_lab.tasks",
    "rollout.engine": "grpo_lab.rollout.engines",
    "objective.gate": "grpo_lab.objective.gates",
}
_AXES = ("gate", "gate_options", "level", "old", "advantage", "kl", "aggregate", "dynamic_sampling", "overlong_cache")
_KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text", NoneType: "null"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_COLUMN = 36


def explain(key: str | None) -> list[str]:
    """The lines of one key, of a section's keys, or of all. ConfigError for an unknown key, with what may be meant."""
    every = fields()
    if key is None:
        return [line for name, field in every.items() for line in _brief(name, field)]
    known = known_part(key)
    if not known or (known != key and get_origin(every[known].annotation) is not dict):
        raise unknown_key(key, [name for name in every if name.rpartition(".")[0] == known])
    if section := section_of(every[known]):
        keys = [line for name, field in fields(section, f"{known}.").items() for line in _brief(name, field)]
        return [f"{known}: {' '.join((section.__doc__ or '').split())}", *keys]
    return _whole(known, every[known])


def _brief(key: str, field: FieldInfo) -> list[str]:
    """One line: of a section what it is, of a key its default and what it does."""
    if section_of(field):
        return [f"{key + ':':{_COLUMN}} {field.description}"]
    return [f"{f'{key} = {_shown(field.default)}':{_COLUMN}} {field.description}"]


def _whole(key: str, field: FieldInfo) -> list[str]:
    lines = [
        key,
        f"  {field.description}",
        f"  kind      {kind_of(key, field)}",
        f"  default   {_shown(field.default)}",
    ]
    section, _, name = key.rpartition(".")
    if section == "objective" and name in _AXES:
        lines += _by_method(name)
    if key == "objective.correction_options":
        lines += [
            f"  {correction:13} {_shown(options)}" for correction, options in CORRECTION_OPTIONS.items() if options
        ]
    return [*lines, f"  resume    {_on_resume(key)}"]


def kind_of(key: str, field: FieldInfo) -> str:
    """What may be written there, in words."""
    if key == "method":
        return f"one of {', '.join(METHODS)}"
    text = _kind(field.annotation)
    limits = [f"{_BOUNDS[name]} {value:g}" for limit in field.metadata for name, value in _bounds(limit).items()]
    if limits:
        first, *rest = text.split(", or ")
        text = ", or ".join([f"{first} {' and '.join(limits)}", *rest])
    if key in _PLUGINS:
        text = f"one of {', '.join(names(_PLUGINS[key]))}, or module:Class" + (", or null" if "null" in text else "")
    return text


def _bounds(limit: Any) -> dict[str, float]:
    """The bounds in a constraint, by their names in `_BOUNDS`."""
    return {name: getattr(limit, name) for name in _BOUNDS if hasattr(limit, name)}


def _kind(annotation: Any) -> str:
    if annotation in _KINDS:
        return _KINDS[annotation]
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if get_origin(annotation) is list:
        return f"list of {_kind(parts[0])}"
    if get_origin(annotation) is dict:
        return "names with numbers" if parts[1] is float else "names with values"
    return ", or ".join(_kind(part) for part in parts)


def _by_method(name: str) -> list[str]:
    """What each method makes of an axis left at null, under both recipes, methods with one value together."""
    tables = {recipe: _values(name, recipe) for recipe in ("free_energy", "paper")}
    if tables["free_energy"] == tables["paper"]:
        tables = {"by method": tables["paper"]}
    lines = []
    for head, table in tables.items():
        title = head if head == "by method" else f"recipe {head}"
        lines.append(f"  {title}")
        for value, methods in table.items():
            lines.append(f"    {value}: {'every method' if len(methods) == len(METHODS) else ', '.join(methods)}")
    if name == "overlong_cache":
        lines.append(f"    (of rollout.max_new_tokens={Config().rollout.max_new_tokens}; it is a fifth of it)")
    return lines


def _values(name: str, recipe: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for method in METHODS:
        objective: Objective = resolve(build_config({"method": method, "recipe": recipe}, "method"))
        found.setdefault(_shown(getattr(objective, name)), []).append(method)
    return found


def _on_resume(key: str) -> str:
    if is_free(key, "linear"):
        return "a resumed run may change it"
    if is_free(key):
        return "a resumed run may change it while learner.schedule is constant"
    return "a resumed run may not change it: it would compute something else"


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {number:g}" for name, number in value.items()) or "{}"
    return value if isinstance(value, str) and value else in_yaml(value)
