"""The commands over several runs: sweep and report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from grpo_lab.cli import completion
from grpo_lab.cli.options import ConfigFile, Overrides
from grpo_lab.cli.outputs import check_file
from grpo_lab.errors import ConfigError
from grpo_lab.storage.scratch import write_whole


def sweep(
    config: ConfigFile = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="Repeat for more. Default: the config's.", autocompletion=completion.methods),
    ] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="Repeat for more. Default: the config's.")] = None,
    beta: Annotated[
        list[float] | None, typer.Option(help="Repeat for more. Default: 0.01, 0.02, 0.05, 0.1, 0.2.")
    ] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Repeat for more. Default: the config's.")] = None,
    name: Annotated[str, typer.Option("--name", help="Folder of the sweep below output_dir.")] = "sweep",
    set_: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and what would happen to each.")] = False,
) -> None:
    """Train every combination of methods and betas. Finished runs are skipped, broken ones continued; a table at the end."""
    from grpo_lab.assemble import check
    from grpo_lab.config.file import load_config
    from grpo_lab.console import Console
    from grpo_lab.sweep import Grid, members, run_members, state_of

    base, console = load_config(config, set_ or []), Console()
    betas = tuple(beta or (0.01, 0.02, 0.05, 0.1, 0.2))
    once = lambda values: tuple(dict.fromkeys(values))  # noqa: E731
    grid = Grid(once(method or [base.method]), once(recipe or [base.recipe]), once(betas), once(seed or [base.seed]))
    runs = members(config, set_ or [], grid, name)
    for member in runs:
        check(member.config)
    if dry_run:
        for member in runs:
            console.say(f"{state_of(member):10}  {member.path}")
        return
    done = run_members(runs, console)
    from grpo_lab.evaluation import comparison

    items = comparison.compared(done)
    if items:
        folder = runs[0].path.parent
        for line in ("", *comparison.table(items)):
            console.say(line)
        rows = [dict(zip(comparison.HEAD, comparison.cells(item), strict=True)) for item in items]
        write_whole(folder / "sweep.json", json.dumps(rows, indent=1))
        console.say(f"numbers    {folder / 'sweep.json'}")
        for path in comparison.draw(items, folder / "free_energy"):
            console.say(f"figure     {path}")
        console.say(f"next       grpo-lab report {folder}")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of runs such as a sweep's.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The page to write. Default: report.html in the one folder given, else here."
        ),
    ] = None,
) -> None:
    """Write one HTML page about runs. It holds figures, tables, configs, warnings and completions, and needs no network."""
    from grpo_lab.console import Console
    from grpo_lab.evaluation.page import write_page

    opened = [run for path in runs for run in runs_below(path)]
    folder = opened[0].path if len(opened) == 1 else runs[0]
    page = output or (folder if len(runs) == 1 else Path()) / "report.html"
    check_file("--output", page)
    write_page(opened, page)
    Console().say(f"report     {page}")


def runs_below(path: Path) -> list[Any]:
    """The run `path` is, or those of a folder of runs. ConfigError where there is none."""
    from grpo_lab.run_dir import RunDir

    if (path / "config.yaml").is_file() or not path.is_dir():
        return [RunDir.open(path)]
    found = [
        RunDir.open(file.parent)
        for file in sorted(path.glob("*/config.yaml"))
        if (file.parent / "checkpoints").is_dir()
    ]
    if not found:
        raise ConfigError(
            f"{str(path)!r} holds no run: a run has config.yaml and checkpoints/; give the path train printed"
        )
    return found
