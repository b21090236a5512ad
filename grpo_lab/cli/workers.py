"""Rollout workers by hand, and the audit of the whole rollout chain on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from grpo_lab.cli.training import ConfigFile, Overrides, quiet_libraries
from grpo_lab.config_file import load_config


def worker(
    config: ConfigFile = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; the endpoints have no password, so a private network's at most.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    set_: Overrides = None,
) -> None:
    """Serve rollouts to trainings that name this address in rollout.urls; runs until it is stopped."""
    loaded = load_config(config, [*(set_ or []), "rollout.workers=1", "rollout.urls=[]"])
    quiet_libraries()
    from grpo_lab.assemble import check
    from grpo_lab.serve import serve

    check(loaded)
    serve(loaded, host, port)


def doctor(
    config: ConfigFile = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Repeat for more. Default: float32 and bfloat16.")] = None,
    set_: Overrides = None,
) -> None:
    """Try the rollout chain on this machine: engine, seeds, repeat, log-probs against the learner's, weight pushes."""
    names = dtype or ["float32", "bfloat16"]
    loaded = [load_config(config, [*(set_ or []), f"model.dtype={name}"]) for name in names]
    quiet_libraries()
    from grpo_lab.console import Console
    from grpo_lab.doctor import audit, audit_each

    if len(loaded) == 1:
        raise typer.Exit(0 if audit(loaded[0], Console()) else 1)
    given = ["--config", str(config)] if config else []
    raise typer.Exit(audit_each([*given, *(word for pair in set_ or [] for word in ("--set", pair))], names))
