"""The commands around a run: train, eval checkpoint, list."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from grpo_lab.cli import completion
from grpo_lab.cli.outputs import check_file, check_folder
from grpo_lab.config import Config
from grpo_lab.config_file import build_config, load_config
from grpo_lab.errors import ConfigError, RunError, UserError

if TYPE_CHECKING:
    from grpo_lab.console import Style
    from grpo_lab.run_dir import RunDir

evaluate = typer.Typer(no_args_is_help=True, help="Measure a policy's free energy.")

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file; without it the GSM8K experiment's defaults.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Override one key: --set learner.learning_rate=1e-5", autocompletion=completion.assignments
    ),
]


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
    """Train a policy, save checkpoints, evaluate each one's free energy, draw the figures."""
    flags = {"method": method, "beta": beta, "recipe": recipe, "seed": seed, "run_name": name}
    loaded = _config_of_run(resume, config, set_, flags) if resume else load_config(config, set_ or [], flags)
    if json_lines and (quiet or dry_run):
        raise ConfigError(f"--json prints every event of a run: leave out {'--quiet' if quiet else '--dry-run'}")
    if quiet and dry_run:
        raise ConfigError("--quiet leaves out what --dry-run is for: leave out one of them")
    if probe and (not dry_run or processes * nodes > 1):
        raise ConfigError("--probe works with --dry-run only, and with one process")
    if resume and name:
        raise ConfigError(f"--resume {resume} --name {name}: a resumed run keeps its name; leave out one of them")
    from grpo_lab.run_dir import RunDir

    if dry_run:
        quiet_libraries()
        from grpo_lab.planning.origins import origins

        if not resume:
            RunDir.refuse_existing(loaded)
        source = config or (RunDir.open(resume).path / "config.yaml" if resume else None)
        _show_plan(loaded, origins(source, set_ or [], flags), processes, nodes, probe)
        return
    if processes * nodes > 1 and "WORLD_SIZE" not in os.environ:
        from grpo_lab.assemble import check
        from grpo_lab.launch import launch

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


def _show_plan(config: Config, given: Mapping[str, str], processes: int, nodes: int, probe: bool) -> None:
    """What `train --dry-run` prints."""
    from grpo_lab.assemble import check, check_data
    from grpo_lab.console import Console
    from grpo_lab.planning.plan import print_plan
    from grpo_lab.planning.roles import Launch
    from grpo_lab.tracking import check_trackers

    check_trackers(config)
    objective = check(config, processes * nodes)
    check_data(config)
    print_plan(Console(), config, objective, given, Launch(tuple(sys.argv[1:]), processes, nodes))
    if probe:
        from grpo_lab.planning.probe import probe as run_probe

        run_probe(config, Console())


@evaluate.command("checkpoint")
def eval_checkpoint(
    path: Annotated[Path, typer.Argument(help="A checkpoint folder, e.g. runs/RUN/checkpoints/rollouts_00032768")],
    config: ConfigFile = None,
    samples: Annotated[int | None, typer.Option(help="Samples per problem.")] = None,
    problems: Annotated[int | None, typer.Option(help="Held-out problems.")] = None,
    beta: Annotated[float | None, typer.Option(help="Evaluate F at another beta.")] = None,
    set_: Overrides = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write every number to this file.")] = None,
) -> None:
    """E[r], KL, F with standard errors, the floor bracket and the gap of one checkpoint."""
    from grpo_lab.console import Console
    from grpo_lab.run_dir import RunDir

    overrides = [
        *(set_ or []),
        *_given(("evaluation.samples", samples), ("evaluation.problems", problems), ("beta", beta)),
    ]
    check_file("--json", json_file)
    if config is None and not path.exists():
        kept = ", ".join(sorted(folder.name for folder in path.parent.glob("rollouts_*")))
        hint = f"there are: {kept}" if kept else "give the folder `grpo-lab train` printed"
        raise ConfigError(f"no checkpoint at {str(path)!r}; {hint}")
    if (path / "config.yaml").is_file():
        inside = sorted(folder.name for folder in path.glob("checkpoints/rollouts_*"))
        raise ConfigError(
            f"{str(path)!r} is a run, not a checkpoint; it has: {', '.join(inside) or 'none yet'} in checkpoints/"
        )
    loaded = load_config(config, overrides) if config else _with_overrides(RunDir.open(path), overrides)
    quiet_libraries()
    from grpo_lab.evaluation.report import evaluate_checkpoint

    evaluate_checkpoint(path, loaded, Console(), json_file)


