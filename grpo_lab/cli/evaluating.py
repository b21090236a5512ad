"""The commands that measure: a checkpoint's free energy, the floor of a reference alone."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer

from grpo_lab.cli.options import ConfigFile, Overrides, quiet_libraries
from grpo_lab.cli.outputs import check_file, check_folder
from grpo_lab.config.file import load_config
from grpo_lab.errors import ConfigError

evaluate = typer.Typer(no_args_is_help=True, help="Measure a policy's free energy.")


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
    """E[r], KL, F, floor and gap of one checkpoint. Each with its standard error."""
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
    loaded = load_config(config or RunDir.open(path).path / "config.yaml", overrides)
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
    """The Gibbs floor of the reference alone. Candidates under every weighting, beside the consistent estimator."""
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


def _given(*pairs: tuple[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in pairs if value is not None]
