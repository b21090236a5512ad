"""The command that trains: a new run, a resumed one, a dry run, several processes."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from grpo_lab.cli import completion
from grpo_lab.cli.options import ConfigFile, Overrides, quiet_libraries
from grpo_lab.config import Config
from grpo_lab.config.file import build_config, load_config
from grpo_lab.errors import ConfigError, RunError, UserError

if TYPE_CHECKING:
    from grpo_lab.console import Style
    from grpo_lab.planning.roles import Launch
    from grpo_lab.run_dir import RunDir


def train(
    config: ConfigFile = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="ppo, grpo, dapo, sao, sapo, gspo, ...: see `grpo-lab list`.", autocompletion=completion.methods
        ),
    ] = None,
    beta: Annotated[float | None, typer.Option(help="Temperature of F = -E[r] + beta KL(pi || pi_ref).")] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="free_energy (descends F) or paper (as published).", autocompletion=completion.recipes),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Run seed; every random choice derives from it.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Run name; default: method, beta and the time.")] = None,
    set_: Overrides = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue this run folder from its newest complete checkpoint.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print where each setting comes from, all counts, memory and commands, then stop."
        ),
    ] = False,
    probe: Annotated[
        bool,
        typer.Option("--probe", help="With --dry-run: load everything and estimate the time from some seconds of it."),
    ] = False,
    gpu_memory: Annotated[
        int | None, typer.Option(min=1, help="With --dry-run: plan for GPUs of this many GiB, not for this machine.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Learner processes on this machine, one GPU each.")] = 1,
    nodes: Annotated[
        int, typer.Option(min=1, help="Machines with learner processes; the same command runs on each.")
    ] = 1,
    rendezvous: Annotated[str, typer.Option(help="host:port of one of several --nodes, where they meet.")] = "",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and the end only.")] = False,
    json_lines: Annotated[
        bool, typer.Option("--json", help="Print one JSON object an event and nothing else.")
    ] = False,
) -> None:
    """Train a policy, with checkpoints and their free energies. Draws the figures at the end."""
    flags = {"method": method, "beta": beta, "recipe": recipe, "seed": seed, "run_name": name}
    loaded = _config_of_run(resume, config, set_, flags) if resume else load_config(config, set_ or [], flags)
    if json_lines and (quiet or dry_run):
        raise ConfigError(f"--json prints every event of a run: leave out {'--quiet' if quiet else '--dry-run'}")
    if quiet and dry_run:
        raise ConfigError("--quiet leaves out what --dry-run is for: leave out one of them")
    if probe and (not dry_run or processes * nodes > 1):
        raise ConfigError("--probe works with --dry-run only, and with one process")
    if gpu_memory and (not dry_run or probe):
        raise ConfigError(
            f"--gpu-memory {gpu_memory} plans for another machine: give it with --dry-run, without --probe"
        )
    if resume and name:
        raise ConfigError(f"--resume {resume} --name {name}: a resumed run keeps its name; leave out one of them")
    from grpo_lab.run_dir import RunDir

    if dry_run:
        quiet_libraries()
        from grpo_lab.planning.origins import origins
        from grpo_lab.planning.roles import Launch

        if not resume:
            RunDir.refuse_existing(loaded)
        source = config or (RunDir.open(resume).path / "config.yaml" if resume else None)
        plan = Launch(tuple(sys.argv[1:]), processes, nodes, gpu_memory)
        _show_plan(loaded, origins(source, set_ or [], flags), plan, probe)
        return
    if processes * nodes > 1 and "WORLD_SIZE" not in os.environ:
        from grpo_lab.assemble import check
        from grpo_lab.cluster.launch import launch

        if nodes > 1 and not re.fullmatch(r"[^:\s]+:\d+", rendezvous):
            raise ConfigError(
                f"--nodes {nodes} --rendezvous {rendezvous!r}: give host:port of one of them, the same on each"
            )
        check(loaded, processes * nodes)
        raise typer.Exit(launch(processes, sys.argv[1:], nodes, rendezvous if nodes > 1 else "localhost:0"))
    _run(loaded, "json" if json_lines else "quiet" if quiet else "auto", RunDir.open(resume) if resume else None)


def _run(config: Config, style: Style, resume: RunDir | None) -> None:
    """Train, with all that libraries print in a log; an error's line says where that is and how to go on."""
    from grpo_lab.library_logs import LibraryLogs

    quiet_libraries(to_log=True)
    with LibraryLogs() as logs:
        from grpo_lab.console import Console
        from grpo_lab.train import train as run_training

        console = Console(style, logs)
        try:
            run_training(config, console, resume)
        except RunError as error:
            raise RunError(console.failure(str(error))) from None
        except (UserError, OSError):
            raise
        except Exception:
            os.write(logs.errors, f"{traceback.format_exc()}{console.failure('grpo-lab: failed')}\n".encode())
            raise typer.Exit(1) from None
        finally:
            console.close()


def _show_plan(config: Config, given: Mapping[str, str], launch: Launch, probe: bool) -> None:
    """What `train --dry-run` prints."""
    from grpo_lab.assemble import check, check_data
    from grpo_lab.console import Console
    from grpo_lab.planning.plan import print_plan
    from grpo_lab.tracking import check_trackers

    check_trackers(config)
    objective = check(config, launch.learners)
    check_data(config)
    print_plan(Console(), config, objective, given, launch)
    if probe:
        from grpo_lab.planning.probe import probe as run_probe

        run_probe(config, Console())


def _config_of_run(resume: Path, config: Path | None, overrides: list[str] | None, flags: dict[str, Any]) -> Config:
    """The resumed run's own config with what the user changed on top; a --config replaces it before the changes."""
    from grpo_lab.run_dir import RunDir

    run = RunDir.open(resume)
    if run.path != resume:
        raise ConfigError(f"{str(resume)!r} is a checkpoint; a run goes on from its newest: give --resume {run.path}")
    if config is None:
        chosen = load_config(run.path / "config.yaml", overrides or [], flags)
    else:
        kept = {"run_name": run.config.run_name, "output_dir": run.config.output_dir}
        tree = load_config(config, overrides or [], flags).model_dump(mode="json")
        chosen = build_config({**tree, **kept}, source=str(config))
    run.refuse_changes(chosen)
    return chosen