@evaluate.command("floor")
def eval_floor(
    config: ConfigFile = None,
    prompts: Annotated[int, typer.Option(min=2, help="Held-out problems.")] = 64,
    candidates: Annotated[int, typer.Option(min=2, help="Samples of the reference for each.")] = 24,
    temperature: Annotated[
        float, typer.Option(min=1e-3, help="Of the candidates; the consistent estimator has 1.")
    ] = 0.8,
    top_p: Annotated[
        float, typer.Option(min=1e-3, max=1.0, help="Of the candidates; the consistent estimator has 1.")
    ] = 0.95,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Length limit; default: the config's.")] = None,
    beta: Annotated[
        list[float] | None, typer.Option(help="Repeat for more. Default: 0.01, 0.02, 0.05, 0.1, 0.2.")
    ] = None,
    set_: Overrides = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for banks, numbers and figures.")] = Path(
        "floor"
    ),
) -> None:
    """The Gibbs floor of the reference alone: candidates under every weighting, beside the consistent estimator."""
    from grpo_lab.console import Console

    betas = tuple(beta or (0.01, 0.02, 0.05, 0.1, 0.2))
    for given, value in [("--temperature", temperature), ("--top-p", top_p), *(("--beta", value) for value in betas)]:
        if not 0 < value < inf:
            raise ConfigError(f"{given} {value:g}: a finite number greater than 0 is needed")
    check_folder("--output", output)
    loaded = load_config(config, [*(set_ or []), *_given(("rollout.max_new_tokens", max_tokens))])
    if loaded.data.heldout_problems < prompts:
        raise ConfigError(
            f"--prompts {prompts}, but data.heldout_problems={loaded.data.heldout_problems} are held out: ask for fewer, or "
            f"--set data.heldout_problems={prompts}"
        )
    quiet_libraries()
    from grpo_lab.evaluation.floor_study import Protocol, floor_study

    floor_study(loaded, Protocol(prompts, candidates, temperature, top_p), betas, output, Console())


def list_names() -> None:
    """The methods and every gate, task and engine that can be named in a config."""
    from grpo_lab.methods import METHODS
    from grpo_lab.plugins import names

    for name, row in METHODS.items():
        options = ", ".join(f"{key} {value:g}" for key, value in row.gate_options.items())
        typer.echo(f"{name:8} {row.gate} ({options}), {row.level} level, old policy from the {row.old}; {row.source}")
        typer.echo(
            f"{'':8} recipe paper: {row.advantage}, kl {row.kl}, {row.aggregate}"
            + (f"; {row.note}" if row.note else "")
        )
    for kind, package in _PLUGIN_FOLDERS.items():
        typer.echo(f"{kind:8} {', '.join(names(package))}")


_PLUGIN_FOLDERS = {
    "gates": "grpo_lab.objective.gates",
    "tasks": "grpo_lab.tasks",
    "engines": "grpo_lab.rollout.engines",
}


def _given(*pairs: tuple[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in pairs if value is not None]


def _with_overrides(run: Any, overrides: list[str]) -> Config:
    return load_config(run.path / "config.yaml", overrides)


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


def quiet_libraries(to_log: bool = False) -> None:
    """Third parties' progress bars stay off the terminal; their advice too, unless all they print goes `to_log`."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "warning" if to_log else "error")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if to_log else "ERROR")
