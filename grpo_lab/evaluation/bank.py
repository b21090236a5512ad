"""The frozen bank of reference samples: drawn once a run, hashed, and reused by every evaluation of that run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_lab.config import Config, expand_path
from grpo_lab.errors import RunError
from grpo_lab.hub import resolve_model, weights_signature
from grpo_lab.storage.records import read_groups, write_groups
from grpo_lab.types import Problem, RolloutGroup, Sampling

if TYPE_CHECKING:
    from grpo_lab.assemble import Parts

FORMAT = 1  # of what a bank holds; a new number makes old banks unusable
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


def fingerprint(config: Config, problems: Sequence[Problem], sampling: Sampling, samples: int) -> str:
    """sha256 over everything the samples depend on: model files, problems with their answers, sampling, seed, code format."""
    parts = {
        "format": FORMAT,
        "model": config.model.model_dump(include={"name", "revision", "dtype"}),
        "weights": weights_signature(resolve_model(config.model)),
        "data": config.data.model_dump(mode="json"),
        "sampling": asdict(sampling),
        "engine": config.rollout.engine,
        "seed": config.seed,
        "samples": samples,
        "problems": [[problem.id, problem.messages, problem.answer] for problem in problems],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def run_bank(parts: Parts, folder: Path | None) -> ReferenceBank:
    """The bank of a run's evaluations, in the run's folder; in `evaluation.bank_dir` runs of equal settings share it."""
    settings = parts.config.evaluation
    shared = Path(expand_path(settings.bank_dir)) if settings.bank_dir and folder else None
    return reference_bank(
        parts,
        shared or folder,
        settings.problems,
        settings.samples,
        parts.evaluation_sampling,
        shared=shared is not None,
    )


def has_bank(folder: Path) -> bool:
    """Whether a run's own bank lies in `folder`."""
    return (folder / "reference_bank.parquet").is_file()


def reference_bank(
    parts: Parts, folder: Path | None, problems: int, samples: int, sampling: Sampling, shared: bool = False
) -> ReferenceBank:
    """The bank in `folder`, or a new one written there (kept in memory without a folder).

    A new one is sampled now, so the engine must hold the reference's weights: ask before the first push. A `shared` folder
    holds banks of several settings side by side, named by their fingerprints.

    Raises RunError when a bank of other settings lies in the folder: floors of different banks are not comparable.
    """
    chosen = parts.task.heldout[:problems]
    expected = fingerprint(parts.config, chosen, sampling, samples)
    path = folder / f"reference_bank{f'-{expected[:12]}' if shared else ''}.parquet" if folder else None
    if path and path.is_file():
        return _kept_bank(parts, chosen, path, expected)
    sampled = parts.collector.collect(chosen, samples, sampling, PURPOSE)
    if path and shared and path.is_file():  # a run beside this one was quicker; both are to have the same bank
        return _kept_bank(parts, chosen, path, expected)
    if path:
        write_groups(path, sampled, {"fingerprint": expected})
    return ReferenceBank(tuple(sampled), expected)


def _kept_bank(parts: Parts, problems: Sequence[Problem], path: Path, expected: str) -> ReferenceBank:
    groups, metadata = read_groups(path)
    if metadata.get("fingerprint") != expected:
        raise RunError(
            f"{path} was drawn with other settings (model, data, sampling, seed, problems or samples); evaluate with the "
            "settings it was drawn with, or move the file away to draw a new bank"
        )
    _check_grades(parts, problems, groups, path)
    # the file keeps no messages, and an evaluation's digest of its problems covers them
    whole = (replace(group, problem=problem) for problem, group in zip(problems, groups, strict=True))
    return ReferenceBank(tuple(whole), expected)


def _check_grades(parts: Parts, problems: Sequence[Problem], groups: Sequence[RolloutGroup], path: Path) -> None:
    """RunError when today's reward function grades a kept completion otherwise: old and new rewards must not be mixed."""
    for problem, group in zip(problems, groups, strict=True):
        for completion, grade in zip(group.completions, group.grades, strict=True):
            now = parts.collector.graded(problem, completion).reward
            if now != grade.reward:
                raise RunError(
                    f"{path}: a completion of {problem.id!r} was graded {grade.reward:g} and is graded {now:g} now: the reward "
                    "changed; give it back the old one, or begin a new run: one run cannot mix them"
                )
