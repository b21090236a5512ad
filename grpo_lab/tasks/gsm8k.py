"""GSM8K (Cobbe et al. 2021): its 7,473 training rows, split into train and held-out; reward 1 for the exact number.

The rows come from the hub's openai/gsm8k, or from `data.path`: a jsonl of {"question", "answer"}, or a folder with
such a train.jsonl. The test file is never read.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from grpo_lab.config import DataConfig
from grpo_lab.errors import ConfigError
from grpo_lab.tasks._answers import Protocol, grade_number, require_number
from grpo_lab.tasks._options import Options, read_options
from grpo_lab.tasks._rows import Row, find_file, read_rows
from grpo_lab.tasks._split import split
from grpo_lab.types import Grade, Problem

_DATASET = "openai/gsm8k"


class GSM8KOptions(Options):
    """`data.options` of this task; `grading` is explained in _answers.py."""

    instruction: str = (
        "Reason step by step. End with the final answer alone on the last line, written as: #### <number>"
    )
    grading: Protocol = "strict"


class Task:
    """Problems "gsm8k-<row>", rows numbered from 0 in the order of the file."""

    def __init__(self, data: DataConfig) -> None:
        self._options = read_options(GSM8KOptions, data)
        rows = read_rows(find_file(data.path, "train.jsonl")) if data.path else _hub_rows()
        self.train, self.heldout = split(_problems(rows, self._options), data)

    def grade(self, problem: Problem, text: str, truncated: bool) -> Grade:
        return grade_number(problem.answer, text, truncated, self._options.grading)

    @classmethod
    def example(cls, folder: Path) -> DataConfig:
        """Twelve additions in the format of the data set, written to `folder`."""
        rows = [{"question": f"What is {n} plus 7?", "answer": f"{n} + 7 = {n + 7}\n#### {n + 7}"} for n in range(12)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return DataConfig(task="gsm8k", path=str(folder), train_problems=8, heldout_problems=4)


def _problems(rows: Iterable[Row], options: GSM8KOptions) -> list[Problem]:
    return [
        Problem(f"gsm8k-{index}", options.chat(row.text("question")), _final_answer(row))
        for index, row in enumerate(rows)
    ]


def _final_answer(row: Row) -> str:
    _, marker, answer = row.text("answer").rpartition("####")
    if not marker:
        raise ConfigError(f"{row.where}: the answer must end in '#### <number>', which is not there; correct the row")
    require_number(answer, row.where)
    return answer.strip()


def _hub_rows() -> list[Row]:
    try:
        from datasets import load_dataset

        dataset = load_dataset(_DATASET, "main", split="train")
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"the data set {_DATASET!r} could not be loaded from the hub ({type(error).__name__}: {reason}): "
            "check the network, or set data.path to a folder with its train.jsonl"
        ) from None
    return [Row(f"{_DATASET} train, row {index}", record) for index, record in enumerate(dataset)]
