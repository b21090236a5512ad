"""The commands that list what there is: methods, gates, tasks and engines; metrics, and a run's newest values."""

from __future__ import annotations

import difflib
import shutil
import textwrap
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer

from grpo_lab.errors import ConfigError
from grpo_lab.metric_guide import GUIDE, Metric, newest_values

_WIDEST, _NAMES = 110, 10
_PLUGIN_FOLDERS = {
    "gates": "grpo_lab.objective.gates",
    "tasks": "grpo_lab.tasks",
    "engines": "grpo_lab.rollout.engines",
}


def list_names() -> None:
    """Methods, gates, tasks and engines that a config can name."""
    from grpo_lab.methods import METHODS, gate_in_words
    from grpo_lab.plugins import names

    for name, row in METHODS.items():
        gate = gate_in_words(row.gate, row.gate_options)
        typer.echo(f"{name:{_NAMES}} {gate}, {row.level} level, old policy from the {row.old}; {row.source}")
        typer.echo(
            f"{'':{_NAMES}} recipe paper: {row.advantage}, kl {row.kl}, {row.aggregate}"
            + (f"; {row.note}" if row.note else "")
        )
    for kind, package in _PLUGIN_FOLDERS.items():
        typer.echo(f"{kind:{_NAMES}} {', '.join(names(package))}")


def metrics(
    name: Annotated[str, typer.Argument(help="A metric, a pattern ('gate/*') or a part of names (kl).")] = "",
    run: Annotated[
        Path | None, typer.Option(help="Show this run's newest values, and which of them need a look.")
    ] = None,
) -> None:
    """What each metric means and when it is healthy. Also what to do when it is not."""
    names = find(name) if name else list(GUIDE)
    if run is not None:
        lines = _of_run(run, names)
    elif name:
        lines = (line for each in names for line in (each, *_explained(GUIDE[each]), ""))
    else:
        lines = (line for each in names for line in _wrapped(f"{each:<28}", GUIDE[each].meaning))
    for line in lines:
        typer.echo(line)


def find(pattern: str) -> list[str]:
    """The metrics of a name, a pattern (`gate/*`) or a part of names (`kl`). ConfigError, with near ones, for none."""
    exact = [name for name in GUIDE if name == pattern]
    found = (
        exact or [name for name in GUIDE if fnmatchcase(name, pattern)] or [name for name in GUIDE if pattern in name]
    )
    if found:
        return found
    last = pattern.rsplit("/", 1)[-1]
    near = [name for name in GUIDE if name.rsplit("/", 1)[-1] == last]
    near += [name for name in difflib.get_close_matches(pattern, GUIDE, n=3, cutoff=0.6) if name not in near]
    hint = f"did you mean {' or '.join(map(repr, near[:3]))}? " if near else ""
    raise ConfigError(f"unknown metric {pattern!r}: {hint}`grpo-lab metrics` lists all {len(GUIDE)}")


def _of_run(path: Path, names: list[str]) -> Iterator[str]:
    """Newest values beside what is healthy; those outside the range are marked, with what to do."""
    from grpo_lab.run_dir import RunDir

    values = newest_values(RunDir.open(path))
    shown = [name for name in names if name in values]
    unhealthy = [name for name in shown if not GUIDE[name].is_healthy(values[name])]
    at = (
        f"after step {values['step']:,.0f}, {values['rollouts/total']:,.0f} rollouts"
        if "step" in values
        else "no step yet"
    )
    yield f"{path}: {at}; needs a look: {', '.join(unhealthy) or 'nothing'}"
    yield ""
    for name in shown:
        mark = "!" if name in unhealthy else " "
        yield from _wrapped(f"{mark} {name:<28}{_number(values[name]):>11}  ", _healthy(GUIDE[name]))
    for remedy in dict.fromkeys(GUIDE[name].remedy for name in unhealthy):
        yield ""
        yield "! " + ", ".join(f"{n} {_number(values[n])}" for n in unhealthy if GUIDE[n].remedy == remedy)
        yield from _wrapped("    ", remedy)


def _explained(metric: Metric) -> list[str]:
    parts = (("is", metric.meaning), ("healthy", _healthy(metric)), ("if not", metric.remedy))
    return [line for head, text in parts if text for line in _wrapped(f"    {head:<9}", text)]


def _healthy(metric: Metric) -> str:
    return f"{metric.healthy} {metric.marked}".rstrip()


def _wrapped(head: str, text: str) -> list[str]:
    """`text` beside `head`, as wide as the terminal."""
    width = max(min(shutil.get_terminal_size((100, 24)).columns, _WIDEST), len(head) + 24)
    return textwrap.wrap(text, width, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.4g}"
