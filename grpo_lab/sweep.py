"""Many runs from one config: every method, recipe, temperature and seed, one after the other, each in its own process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Literal

from grpo_lab.config import Config, expand_path
from grpo_lab.config.file import changed_keys, load_config
from grpo_lab.console import Console
from grpo_lab.errors import ConfigError, RunError
from grpo_lab.run_dir import RunDir
from grpo_lab.signals import STOP_SIGNALS

State = Literal["new", "unfinished", "finished"]


@dataclass(frozen=True)
class Grid:
    """The values that vary; every combination is a run."""

    methods: tuple[str, ...]
    recipes: tuple[str, ...]
    betas: tuple[float, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Member:
    """One run of a sweep: its configuration and the arguments that start it."""

    config: Config
    arguments: tuple[str, ...]

    @property
    def path(self) -> Path:
        assert self.config.run_name, "members are named"
        return Path(expand_path(self.config.output_dir)) / self.config.run_name


def members(config: Path | None, overrides: Sequence[str], grid: Grid, name: str) -> list[Member]:
    """Every run of the grid below `output_dir`/`name`, all checked before any starts. ConfigError says what is wrong."""
    base = load_config(config, overrides)
    if not name or "/" in name or name in (".", ".."):
        raise ConfigError(f"--name {name!r}: a plain folder name is allowed, no path; output_dir says where it goes")
    folder = f"{base.output_dir}/{name}"
    found = []
    for method, recipe, beta, seed in product(grid.methods, grid.recipes, grid.betas, grid.seeds):
        values = {
            "output_dir": folder,
            "evaluation.bank_dir": f"{folder}/banks",
            "method": method,
            "recipe": recipe,
            "beta": beta,
            "seed": seed,
            "run_name": f"{method}-{recipe}-beta{beta:.12g}-seed{seed}",
        }
        sets = [*overrides, *(f"{key}={json.dumps(value)}" for key, value in values.items())]
        start = ["--config", str(config)] if config else []
        arguments = (*start, *(part for item in sets for part in ("--set", item)))
        found.append(Member(load_config(config, sets), arguments))
    return found


def state_of(member: Member) -> State:
    """Whether a run has to be started, continued, or is done. ConfigError when its folder holds a run of other settings."""
    if not (member.path / "config.yaml").is_file():
        return "new"
    run = RunDir.open(member.path)
    changed = changed_keys(run.config, member.config)
    if changed:
        raise ConfigError(f"{run.path} was run with other settings: {'; '.join(changed)}; choose another --name")
    total = member.config.total_rollouts
    done = any(at >= total and (path / "manifest.json").is_file() for at, path in run.checkpoint_folders().items())
    evaluated = run.evaluation_file(total).is_file() or not member.config.evaluation.enabled
    return "finished" if done and evaluated else "unfinished"


def run_members(runs: Sequence[Member], console: Console) -> list[RunDir]:
    """Run what is not finished; returns every run. RunError at the end when some failed: the others are done and kept."""
    states = [state_of(member) for member in runs]
    failed = []
    for number, (member, state) in enumerate(zip(runs, states, strict=True), start=1):
        console.say(f"\n== run {number}/{len(runs)}: {member.path.name}, {state}")
        if state == "finished":
            continue
        arguments = [*(["--resume", str(member.path)] if state == "unfinished" else []), *member.arguments]
        code = _train(arguments)
        if code == 130 or (state_of(member) == "unfinished" and code == 0):
            raise RunError(f"stopped in {member.path.name}; the same command goes on from there")
        if code:
            failed.append(member.path.name)
    if failed:
        raise RunError(
            f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}; the same command tries them again"
        )
    return [RunDir.open(member.path) for member in runs]


def _train(arguments: Sequence[str]) -> int:
    """`grpo-lab train` in a process of its own. Stop signals are passed on: it saves, then ends, and the sweep with it."""
    process = subprocess.Popen([sys.executable, "-m", "grpo_lab", "train", *arguments])
    asked: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if number != signal.SIGINT:  # Ctrl-C reaches the whole process group by itself
            process.send_signal(number)

    previous = {number: signal.signal(number, pass_on) for number in STOP_SIGNALS}
    try:
        code = process.wait()
        return 130 if asked else code
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
