"""Runs -> arms of a comparison: runs that differ in the seed alone are replicates of one arm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from grpo_lab.config import Config
from grpo_lab.config.file import changed_keys
from grpo_lab.errors import ConfigError
from grpo_lab.evaluation.kept import Point, read_points
from grpo_lab.run_dir import RunDir

NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Arm:
    """Runs of one configuration under several seeds, each with its points by rollouts. `name` is a letter."""

    name: str
    runs: tuple[RunDir, ...]
    configs: tuple[Config, ...]
    replicates: tuple[tuple[Point, ...], ...]

    @property
    def config(self) -> Config:
        return self.configs[0]

    @property
    def label(self) -> str:
        return f"{self.config.method}, {self.config.recipe}, β = {self.config.beta:g}"

    @property
    def seeds(self) -> list[int]:
        return [config.seed for config in self.configs]

    @cached_property
    def path(self) -> tuple[Point, ...]:
        """The points that all its runs have, averaged over the runs."""
        shared = set.intersection(*({point.rollouts for point in points} for points in self.replicates))
        return tuple(Point(at, tuple(point.rows[0] for point in self.at_each(at))) for at in sorted(shared))

    def at(self, rollouts: int) -> Point:
        return next(point for point in self.path if point.rollouts == rollouts)

    def at_each(self, rollouts: int) -> list[Point]:
        """The point of every run at `rollouts`, in the order of the runs."""
        return [next(point for point in points if point.rollouts == rollouts) for points in self.replicates]


def between(values: Sequence[float]) -> float:
    """Standard error of a mean over seeds, from one value a seed; nan for one."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def arms(runs: Sequence[RunDir]) -> tuple[list[Arm], list[str]]:
    """The runs as arms, in their order, and a line for each that was left out. ConfigError where fewer than two are left."""
    left_out, groups = [], list[list[tuple[RunDir, Config, tuple[Point, ...]]]]()
    for run in {run.path.resolve(): run for run in runs}.values():
        config, points = run.config, read_points(run)
        if not points:
            left_out.append(f"{run.path}: no evaluation is kept (evaluation.enabled=false, or none was reached)")
            continue
        same = (group for group in groups if _is_replicate(config, [config for _, config, _ in group]))
        group = next(same, None)
        if group is None:
            groups.append(group := [])
        group.append((run, config, points))
    count = sum(map(len, groups))
    if count < 2 or len(groups) > len(NAMES):
        reason = f"; {'; '.join(left_out)}" if left_out else ""
        raise ConfigError(
            f"{count} run(s) with evaluations, {len(groups)} configurations: compare takes two runs or more, of at most "
            f"{len(NAMES)} configurations; give run folders, or a sweep's{reason}"
        )
    found = [Arm(name, *map(tuple, zip(*group, strict=True))) for name, group in zip(NAMES, groups, strict=False)]
    return found, left_out


def _is_replicate(config: Config, others: list[Config]) -> bool:
    """Whether `config` differs from the others in the seed alone, and has a seed of its own."""
    if config.seed in [other.seed for other in others]:
        return False
    return {change.partition(":")[0] for change in changed_keys(others[0], config)} == {"seed"}
