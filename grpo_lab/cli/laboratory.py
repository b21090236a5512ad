"""The laboratory's commands: equilibria of the toy model, gates on the plane, runs replayed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from grpo_lab.cli import completion
from grpo_lab.cli.options import quiet_libraries
from grpo_lab.cli.outputs import check_file, check_folder
from grpo_lab.errors import ConfigError, unknown_name
from grpo_lab.storage.scratch import write_whole

lab = typer.Typer(
    no_args_is_help=True, help="Objectives held against exact answers. On a model small enough to enumerate."
)
plot = typer.Typer(no_args_is_help=True, help="Figures of gates and of what a run's tokens did to them.")

ORIGINALS = ("ppo", "grpo", "dapo", "sao", "sapo", "gspo")
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for the figures, PNG and SVG.")]


@lab.callback()
def _lab() -> None:
    """Keeps `lab` a group while it has one command."""


@plot.callback()
def _plot() -> None:
    """Keeps `plot` a group while it has one command."""


@lab.command()
def equilibrium(
    method: Annotated[
        list[str] | None,
        typer.Option(help="A method; repeat for more. Default: the six originals.", autocompletion=completion.methods),
    ] = None,
    gate: Annotated[
        list[str] | None, typer.Option(help="Also this gate of yours, module:Class; repeat for more.")
    ] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="free_energy or paper. Default: both.")] = None,
    beta: Annotated[list[float] | None, typer.Option(help="A temperature. Default: 0.1, 0.25, 0.5 and 1.")] = None,
    axes: Annotated[bool, typer.Option("--axes", help="The estimators one by one in place of the methods.")] = False,
    sampled: Annotated[bool, typer.Option("--sampled", help="Also train on sampled groups of 8 (4 s a row).")] = False,
    output: Output = Path("figures"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write every number to this file.")] = None,
) -> None:
    """Where each objective leads on an enumerated model. F - F*, reward, KL and the temperature it really has."""
    from grpo_lab.console import Console
    from grpo_lab.lab import survey

    betas, recipes = tuple(beta or survey.BETAS), tuple(recipe or ("free_energy", "paper"))
    methods = _known_methods(method) or list(ORIGINALS)
    for value in betas:
        if not value > 0:
            raise ConfigError(f"--beta {value:g}: a temperature is greater than 0")
    check_folder("--output", output)
    check_file("--json", json_file)
    console = Console()
    chosen = survey.axes_rows(betas) if axes else survey.method_rows(methods, recipes, betas)
    gates = [] if axes or (method and not gate) else survey.gate_rows(betas, gate or ())
    with console.progress("solving", len(chosen) + len(gates)) as advance:
        rows = survey.survey(chosen, sampled, advance)
        gate_results = survey.survey(gates, False, advance)
    for line in survey.table(rows):
        console.say(line)
    if gate_results:
        console.say("\nevery gate under the default recipe, beta " + ", ".join(f"{b:g}" for b in betas))
        for line in survey.gate_table(gate_results):
            console.say(line)
    for path in survey.draw(rows, output / ("equilibrium_axes" if axes else "equilibrium")):
        console.say(f"figure     {path}")
    if json_file:
        _write_json(json_file, [row.to_json() for row in [*rows, *gate_results]])
        console.say(f"numbers    {json_file}")


@plot.command()
def gates(
    method: Annotated[list[str] | None, typer.Option(help="A method or a gate; repeat for more. Default: all.")] = None,
    run: Annotated[Path | None, typer.Option(help="Lay this run's own tokens over its method's plane.")] = None,
    step: Annotated[int | None, typer.Option(help="Only this step of the run. Default: its newest 16.")] = None,
    output: Output = Path("figures"),
) -> None:
    """What each gate lets through. On the plane of log-ratio and advantage, with the signal that is left."""
    from grpo_lab.console import Console
    from grpo_lab.lab import gate_plane

    check_folder("--output", output)
    console = Console()
    if run is not None:
        objectives, cloud = _run_cloud(run, step, method)
        for line in gate_plane.region_table(cloud):
            console.say(line)
        name, objective = next(iter(objectives.items()))
        for path in gate_plane.draw_gate(name, objective, output / f"gate_run_{run.resolve().name}", cloud):
            console.say(f"figure     {path}")
        return
    if step is not None:
        raise ConfigError("--step chooses a step of a run: give the run with --run")
    objectives = _all_objectives(method)
    for name, objective in objectives.items():
        for path in gate_plane.draw_gate(name, objective, output / f"gate_{re.sub('[^0-9A-Za-z]', '_', name)}"):
            console.say(f"figure     {path}")
    for path in gate_plane.draw_overview(objectives, output / "gates"):
        console.say(f"figure     {path}")


def replay(
    run: Annotated[Path, typer.Argument(help="A run folder with rollout records.")],
    methods: Annotated[str, typer.Option(help="Comma-separated: a method, method:paper, or a gate.")] = ",".join(
        ORIGINALS
    ),
    step: Annotated[int | None, typer.Option(help="A step of the run. Default: the newest.")] = None,
    parameters: Annotated[
        bool, typer.Option("--parameters", help="Gradients by parameter: loads the nearest checkpoint's model.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write every number to this file.")] = None,
) -> None:
    """Put a run's rollouts through other objectives. Shows loss, gradient, agreement and gate."""
    from grpo_lab.console import Console
    from grpo_lab.lab import replay as replaying
    from grpo_lab.lab.recorded import read_step
    from grpo_lab.run_dir import RunDir

    check_file("--json", json_file)
    opened, console = RunDir.open(run), Console()
    objectives = replaying.objectives_of(opened.config, [name for name in methods.split(",") if name])
    recorded = read_step(opened, step)
    tokens, count = int(recorded.batch.tokens.completion_mask.sum()), recorded.batch.tokens.num_sequences
    console.say(f"step {recorded.step} of {opened.path}: {count} completions, {tokens:,} tokens")
    if parameters:
        quiet_libraries()
        from grpo_lab.lab.parameters import nearest_checkpoint, replay_parameters

        checkpoint = nearest_checkpoint(opened, recorded.step)
        console.say(
            f"gradient by parameter, at the weights of {checkpoint.folder} (after step {checkpoint.progress.step}; the "
            f"recorded step began with those after step {recorded.step - 1})"
        )
        results = replay_parameters(opened, checkpoint, recorded, objectives)
    else:
        console.say("gradient by token log-prob, at the log-probs each token was last trained at")
        results = replaying.replay(recorded, objectives)
    for line in replaying.table(results):
        console.say(line)
    console.say(
        "open: share of tokens with f' >= 1/2, also by the advantage's sign; >0.1: share of signal beyond |log ratio|"
    )
    if json_file:
        _write_json(json_file, replaying.to_json(recorded, results))
        console.say(f"numbers    {json_file}")


