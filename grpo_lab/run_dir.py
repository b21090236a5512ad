"""The folder of one run: its config, metrics.jsonl, rollout records, checkpoints, evaluations and figures."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from grpo_lab.config import Config, expand_path
from grpo_lab.config_file import build_config, changed_keys, dump_yaml
from grpo_lab.errors import ConfigError, RunError
from grpo_lab.records import write_groups
from grpo_lab.types import RolloutGroup


class RunDir:
    """Paths of a run and what is written to them. Lines of metrics.jsonl are whole or absent."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.evaluations = path / "evaluations"
        self.figures = path / "figures"
        self.metrics_file = path / "metrics.jsonl"

    @staticmethod
    def refuse_existing(config: Config) -> None:
        """ConfigError when `run_name` is no plain name or is taken, before anything is loaded or written."""
        name = config.run_name
        if name is None:
            return
        if name in ("", ".", "..") or "/" in name or "\\" in name:
            raise ConfigError(
                f"run_name={name!r}: a plain folder name is allowed, no path; output_dir says where it goes"
            )
        path = Path(expand_path(config.output_dir)) / name
        if path.exists():
            raise ConfigError(f"run {str(path)!r} exists: continue it with --resume {path}, or choose another name")

    @classmethod
    def create(cls, config: Config) -> RunDir:
        """A new folder below `output_dir`, named `run_name` or by method, beta and time. ConfigError when it cannot be."""
        cls.refuse_existing(config)
        name = config.run_name or f"{config.method}-beta{config.beta:g}-{time.strftime('%Y%m%d-%H%M%S')}"
        run = cls(Path(expand_path(config.output_dir)) / name)
        try:
            run.checkpoints.mkdir(parents=True)
            (run.path / "config.yaml").write_text(dump_yaml(config))
        except OSError as error:
            raise ConfigError(
                f"cannot create the run folder {str(run.path)!r}: {error.strerror}; set output_dir to a writable folder"
            ) from None
        return run

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """The run that `path` (a run, or a checkpoint of one) belongs to. ConfigError when there is none."""
        for folder in (path, path.parent.parent):
            if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
                return cls(folder)
        raise ConfigError(
            f"{str(path)!r} is not a run folder: it needs config.yaml and checkpoints/; give the path train printed"
        )

    @property
    def config(self) -> Config:
        """The configuration the run was started with."""
        return build_config(self.config_tree, source=str(self.path / "config.yaml"))

    def refuse_changes(self, config: Config) -> None:
        """ConfigError when going on with `config` would not be the same trajectory."""
        changed = changed_keys(self.config, config)
        if changed:
            raise ConfigError(
                f"--resume {self.path}: these settings would change the trajectory: {'; '.join(changed)}; leave them as they "
                "were, or start a new run"
            )

    @property
    def config_tree(self) -> dict[str, Any]:
        tree: dict[str, Any] = yaml.safe_load((self.path / "config.yaml").read_text())
        return tree

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        """One JSON line; RunError when the disk refuses it."""
        try:
            with self.metrics_file.open("a") as file:
                file.write(json.dumps(metrics, allow_nan=False) + "\n")
        except OSError as error:
            raise RunError(
                f"cannot write {self.metrics_file}: {error.strerror}; continue later with --resume {self.path}"
            ) from None

    def read_metrics(self) -> list[dict[str, Any]]:
        """Every whole line of metrics.jsonl; a torn last line (a killed run) is left out."""
        rows: list[dict[str, Any]] = []
        if self.metrics_file.is_file():
            for line in self.metrics_file.read_text().splitlines():
                try:
                    rows.append(json.loads(line))
                except ValueError:
                    break
        return rows

    def rewind(self, step: int) -> None:
        """Forget what was recorded after `step`: metrics lines and rollout records of steps that will run again."""
        kept = [row for row in self.read_metrics() if row["step"] <= step]
        partial = self.metrics_file.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept))
        partial.replace(self.metrics_file)
        for recorded, file in self.rollout_files().items():
            if recorded > step:
                file.unlink()

    def save_rollouts(self, step: int, groups: Sequence[RolloutGroup], columns: Mapping[str, Sequence[Any]]) -> None:
        """One parquet a step, one row a completion, with what the learner made of it as `columns` (see records.py)."""
        write_groups(self.path / "rollouts" / f"step_{step:06d}.parquet", groups, columns=columns)

    def rollout_files(self) -> dict[int, Path]:
        """The rollout record of every step that has one, in order."""
        files = self.path.glob("rollouts/step_*.parquet")
        return {int(file.stem.removeprefix("step_")): file for file in sorted(files)}
