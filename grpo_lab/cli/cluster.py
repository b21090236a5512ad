"""The command that writes (and submits) a Slurm job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from grpo_lab.cli import completion
from grpo_lab.cli.options import Overrides
from grpo_lab.cli.outputs import check_file
from grpo_lab.config.file import load_config
from grpo_lab.errors import ConfigError


def slurm(
    config: Annotated[Path, typer.Argument(help="YAML file of the training, in a folder that all nodes see.")],
    method: Annotated[
        list[str] | None,
        typer.Option(help="Repeat for an array of runs. Default: the config's.", autocompletion=completion.methods),
    ] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="Repeat for more.")] = None,
    beta: Annotated[list[float] | None, typer.Option(help="Repeat for more. Default: the config's.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Repeat for more.")] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Of the job, and of the run (of the array's folder).")
    ] = None,
    set_: Overrides = None,
    nodes: Annotated[str, typer.Option(help="L or L+R: learner nodes and rollout nodes.")] = "1",
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of a node; 0 for nodes without.")] = 8,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Learner processes of a node. Default: its GPUs.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Workers of a rollout node. Default: its GPUs.")] = None,
    time: Annotated[str, typer.Option(help="Time limit, as sbatch takes it.")] = "24:00:00",
    grace: Annotated[
        int, typer.Option(min=10, help="Seconds before the limit in which the learner finishes its update and saves.")
    ] = 300,
    sbatch: Annotated[
        list[str] | None, typer.Option("--sbatch", help="Option of sbatch: --sbatch=--account=mine. Repeat for more.")
    ] = None,
    setup: Annotated[
        str, typer.Option(help="Shell commands before everything. Default: this installation on PATH.")
    ] = "",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The script. Default: NAME.sbatch.")] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Also hand it to sbatch.")] = False,
) -> None:
    """Write a Slurm script. Rollout nodes serve, learner nodes train; it saves, requeues and resumes by itself."""
    check_file("--output", output)
    base = load_config(config, set_ or [])
    grid: dict[str, list[Any]] = {
        "method": method or [base.method],
        "recipe": recipe or [base.recipe],
        "beta": beta or [base.beta],
        "seed": seed or [base.seed],
    }
    if name is None and any(len(values) > 1 for values in grid.values()):
        raise ConfigError("several runs need a name for their folder: add --name")
    name = name or base.run_name or f"{grid['method'][0]}-beta{grid['beta'][0]:g}"
    from grpo_lab.assemble import check
    from grpo_lab.cluster.slurm import Layout, Request, script, write
    from grpo_lab.cluster.slurm import submit as hand_over
    from grpo_lab.console import Console

    request, rollout = Request(name, time, grace, tuple(sbatch or []), setup), base.rollout
    layout = Layout.of(nodes, gpus, processes, workers, rollout.workers, rollout.worker_gpus)
    runs = _members(config, set_ or [], grid, name)
    for member in runs:
        check(_as_it_will_run(member.config, layout.servers), layout.ranks)
    file = output or Path(f"{name}.sbatch")
    write(script(runs, layout, request), file)
    console = Console()
    console.say(f"script     {file}")
    for member in runs:
        console.say(f"run        {member.path}")
    console.say(f"nodes      {layout}; logs in {runs[0].path.parent / 'slurm'} and {name}-JOB.log")
    if layout.samplers:
        console.say("note       the workers' ports have no password: whoever reaches the nodes can use them")
    console.say(f"submitted  {hand_over(file)}" if submit else f"next       sbatch {file}")


def _members(config: Path, overrides: list[str], grid: dict[str, list[Any]], name: str) -> list[Any]:
    """The runs, checked for contradictions with what lies in their folders."""
    from grpo_lab.sweep import Grid, Member, members, state_of

    if all(len(values) == 1 for values in grid.values()):
        sets = [
            *overrides,
            *(f"{key}={json.dumps(value)}" for key, [value] in grid.items()),
            f"run_name={json.dumps(name)}",
        ]
        words = [word for item in sets for word in ("--set", item)]
        found = [Member(load_config(config, sets), ("--config", str(config), *words))]
    else:
        chosen = Grid(*(tuple(dict.fromkeys(values)) for values in grid.values()))
        found = members(config, overrides, chosen, name)
    for member in found:
        state_of(member)
    return found


def _as_it_will_run(config: Any, servers: int) -> Any:
    """The configuration with addresses of as many workers as the job will have."""
    urls = [*config.rollout.urls, *(f"http://rollout-node:{8000 + index}" for index in range(servers))]
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"urls": urls})})
