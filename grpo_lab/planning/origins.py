"""Where each value of a configuration comes from: a file, `--set`, a flag, a default; or, of an axis, method and recipe."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from grpo_lab.config import Config
from grpo_lab.methods import METHODS
from grpo_lab.objective.axes import Objective

_FLAG_OF = {"run_name": "--name"}  # the flags that are not named as their keys
_COLUMN = 36  # where the comments begin
_OF_THE_METHOD = ("gate", "level", "old")  # whatever the recipe


def origins(path: Path | None, overrides: Sequence[str], flags: Mapping[str, Any]) -> dict[str, str]:
    """What gave each key that somebody gave, by dotted key: FILE, `--set`, `--beta`.

    The arguments are `load_config`'s, which has accepted them.
    """
    found: dict[str, str] = {}
    if path is not None:
        _note(found, "", yaml.safe_load(path.read_text(encoding="utf-8")), str(path))
    for override in overrides:
        key, _, text = override.partition("=")
        _note(found, key.strip(), yaml.safe_load(text), "--set")
    for key, value in flags.items():
        if value is not None:
            _note(found, key, value, _FLAG_OF.get(key, f"--{key}"))
    return found


def annotated_yaml(config: Config, objective: Objective, given: Mapping[str, str]) -> str:
    """The resolved configuration as YAML of the same content, with each value's origin (or the default) as a comment."""
    tree = config.model_dump(mode="json")
    text = yaml.safe_dump(
        tree, sort_keys=False, allow_unicode=True, width=float("inf")
    )  # a comment stands on the last line
    chosen = _chosen_axes(config, objective)
    comments: dict[int, str] = {}
    for line, key in _values(yaml.compose(text, Loader=yaml.SafeLoader), "", chosen):
        comments[line] = f"-> {chosen[key]}" if key in chosen else _origin(key, given)
    lines = text.splitlines()
    return "\n".join(f"{line:<{_COLUMN}}  # {comments[n]}" if n in comments else line for n, line in enumerate(lines))


def _note(found: dict[str, str], key: str, value: Any, origin: str) -> None:
    """`value` replaces all that was known of `key`."""
    for old in [old for old in found if old == key or old.startswith(f"{key}.")]:
        del found[old]
    if isinstance(value, Mapping) and value:
        for name, child in value.items():
            _note(found, f"{key}.{name}" if key else str(name), child, origin)
    elif key:
        found[key] = origin


def _origin(key: str, given: Mapping[str, str]) -> str:
    """Of a key, or of the nearest key above it that was given as one value."""
    parts = key.split(".")
    above = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((given[name] for name in above if name in given), "default")


def _values(node: yaml.Node | None, key: str, headings: Collection[str]) -> Iterator[tuple[int, str]]:
    """The line on which each value ends, and its dotted key; the items of a list have the list's key.

    Of `headings`, keys of whole mappings, the line that names them too.
    """
    if isinstance(node, yaml.MappingNode) and node.value:
        for name, child in node.value:
            inner = f"{key}.{name.value}" if key else str(name.value)
            if inner in headings:
                yield name.end_mark.line, inner
            yield from _values(child, inner, headings)
    elif isinstance(node, yaml.SequenceNode) and node.value:
        for child in node.value:
            yield from _values(child, key, headings)
    elif node is not None:
        yield node.end_mark.line, key


def _chosen_axes(config: Config, objective: Objective) -> dict[str, str]:
    """The axes that nobody gave: what they are in this run and who chose it, by dotted key."""
    source = METHODS[config.method].source
    method = f"method {config.method}, {source}"
    recipe = f"recipe paper, {source}" if config.recipe == "paper" else f"recipe {config.recipe}"
    chosen = {}
    for name in ("gate", "level", "old", "advantage", "kl", "aggregate", "dynamic_sampling", "overlong_cache"):
        if getattr(config.objective, name) is None:
            value = yaml.safe_dump(getattr(objective, name)).split("\n")[0]
            chosen[name] = f"{value} ({method if name in _OF_THE_METHOD else recipe})"
    if config.objective.correction is None:
        chosen["correction"] = f"{objective.correction} ({_why_corrected(objective)})"
    if objective.gate_options != config.objective.gate_options:
        chosen["gate_options"] = f"{_options(objective.gate_options)} ({method})"
    if objective.correction_options != config.objective.correction_options:
        chosen["correction_options"] = f"{_options(objective.correction_options)} (correction {objective.correction})"
    return {f"objective.{name}": text for name, text in chosen.items()}


def _why_corrected(objective: Objective) -> str:
    if objective.max_staleness == 0:
        return "rollout.max_staleness 0"
    if objective.correction == "none":
        return "the ratio to the rollout's log-probs contains it"
    return f"rollout.max_staleness {objective.max_staleness}"


def _options(options: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in options.items())
