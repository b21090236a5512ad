"""The frozen bank of reference samples: drawn once a run, hashed, and reused by every evaluation of that run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_lab.config import Config
from grpo_lab.errors import RunError
from grpo_lab.records import read_groups, write_groups
from grpo_lab.types import RolloutGroup

if TYPE_CHECKING:
    from grpo_lab.assemble import Parts

FILE = "reference_bank.parquet"
PURPOSE = ("evaluation",)  # every evaluation draws with the same seeds, so that checkpoints are compared pairwise


@dataclass(frozen=True)
class ReferenceBank:
    """K samples of the reference for each held-out problem, in the order of the problems."""

    groups: tuple[RolloutGroup, ...]
    fingerprint: str

    @property
    def rewards(self) -> list[list[float]]:
        """[problems][K]"""
        return [list(group.rewards) for group in self.groups]


def fingerprint(config: Config, problem_ids: Sequence[str]) -> str:
    """sha256 over everything the samples depend on: model, data, sampling limits, seed, problems and their number."""
    parts = {
        "model": config.model.model_dump(include={"name", "revision", "dtype"}),
        "data": config.data.model_dump(mode="json"),
        "max_new_tokens": config.rollout.max_new_tokens,
        "engine": config.rollout.engine,
        "seed": config.seed,
        "samples": config.evaluation.samples,
        "problems": list(problem_ids),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def reference_bank(parts: Parts, folder: Path | None) -> ReferenceBank:
    """The bank of `folder`, or a new one written there (kept in memory without a folder).

    A new one is sampled now, so the engine must hold the reference's weights: ask before the first push.

    Raises RunError when a bank of other settings lies in the folder: floors of different banks are not comparable.
    """
    config = parts.config
    problems = parts.task.heldout[: config.evaluation.problems]
    expected = fingerprint(config, [problem.id for problem in problems])
    path = folder / FILE if folder else None
    if path and path.is_file():
        groups, metadata = read_groups(path)
        if metadata.get("fingerprint") != expected:
            raise RunError(
                f"{path} was drawn with other settings (model, data, sampling, seed, problems or samples); evaluate with the "
                "run's own settings, or move the file away to draw a new bank"
            )
        return ReferenceBank(tuple(groups), expected)
    sampled = parts.collector.collect(problems, config.evaluation.samples, parts.evaluation_sampling, PURPOSE)
    if path:
        write_groups(path, sampled, {"fingerprint": expected})
    return ReferenceBank(tuple(sampled), expected)
