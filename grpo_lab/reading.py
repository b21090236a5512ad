"""Recorded or sampled completions as people look at them: chosen, grouped by problem, counted. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from grpo_lab.errors import ConfigError, RunError, unknown_name
from grpo_lab.run_dir import RunDir
from grpo_lab.types import Outcome, RolloutGroup

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
_COLUMNS = (
    "group", "problem", "answer", "sibling", "text", "reward", "outcome", "extracted", "weight_version",
    "weight_version_end", "advantage", "prompt_ids", "token_ids",
)  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """One completion with its grade. `group` numbers the groups of a step; `tokens` counts the completion's.

    `advantage` is what the run's learner used, None where none was recorded.
    """

    group: int
    problem: str
    answer: str
    sibling: int
    text: str
    reward: float
    outcome: str
    extracted: str | None
    tokens: int
    weight_version: int
    weight_version_end: int | None
    advantage: float | None
    prompt_ids: tuple[int, ...]


def read_seen(run: RunDir, step: int | None) -> tuple[int, list[Seen]]:
    """Every completion of `step`, or of the newest step with a record. ConfigError where there is no such record."""
    files = run.rollout_files()
    if not files:
        kept = "none was finished yet" if run.config.tracking.rollouts else "it runs with tracking.rollouts=false"
        raise ConfigError(f"{run.path} has no rollout records: {kept}")
    step = max(files) if step is None else step
    if step not in files:
        raise ConfigError(f"step {step} of {run.path} has no rollout record; these steps have: {ranges(sorted(files))}")
    return step, _read(files[step])


def _read(file: Path) -> list[Seen]:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        names = [name for name in _COLUMNS if name in pq.read_schema(file).names]
        table = pq.read_table(file, columns=names)
        lengths = pc.list_value_length(table["token_ids"])
        rows = table.drop_columns(["token_ids"]).append_column("tokens", lengths).to_pylist()
        return [
            Seen(**{"weight_version_end": None, "advantage": None, **row, "prompt_ids": tuple(row["prompt_ids"])})
            for row in rows
        ]
    except (pa.ArrowException, OSError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:150]
        raise RunError(f"{file} is no rollout record that can be read ({reason}); look at another --step") from None


def of_groups(groups: Sequence[RolloutGroup]) -> list[Seen]:
    """Completions that were just sampled."""
    return [
        Seen(
            number, group.problem.id, group.problem.answer, sibling, completion.text, grade.reward, grade.outcome,
            grade.extracted, len(completion.token_ids), completion.weight_version, completion.weight_version_end, None,
            group.prompt_ids,
        )
        for number, group in enumerate(groups)
        for sibling, (completion, grade) in enumerate(zip(group.completions, group.grades, strict=True))
    ]  # fmt: skip


def choose(every: Sequence[Seen], outcomes: Collection[str], problem: str | None, most: int) -> list[Seen]:
    """At most `most` completions of these outcomes (all when empty) and of `problem`, grouped.

    They are taken from the groups in turn, so that few completions show many problems. ConfigError for an unknown problem.
    """
    if problem is not None and problem not in {one.problem for one in every}:
        raise unknown_name("problem of this step", problem, {one.problem for one in every})
    fits = [one for one in every if one.outcome in (outcomes or OUTCOMES) and problem in (None, one.problem)]
    turns, seen = list[tuple[int, int]](), Counter[int]()
    for index, one in enumerate(fits):
        turns.append((seen[one.group], index))
        seen[one.group] += 1
    chosen = sorted(index for _, index in sorted(turns)[:most])
    return sorted((fits[index] for index in chosen), key=lambda one: (one.group, one.sibling))


def counts(every: Sequence[Seen]) -> dict[str, int]:
    """How many completions of each outcome, in their order."""
    found = Counter(one.outcome for one in every)
    return {outcome: found[outcome] for outcome in OUTCOMES}


def mean_reward(every: Sequence[Seen]) -> float:
    return sum(one.reward for one in every) / len(every)


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers as "1-12, 14"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def to_json(every: Sequence[Seen], chosen: Sequence[Seen], prompts: Sequence[str | None]) -> dict[str, Any]:
    """The counts of all, and the chosen completions with the text of their prompts, as plain values."""
    lengths = [one.tokens for one in every]
    return {
        "completions": len(every),
        "outcomes": counts(every),
        "mean_reward": mean_reward(every),
        "mean_tokens": sum(lengths) / len(lengths),
        "shown": [
            {**asdict(one), "prompt_ids": list(one.prompt_ids), "prompt": prompt}
            for one, prompt in zip(chosen, prompts, strict=True)
        ],
    }
