"""Kept evaluations of a run -> points over rollouts, with their values by problem, at any beta. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_lab.errors import RunError
from grpo_lab.run_dir import RunDir
from grpo_lab.thermo.floor import bracket
from grpo_lab.thermo.statistics import Estimate, clustered, paired_difference

Array = NDArray[np.float64]
BY_PROBLEM = ("reward", "kl", "kl_rao_blackwell", "reference_reward")


@dataclass(frozen=True)
class Problems:
    """Means over the samples of each problem, [N] each, KL in nats per sequence; equal `digest`, equal problems."""

    digest: str
    reward: Array
    kl: Array
    kl_rao_blackwell: Array
    reference_reward: Array

    def free_energy(self, beta: float) -> Array:
        """-E[r] + beta KL (k1) by problem, at any beta."""
        return beta * self.kl - self.reward


@dataclass(frozen=True)
class Point:
    """One evaluation as kept (`rows` has one), or those of replicates at the same rollouts, averaged by problem.

    Without values by problem (an older evaluation), an estimate is the kept one where it is of one run, else a mean with the
    error nan. `kl` is Rao-Blackwell; F takes k1, as everywhere.
    """

    rollouts: int
    rows: tuple[dict[str, Any], ...]

    @cached_property
    def problems(self) -> Problems | None:
        every = [_problems(row) for row in self.rows]
        kept = [problems for problems in every if problems]
        if len(kept) < len(every) or len({problems.digest for problems in kept}) > 1:
            return None
        means = (np.mean([getattr(problems, name) for problems in kept], axis=0) for name in BY_PROBLEM)
        return Problems(kept[0].digest, *means)

    @property
    def reward(self) -> Estimate:
        return clustered(self.problems.reward) if self.problems else self._kept("reward")

    @property
    def kl(self) -> Estimate:
        return clustered(self.problems.kl_rao_blackwell) if self.problems else self._kept("kl_rao_blackwell")

    def free_energy(self, beta: float) -> Estimate:
        """-E[r] + beta KL."""
        if self.problems:
            return clustered(self.problems.free_energy(beta))
        if beta == self.rows[0]["beta"]:
            return self._kept("free_energy")
        return Estimate(beta * self._kept("kl").mean - self.reward.mean, math.nan)

    def against_reference(self, beta: float) -> Estimate:
        """F - F_ref, paired by problem."""
        if self.problems:
            return paired_difference(self.problems.free_energy(beta), -self.problems.reference_reward)
        if beta == self.rows[0]["beta"]:
            return self._kept("against_reference")
        return Estimate(self.free_energy(beta).mean + self.reference_reward, math.nan)

    @property
    def reference_reward(self) -> float:
        return self._kept("reference_reward").mean

    def floor(self, beta: float) -> tuple[float, float] | None:
        """Both ends of the floor's bracket; None where what was kept does not tell it at this beta."""
        ends = [_floor(row, beta) for row in self.rows]
        known = [end for end in ends if end]
        lower, upper = np.mean(known, axis=0) if known and len(known) == len(ends) else (math.nan, math.nan)
        return None if math.isnan(lower) else (float(lower), float(upper))

    def _kept(self, key: str) -> Estimate:
        if len(self.rows) == 1:
            return Estimate(**self.rows[0][key])
        return Estimate(float(np.mean([row[key]["mean"] for row in self.rows])), math.nan)


def _problems(row: Mapping[str, Any]) -> Problems | None:
    kept = row.get("per_problem")
    return (
        Problems(kept["digest"], *(np.asarray(kept[name], dtype=np.float64) for name in BY_PROBLEM)) if kept else None
    )


def _floor(row: Mapping[str, Any], beta: float) -> tuple[float, float] | None:
    """The kept bracket; at another beta the same estimate from the counts of solved samples, for a binary reward."""
    if beta == row["beta"]:
        return row["floor"]["lower"]["mean"], row["floor"]["upper"]["mean"]
    problems, samples = _problems(row), row["samples"]
    if problems is None or not row["gap_split"]:  # which is kept for binary rewards only
        return None
    solved = np.rint(problems.reference_reward * samples)
    ends = bracket((np.arange(samples) < solved[:, None]).astype(np.float64), beta)
    return ends.lower.mean, ends.upper.mean


def read_points(run: RunDir) -> tuple[Point, ...]:
    """Every kept evaluation of a run, by rollouts. RunError for a file that cannot be read as one."""
    return tuple(_point(file) for file in sorted(run.evaluations.glob("rollouts_*.json")))


def read_evaluations(run: RunDir) -> list[dict[str, Any]]:
    """The same as they were written, one object each."""
    return [point.rows[0] for point in read_points(run)]


def _point(file: Path) -> Point:
    try:
        row = json.loads(file.read_text())
        point = Point(row["rollouts"], (row,))
        _ = (
            point.kl,
            *(f(row["beta"]) for f in (point.free_energy, point.against_reference, point.floor)),
        )  # all there
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{file} is damaged ({type(error).__name__}: {error}): move it away; where its checkpoint is kept, "
            f"`{how_to_evaluate(file)}` makes it again"
        ) from None
    return point


def how_to_evaluate(file: Path) -> str:
    """The command that makes the evaluation kept in `file` again."""
    return f"grpo-lab eval checkpoint {file.parents[1] / 'checkpoints' / file.stem} --json {file}"
