"""The command that proves a config's resume on this machine: verify-resume."""

from __future__ import annotations

from typing import Annotated

import typer

from grpo_lab.cli.options import ConfigFile, Overrides, quiet_libraries
from grpo_lab.config.file import load_config


def verify_resume(
    config: ConfigFile = None,
    method: Annotated[str | None, typer.Option(help="As in train.")] = None,
    beta: Annotated[float | None, typer.Option(help="As in train.")] = None,
    recipe: Annotated[str | None, typer.Option(help="As in train.")] = None,
    seed: Annotated[int | None, typer.Option(help="Run seed; the moments of the kills derive from it too.")] = None,
    kills: Annotated[int, typer.Option(min=1, help="How often the second run is killed and resumed.")] = 3,
    steps: Annotated[int, typer.Option(min=2, help="Length of the two runs; each step saves a checkpoint.")] = 4,
    set_: Overrides = None,
) -> None:
    """Try whether a killed run resumes exactly. A few steps twice, once killed and resumed again and again."""
    overrides = set_ or []
    flags = {"method": method, "beta": beta, "recipe": recipe, "seed": seed}
    loaded = load_config(config, overrides, flags)
    quiet_libraries()
    from grpo_lab.assemble import check, check_data
    from grpo_lab.console import Console
    from grpo_lab.verification.verify_resume import shortened, verify

    short = shortened(loaded, steps, {pair.partition("=")[0].strip() for pair in overrides})
    check(short)
    check_data(short)
    raise typer.Exit(0 if verify(short, kills, Console()).is_exact else 1)
