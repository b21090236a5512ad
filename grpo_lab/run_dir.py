"""The folder of one run: its config, metrics.jsonl, rollout records, checkpoints, evaluations and figures."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from grpo_lab.config import Config, expand_path
from grpo_lab.config.file import changed_keys, dump_yaml, load_config
from grpo_lab.errors import ConfigError, RunError
from grpo_lab.health import not_finite
from grpo_lab.paths import obstacle
from grpo_lab.storage.records import write_groups
from grpo_lab.storage.run_lock import lock_holder
from grpo_lab.storage.scratch import PARTIAL, disk_errors, disk_reason, remove_leftovers, write_whole
from grpo_lab.types import RolloutGroup


class RunDir:
    """Paths of a run and what is written to them. Files are whole or absent; lines of metrics.jsonl too, once it is rewound."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.evaluations = path / "evaluations"
        self.figures = path / "figures"
        self.metrics_file = path / "metrics.jsonl"

    @staticmethod
    def refuse_existing(config: Config) -> None:
        """ConfigError when `run_name` is no plain name or is taken, before anything is loaded or written."""
        if reason := obstacle(Path(expand_path(config.output_dir))):
            raise ConfigError(f"output_dir={config.output_dir!r}: {reason}; set it to a folder that can be written to")
        name = config.run_name
        if name is None:
            return
        if name in ("", ".", "..") or "/" in name or "\\" in name:
            raise ConfigError(
                f"run_name={name!r}: a plain folder name is allowed, no path; output_dir says where it goes"
            )
        path = Path(expand_path(config.output_dir)) / name
        holder = lock_holder(path)
        if holder:
            raise ConfigError(
                f"run {str(path)!r} is in use by {holder}: one process at a time may write to it; choose another name, or wait "
                f"for its end and continue it with --resume {path}"
            )
        _refuse_unbegun(path)
        if path.exists():
            raise ConfigError(f"run {str(path)!r} exists: continue it with --resume {path}, or choose another name")

    @classmethod
    def create(cls, config: Config) -> RunDir:
        """A new folder below `output_dir`, named `run_name` or by method, beta and time. ConfigError when it cannot be."""
        cls.refuse_existing(config)
        run = cls(_new_folder(config))
        try:
            run.checkpoints.mkdir()
            write_whole(run.path / "config.yaml", dump_yaml(config))
        except BaseException:
            shutil.rmtree(run.path, ignore_errors=True)
            raise
        return run

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """The run that `path` (a run, or a checkpoint of one) belongs to. ConfigError when there is none."""
        for folder in (path, path.parent.parent):
            if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
                return cls(folder)
        _refuse_unbegun(path)
        raise ConfigError(
            f"{str(path)!r} is not a run folder: it needs config.yaml and checkpoints/; give the path train printed"
        )

    @property
    def config(self) -> Config:
        """The configuration the run was started with."""
        return load_config(self.path / "config.yaml")

    def refuse_changes(self, config: Config) -> None:
        """ConfigError when going on with `config` would not be the same trajectory."""
        changed = changed_keys(self.config, config)
        if changed:
            raise ConfigError(
                f"--resume {self.path}: these settings would change the trajectory: {'; '.join(changed)}; leave them as they "
                "were, or start a new run"
            )

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        """One JSON line, on the disk when this returns; RunError when the disk refuses it, and for what is not finite."""
        if broken := not_finite(metrics):
            raise RunError(f"step {metrics['step']}: {broken}; the step was not recorded; lower learner.learning_rate")
        with disk_errors(self.metrics_file, self.advice), self.metrics_file.open("a") as file:
            file.write(json.dumps(metrics, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read_metrics(self) -> list[dict[str, Any]]:
        """Every whole line of metrics.jsonl; torn ones (of a killed run, or a full disk) are left out."""
        rows: list[dict[str, Any]] = []
        if self.metrics_file.is_file():
            for line in self.metrics_file.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    rows.append(json.loads(line))
                except ValueError:
                    continue
        return rows

    def rewind(self, step: int) -> None:
        """Forget what was recorded after `step`: metrics lines and rollout records of steps that will run again.

        What killed processes left half-written goes too.
        """
        for folder in (self.path, *(path for path in self.path.iterdir() if path.is_dir())):
            remove_leftovers(folder)
        kept = "".join(json.dumps(row) + "\n" for row in self.read_metrics() if row["step"] <= step)
        if not self.metrics_file.is_file() or self.metrics_file.read_bytes() != kept.encode():
            write_whole(self.metrics_file, kept, self.advice)
        for recorded, file in self.rollout_files().items():
            if recorded > step:
                file.unlink()

    def save_rollouts(self, step: int, groups: Sequence[RolloutGroup], columns: Mapping[str, Sequence[Any]]) -> None:
        """One parquet a step, one row a completion, with what the learner made of it as `columns` (see storage/records.py)."""
        write_groups(self.path / "rollouts" / f"step_{step:06d}.parquet", groups, None, columns, self.advice)

    def rollout_files(self) -> dict[int, Path]:
        """The rollout record of every step that has one, in order."""
        files = self.path.glob("rollouts/step_*.parquet")
        return {int(file.stem.removeprefix("step_")): file for file in sorted(files)}

    def evaluation_file(self, rollouts: int) -> Path:
        """Where the evaluation at `rollouts` is kept."""
        return self.evaluations / f"rollouts_{rollouts:08d}.json"

    def checkpoint_folders(self) -> dict[int, Path]:
        """The folder of every checkpoint by its rollouts, in order, whole or not."""
        found = [(re.fullmatch(r"rollouts_(\d+)", path.name), path) for path in self.checkpoints.iterdir()]
        return dict(sorted((int(match[1]), path) for match, path in found if match and path.is_dir()))

    @property
    def advice(self) -> str:
        """What to do when the disk refuses a file of the run."""
        return f"free some space, then continue with --resume {self.path}"


def _refuse_unbegun(path: Path) -> None:
    """ConfigError when a run was killed while its folder was made: nothing that could be continued is there."""
    if path.is_dir() and all(part.name == "checkpoints" or part.name.startswith(PARTIAL) for part in path.iterdir()):
        raise ConfigError(f"the run {str(path)!r} ended before it began: remove the folder and start it again")


def _new_folder(config: Config) -> Path:
    """A folder of the run's own, made now: of two processes that ask for one name at once one gets it."""
    parent = Path(expand_path(config.output_dir))
    stamp = f"{config.method}-beta{config.beta:g}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in count(1):
        folder = parent / (config.run_name or (stamp if number == 1 else f"{stamp}-{number}"))
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
            return folder
        except OSError as error:
            if isinstance(error, FileExistsError) and parent.is_dir():
                RunDir.refuse_existing(config)  # a name that was asked for; one by the time gets a number
                continue
            raise ConfigError(
                f"cannot create the run folder {str(folder)!r}: {disk_reason(error)}; set output_dir to a writable folder"
            ) from None
    raise AssertionError("count() has no end")
