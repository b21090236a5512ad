"""The commands around a run: train, eval checkpoint, list."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from grpo_lab.config import Config
from grpo_lab.config_file import build_config, load_config
from grpo_lab.errors import ConfigError

evaluate = typer.Typer(no_args_is_help=True, help="Measure a policy's free energy.")

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file; without it the GSM8K experiment's defaults.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override one key: --set learner.learning_rate=1e-5")
]


def train(
    config: ConfigFile = None,
    method: Annotated[
        str | None, typer.Option(help="ppo, grpo, dapo, sao, sapo, gspo, ...: see `grpo-lab list`.")
    ] = None,
    beta: Annotated[float | None, typer.Option(help="Temperature of F = -E[r] + beta KL(pi || pi_ref).")] = None,
    recipe: Annotated[str | None, typer.Option(help="free_energy (descends F) or paper (as published).")] = None,
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
) -> None:
    """Train a policy, save checkpoints, evaluate each one's free energy, draw the figures."""
    flags = {"method": method, "beta": beta, "recipe": recipe, "seed": seed, "run_name": name}
    loaded = _config_of_run(resume, config, set_, flags) if resume else load_config(config, set_ or [], flags)
    if probe and (not dry_run or processes * nodes > 1):
        raise ConfigError("--probe works with --dry-run only, and with one process")
    if resume and name:
        raise ConfigError(f"--resume {resume} --name {name}: a resumed run keeps its name; leave out one of them")
    from grpo_lab.console import Console
    from grpo_lab.run_dir import RunDir

    quiet_libraries()
    if dry_run:
        from grpo_lab.planning.origins import origins

        if resume:
            RunDir.open(resume).refuse_changes(loaded)
        else:
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
    from grpo_lab.train import train as run_training

    run_training(loaded, Console(), RunDir.open(resume) if resume else None)


def _show_plan(config: Config, given: Mapping[str, str], processes: int, nodes: int, probe: bool) -> None:
    """What `train --dry-run` prints."""
    from grpo_lab.assemble import check, check_data
    from grpo_lab.console import Console
    from grpo_lab.planning.plan import print_plan
    from grpo_lab.planning.roles import Launch

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
    if config is None and not path.exists():
        raise ConfigError(f"no checkpoint at {str(path)!r}; give the folder `grpo-lab train` printed")
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
    if min(betas) <= 0:
        raise ConfigError(f"--beta {min(betas):g}: a temperature is greater than 0")
    loaded = load_config(config, [*(set_ or []), *_given(("rollout.max_new_tokens", max_tokens))])
    if loaded.data.heldout_problems < prompts:
        raise ConfigError(
            f"--prompts {prompts}, but data.heldout_problems={loaded.data.heldout_problems} are held out: ask for fewer, or "
            f"--set data.heldout_problems={prompts}"
        )
    quiet_libraries()
    from grpo_lab.evaluation.floor_study import Protocol, floor_study

    output.mkdir(parents=True, exist_ok=True)
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
    if config is None:
        return load_config(run.path / "config.yaml", overrides or [], flags)
    chosen = load_config(config, overrides or [], flags)
    kept = {"run_name": run.config.run_name, "output_dir": run.config.output_dir}
    return build_config({**chosen.model_dump(mode="json"), **kept}, source=str(config))


def quiet_libraries() -> None:
    """Third parties' progress bars and advice stay off the terminal; their errors do not."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
