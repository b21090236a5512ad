"""Rollout groups <-> parquet: one row a completion, everything needed to grade, replay or train on it again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from grpo_lab.types import Completion, Grade, Problem, RolloutGroup


def write_groups(path: Path, groups: Sequence[RolloutGroup], metadata: dict[str, str] | None = None) -> None:
    """Write `path` whole or not at all. `metadata` goes into the file's schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([row for index, group in enumerate(groups) for row in _rows(index, group)])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    pq.write_table(table.replace_schema_metadata(metadata), partial, compression="zstd")
    partial.replace(path)


def read_groups(path: Path) -> tuple[list[RolloutGroup], dict[str, str]]:
    """The groups of a file `write_groups` wrote, and its metadata. Messages of the problems are not kept."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    rows = table.to_pylist()
    return [_group(list(part)) for _, part in groupby(rows, key=lambda row: row["group"])], metadata


def _rows(index: int, group: RolloutGroup) -> list[dict[str, Any]]:
    return [
        {
            "group": index,
            "problem": group.problem.id,
            "answer": group.problem.answer,
            "sibling": sibling,
            "text": completion.text,
            "reward": grade.reward,
            "outcome": grade.outcome,
            "extracted": grade.extracted,
            "finish_reason": completion.finish_reason,
            "weight_version": completion.weight_version,
            "prompt_ids": list(group.prompt_ids),
            "token_ids": list(completion.token_ids),
            "logprobs": list(completion.logprobs),
        }
        for sibling, (completion, grade) in enumerate(zip(group.completions, group.grades, strict=True))
    ]


def _group(rows: list[dict[str, Any]]) -> RolloutGroup:
    completions = tuple(
        Completion(tuple(r["token_ids"]), tuple(r["logprobs"]), r["text"], r["finish_reason"], r["weight_version"])
        for r in rows
    )
    grades = tuple(Grade(r["reward"], r["outcome"], r["extracted"]) for r in rows)
    return RolloutGroup(
        Problem(rows[0]["problem"], (), rows[0]["answer"]), tuple(rows[0]["prompt_ids"]), completions, grades
    )
