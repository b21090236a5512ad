"""The commands about a configuration alone: show it resolved, compare two, explain a key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from grpo_lab.cli import completion
from grpo_lab.cli.options import ConfigFile, Overrides
from grpo_lab.config import Config, ObjectiveConfig
from grpo_lab.config.file import changes, in_yaml, load_config
from grpo_lab.errors import ConfigError

config = typer.Typer(no_args_is_help=True, help="Look at configurations: resolved, compared, explained.")


@config.command()
def show(
    run: Annotated[Path | None, typer.Argument(help="A run folder, in place of --config.")] = None,
    config_file: ConfigFile = None,
    method: Annotated[str | None, typer.Option(help="As for train.", autocompletion=completion.methods)] = None,
    recipe: Annotated[str | None, typer.Option(help="As for train.", autocompletion=completion.recipes)] = None,
    beta: Annotated[float | None, typer.Option(help="As for train.")] = None,
    seed: Annotated[int | None, typer.Option(help="As for train.")] = None,
    set_: Overrides = None,
) -> None:
    """Every setting with where it comes from. YAML that --config takes."""
    from grpo_lab.objective.axes import resolve
    from grpo_lab.planning.origins import annotated_yaml, origins

    flags = {"method": method, "beta": beta, "recipe": recipe, "seed": seed}
    given = [*(name for name, value in flags.items() if value is not None), *(["--set"] if set_ else [])]
    if run and (config_file or given):
        raise ConfigError(
            f"config show {run}: it shows that run as it is: leave out --config, --method, --set and the like"
        )
    if run:
        loaded = _read(run)
        sources = {change.key: str(run) for change in changes(Config(), loaded)}
    else:
        loaded = load_config(config_file, set_ or [], flags)
        sources = origins(config_file, set_ or [], flags)
    typer.echo(annotated_yaml(loaded, resolve(loaded), sources))


@config.command()
def diff(
    first: Annotated[Path, typer.Argument(help="A YAML file or a run folder; alone it is compared with the defaults.")],
    second: Annotated[Path | None, typer.Argument(help="Another YAML file or run folder.")] = None,
    resume_relevant: Annotated[
        bool, typer.Option("--resume-relevant", help="Mark the keys that a resumed run may not change.")
    ] = False,
) -> None:
    """The keys that differ, `key: a -> b`. What a file leaves out has its default."""
    old, new = (_read(first), _read(second)) if second else (Config(), _read(first))
    found = changes(old, new)
    for change in found:
        mark = ("!  " if change.is_trajectory else "   ") if resume_relevant else ""
        typer.echo(f"{mark}{change}")
    for line in _set_by_the_method(old, new, [change.key for change in found]):
        typer.echo(f"{'   ' if resume_relevant else ''}{line}")
    if not found:
        typer.echo("no difference")
    elif resume_relevant:
        count = sum(change.is_trajectory for change in found)
        typer.echo(f"!  {count} of {len(found)} would change the trajectory: a resumed run may not change them")


def _set_by_the_method(old: Config, new: Config, said: Sequence[str]) -> list[str]:
    """The axes that differ though no key of them does, as those of two methods or recipes; not those in `said`."""
    from grpo_lab.objective.axes import resolve

    before, after = asdict(resolve(old)), asdict(resolve(new))
    axes = [name for name in ObjectiveConfig.model_fields if name in before and before[name] != after[name]]
    return [
        f"objective.{name}: {in_yaml(before[name])} -> {in_yaml(after[name])} (follows from these)"
        for name in axes
        if not any(f"{key}.".startswith(f"objective.{name}.") for key in said)
    ]


@config.command()
def explain(
    key: Annotated[
        str | None,
        typer.Argument(help="A key or a section; without it all are listed.", autocompletion=completion.keys),
    ] = None,
) -> None:
    """What a key means and what may be written there. Its default, what methods set it to, and whether a run may change it."""
    from grpo_lab.config.explain import explain as lines

    for line in lines(key):
        typer.echo(line)


def _read(path: Path) -> Config:
    """Of a YAML file, or of the run a folder is (or is a checkpoint of)."""
    from grpo_lab.run_dir import RunDir

    if path.is_dir():
        return RunDir.open(path).config
    return load_config(path)
