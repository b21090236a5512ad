"""Graded groups -> a few completions worth reading: every outcome in turn, of as many problems as possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from grpo_lab.types import RolloutGroup


@dataclass(frozen=True)
class Sample:
    """One completion with its grade; `extracted` is the answer found in it, "" for none; `tokens` counts it."""

    problem: str
    wanted: str
    outcome: str
    reward: float
    extracted: str
    tokens: int
    text: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def choose_samples(groups: Sequence[RolloutGroup], count: int) -> list[Sample]:
    """At most `count` completions: one of each outcome (correct first), then a second of each, and so on.

    Of one outcome the first siblings of all problems come before any second sibling.
    """
    siblings = max((len(group.completions) for group in groups), default=0)
    samples = [_sample(group, index) for index in range(siblings) for group in groups if index < len(group.completions)]
    seen: Counter[str] = Counter()
    ranked: list[tuple[int, bool, str, int]] = []
    for place, sample in enumerate(samples):
        ranked.append((seen[sample.outcome], sample.outcome != "correct", sample.outcome, place))
        seen[sample.outcome] += 1
    chosen = sorted(ranked)[:count]
    return [samples[place] for _, _, _, place in sorted(chosen, key=lambda row: row[1:])]


def _sample(group: RolloutGroup, index: int) -> Sample:
    completion, grade = group.completions[index], group.grades[index]
    return Sample(
        problem=group.problem.id,
        wanted=group.problem.answer,
        outcome=grade.outcome,
        reward=grade.reward,
        extracted="" if grade.extracted is None else grade.extracted,
        tokens=len(completion.token_ids),
        text=completion.text,
    )
