"""The real GSM8K training file: every truth parses, every gold solution is correct, the split is the experiment's."""

import json
import os
from pathlib import Path

import pytest

from grpo_lab.config import DataConfig
from grpo_lab.tasks import load_task

BESIDE_THE_REPOSITORY = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "gsm8k"


@pytest.fixture(scope="module")
def folder() -> Path:
    given = Path(os.environ.get("GRPO_LAB_GSM8K") or BESIDE_THE_REPOSITORY)
    if not (given / "train.jsonl").is_file():
        pytest.skip(
            f"no GSM8K data: {given / 'train.jsonl'} is missing; set GRPO_LAB_GSM8K to the folder with train.jsonl"
        )
    return given


def test_the_default_split_is_6500_and_500_of_7473_disjoint_rows(folder: Path) -> None:
    task = load_task(DataConfig(path=str(folder)))
    everything = load_task(DataConfig(path=str(folder), train_problems=None))
    assert (len(task.train), len(task.heldout)) == (6500, 500)
    assert len(everything.train) + len(everything.heldout) == 7473
    assert everything.heldout == task.heldout
    ids, prompts = ({f(p) for p in (*task.train, *task.heldout)} for f in (lambda p: p.id, lambda p: str(p.messages)))
    assert len(ids) == len(prompts) == 7000


@pytest.mark.parametrize("grading", ["strict", "flexible"])
def test_every_gold_solution_is_correct_and_no_neighbours_is(folder: Path, grading: str) -> None:
    task = load_task(DataConfig(path=str(folder), train_problems=None, options={"grading": grading, "instruction": ""}))
    rows = map(json.loads, (folder / "train.jsonl").read_text(encoding="utf-8").splitlines())
    solutions = {row["question"]: row["answer"] for row in rows}
    assert len(solutions) == 7473
    problems = [*task.train, *task.heldout]
    for problem, neighbour in zip(problems, problems[1:] + problems[:1], strict=True):
        gold = solutions[problem.messages[0]["content"]]
        assert task.grade(problem, gold, False).outcome == "correct", gold
        if neighbour.answer.replace(",", "") != problem.answer.replace(",", ""):
            assert task.grade(neighbour, gold, False).outcome == "wrong", gold