def _known_methods(names: list[str] | None) -> list[str]:
    from grpo_lab.methods import METHODS

    for name in names or []:
        if name not in METHODS:
            raise unknown_name("method", name, METHODS)
    return names or []


def _all_objectives(names: list[str] | None) -> dict[str, Any]:
    """The objectives to draw: the named ones, or every method and every gate that no method uses."""
    from grpo_lab.config import Config
    from grpo_lab.lab.replay import named_objective
    from grpo_lab.methods import METHODS
    from grpo_lab.objective.gates import PACKAGE
    from grpo_lab.plugins import names as plugin_names

    unused = set(plugin_names(PACKAGE)) - {row.gate for row in METHODS.values()}
    return {name: named_objective(Config(), name) for name in names or [*METHODS, *sorted(unused)]}


def _run_cloud(path: Path, step: int | None, names: list[str] | None) -> tuple[dict[str, Any], Any]:
    from grpo_lab.lab.gate_plane import token_cloud
    from grpo_lab.lab.recorded import read_step
    from grpo_lab.lab.replay import named_objective
    from grpo_lab.objective.axes import resolve
    from grpo_lab.run_dir import RunDir

    if names and len(names) > 1:
        raise ConfigError(f"--run draws one plane: give one --method at most, not {len(names)}")
    run = RunDir.open(path)
    name = names[0] if names else run.config.method
    objective = named_objective(run.config, name) if names else resolve(run.config)
    chosen: list[int | None] = [step] if step is not None else [*sorted(run.rollout_files())[-16:]] or [None]
    return {name: objective}, token_cloud([read_step(run, number) for number in chosen], objective)


def _write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, indent=1), "give a file in a writable folder")
