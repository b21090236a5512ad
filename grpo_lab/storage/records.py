"""Rollout groups <-> parquet: one row a completion, everything needed to grade, replay or train on it again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lab.errors import RunError
from grpo_lab.storage.scratch import ADVICE, whole_file
from grpo_lab.types import Completion, Grade, Problem, RolloutGroup, TrainBatch, UpdateReport

if TYPE_CHECKING:
    from torch import Tensor

TOKEN_COLUMNS = ("old_logprobs", "ref_logprobs", "trained_logprobs")
"""Per-token columns of a training step's record: the learner's before the update, the reference's, and those trained at."""


def write_groups(
    path: Path,
    groups: Sequence[RolloutGroup],
    metadata: dict[str, str] | None = None,
    columns: Mapping[str, Sequence[Any]] | None = None,
    advice: str = ADVICE,
) -> None:
    """Write `path` whole, or not at all with a RunError that ends with `advice`.

    `metadata` goes into the file's schema; `columns` hold one more value a completion.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([row for index, group in enumerate(groups) for row in _rows(index, group)])
    for name, values in (columns or {}).items():
        table = table.append_column(name, pa.array(values, pa.list_(pa.float32()) if name in TOKEN_COLUMNS else None))
    with whole_file(path, advice) as partial:
        pq.write_table(table.replace_schema_metadata(metadata), partial, compression="zstd")


def token_columns(batch: TrainBatch, advantages: Tensor, report: UpdateReport) -> dict[str, list[Any]]:
    """What the learner made of a step's completions, as columns for `write_groups`; padding is cut off."""
    lengths = batch.tokens.completion_mask.sum(dim=1).long().tolist()
    cut = lambda tensor: [row[:n] for row, n in zip(tensor.tolist(), lengths, strict=True)]  # noqa: E731
    tensors = (batch.old_logprobs, batch.ref_logprobs, report.trained_logprobs)
    return {**dict(zip(TOKEN_COLUMNS, map(cut, tensors), strict=True)), "advantage": advantages.tolist()}


def read_token_columns(path: Path) -> dict[str, list[list[float]]]:
    """The per-token columns of a training step's record, one list a completion; empty for a record without them."""
    import pyarrow.parquet as pq

    with _damage_told(path):
        names = [name for name in TOKEN_COLUMNS if name in pq.read_schema(path).names]
        return pq.read_table(path, columns=names).to_pydict() if names else {}


def read_groups(path: Path) -> tuple[list[RolloutGroup], dict[str, str]]:
    """The groups of a file `write_groups` wrote, and its metadata. Messages of the problems are not kept.

    RunError for a damaged file.
    """
    import pyarrow.parquet as pq

    with _damage_told(path):
        table = pq.read_table(path)
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    rows = table.to_pylist()
    return [_group(list(part)) for _, part in groupby(rows, key=lambda row: row["group"])], metadata


@contextmanager
def _damage_told(path: Path) -> Iterator[None]:
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError) as error:
        text = " ".join(str(error).split())[:150]
        raise RunError(
            f"{path} cannot be read, it may be damaged ({text}); move it away, or bring back a copy"
        ) from None


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
            "weight_version_end": completion.weight_version_end,
            "prompt_ids": list(group.prompt_ids),
            "token_ids": list(completion.token_ids),
            "logprobs": list(completion.logprobs),
        }
        for sibling, (completion, grade) in enumerate(zip(group.completions, group.grades, strict=True))
    ]


def _group(rows: list[dict[str, Any]]) -> RolloutGroup:
    completions = tuple(
        Completion(
            tuple(r["token_ids"]),
            tuple(r["logprobs"]),
            r["text"],
            r["finish_reason"],
            r["weight_version"],
            r.get("weight_version_end"),
        )
        for r in rows
    )
    grades = tuple(Grade(r["reward"], r["outcome"], r["extracted"]) for r in rows)
    return RolloutGroup(
        Problem(rows[0]["problem"], (), rows[0]["answer"]), tuple(rows[0]["prompt_ids"]), completions, grades
    )
