"""Rollout workers by hand, and the audit of the whole rollout chain on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from grpo_lab.cli.options import ConfigFile, Overrides, quiet_libraries
from grpo_lab.cli.outputs import check_folder
from grpo_lab.config import Config
from grpo_lab.config.file import load_config
from grpo_lab.errors import ConfigError


def worker(
    config: ConfigFile = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; the endpoints have no password, so a private network's at most.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on, and those after it; 0: free ones.")
    ] = 8000,
    count: Annotated[int, typer.Option(min=1, help="Workers on this machine, each with its part of the GPUs.")] = 1,
    announce: Annotated[
        Path | None, typer.Option(help="Folder that gets a file with the address of each worker that is up.")
    ] = None,
    set_: Overrides = None,
) -> None:
    """Serve rollouts to trainings on other machines. They name these addresses in rollout.urls; it runs until it is stopped."""
    if port + count - 1 > 65535:
        raise ConfigError(
            f"--port {port} --count {count}: ports end at 65535; choose a lower first one, or 0 for free ones"
        )
    check_folder("--announce", announce)
    loaded = load_config(config, [*(set_ or []), "rollout.workers=1", "rollout.urls=[]"])
    quiet_libraries()
    from grpo_lab.assemble import check
    from grpo_lab.cluster.serve import Place, serve

    check(loaded)
    serve(loaded, Place(host, port, count, announce))


def doctor(
    config: ConfigFile = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Repeat for more. Default: float32 and bfloat16.")] = None,
    set_: Overrides = None,
    environment_only: Annotated[
        bool, typer.Option("--environment-only", help="Stop after what the machine has; nothing is loaded.")
    ] = False,
    audit_only: Annotated[bool, typer.Option("--audit-only", hidden=True)] = False,  # of the processes for each dtype
) -> None:
    """Look at this machine and try the rollout chain on it. That is engine, seeds, repetition, log-probs and weight pushes."""
    names = dtype or ["float32", "bfloat16"]
    loaded = [load_config(config, [*(set_ or []), f"model.dtype={name}"]) for name in names]
    quiet_libraries()
    sound = audit_only or _look_around(loaded[0] if dtype else load_config(config, set_ or []), environment_only)
    if environment_only:
        raise typer.Exit(0 if sound else 1)
    from grpo_lab.console import Console
    from grpo_lab.doctor import audit, audit_each

    if len(loaded) == 1:
        raise typer.Exit(0 if audit(loaded[0], Console()) and sound else 1)
    given = ["--config", str(config)] if config else []
    words = [*given, *(word for pair in set_ or [] for word in ("--set", pair)), "--audit-only"]
    raise typer.Exit(max(audit_each(words, names), int(not sound)))


def _look_around(config: Config, is_all: bool) -> bool:
    """Print the facts about the machine; True when none failed. Exits where the audit, unless this `is_all`, needs one."""
    from grpo_lab.console import Console
    from grpo_lab.environment import AUDIT_NEEDS, survey

    console, failed, count = Console(), [], 0
    for fact in survey(config):
        console.say(f"{fact.state:10} {fact.name:10} {fact.text}")
        count += 1
        failed += [fact.name] if fact.state == "FAIL" else []
    console.say(f"machine    {count} facts; failed: {', '.join(failed) or 'none'}")
    missing = [name for name in failed if name in AUDIT_NEEDS]
    if missing and not is_all:
        console.say(f"doctor     not tried, since it needs what failed above: {', '.join(missing)}")
        raise typer.Exit(1)
    return not failed
