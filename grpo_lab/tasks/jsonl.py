"""Your own problems: `data.path` is a jsonl of {"prompt": text or list of messages, "answer": text, "id": text}.

"id" may be left out. Other keys are kept: a reward function of yours finds the whole row in `problem.data`.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from grpo_lab import plugins
from grpo_lab.config import DataConfig
from grpo_lab.errors import ConfigError, RunError, in_words, spelled
from grpo_lab.tasks._answers import grade_number, require_number
from grpo_lab.tasks._options import Options, read_options
from grpo_lab.tasks._rows import Row, find_file, read_rows
from grpo_lab.tasks._split import split
from grpo_lab.types import Grade, Message, Problem

RewardFunction = Callable[[Problem, str], float]


class JsonlOptions(Options):
    """`data.options` of this task.

    `reward` = "package.module:function", f(problem, text) -> float, replaces `grading`; a reward of 1 or more is "correct",
    one between 0 and 1 "partial". Completions that hit the length limit get `truncated_reward` instead: give the lowest of
    your range. A reward above `largest_reward` is refused, since the floor is computed for rewards up to it.
    """

    grading: Literal["strict", "flexible", "exact"] = "strict"
    reward: str | None = Field(None, pattern=r"^\w+(\.\w+)*:\w+$")
    truncated_reward: float = 0.0
    largest_reward: float = Field(1.0, gt=0)


class Task:
    """Problems by their "id", or "row-<number>" from 0 where a row has none."""

    def __init__(self, data: DataConfig) -> None:
        self._options = read_options(JsonlOptions, data)
        self.largest_reward = self._options.largest_reward
        if data.path is None:
            raise ConfigError(
                "task 'jsonl' needs data.path: a jsonl file of your problems, or a folder with train.jsonl"
            )
        self._reward = _load_reward(self._options.reward) if self._options.reward else None
        rows = read_rows(find_file(data.path, "train.jsonl"))
        self.train, self.heldout = split(_problems(rows, self._options), data)
        if self._reward is not None:
            self._try(self._reward)

    def _try(self, reward: RewardFunction) -> None:
        """ConfigError for a function that cannot even grade nothing, which models do write: minutes before the first step."""
        try:
            least = self._grade_by_function(reward, self.train[0], "", False).reward
        except RunError as error:
            raise ConfigError(f"{error} (tried on an empty completion, which any model may write)") from None
        if least < self._options.truncated_reward and "truncated_reward" not in self._options.model_fields_set:
            raise ConfigError(
                f"reward {self._options.reward!r} gives {least:g} for an empty completion, but one that is cut off at the "
                f"length limit gets {self._options.truncated_reward:g}, so that being cut off pays: set "
                "data.options.truncated_reward to the lowest of your range"
            )

    def grade(self, problem: Problem, text: str, truncated: bool) -> Grade:
        if self._reward is not None:
            return self._grade_by_function(self._reward, problem, text, truncated)
        if self._options.grading == "exact":
            return _grade_exact(problem.answer, text, truncated)
        return grade_number(problem.answer, text, truncated, self._options.grading)

    def _grade_by_function(self, function: RewardFunction, problem: Problem, text: str, truncated: bool) -> Grade:
        if truncated:
            return Grade(self._options.truncated_reward, "truncated")
        try:
            reward = function(problem, text)
        except Exception as error:
            raise RunError(
                f"reward {self._options.reward!r} failed on a completion of problem {problem.id!r}: {in_words(error)}"
            ) from None
        try:
            value = math.nan if isinstance(reward, str | bytes) else float(reward)
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        if not math.isfinite(value):
            raise RunError(
                f"reward {self._options.reward!r} gave {spelled(reward)} for problem {problem.id!r}; return a finite number"
            )
        if value > self.largest_reward:
            raise RunError(
                f"reward {self._options.reward!r} gave {value:g} for problem {problem.id!r}, more than "
                f"data.options.largest_reward={self.largest_reward:g}: set that to the most it can pay"
            )
        return Grade(value, "correct" if value >= 1 else "partial" if value > 0 else "wrong")

    @classmethod
    def example(cls, folder: Path) -> DataConfig:
        """Twelve products, written to `folder`."""
        rows = [{"prompt": f"What is {n} times 3?", "answer": str(3 * n), "id": f"times-{n}"} for n in range(12)]
        file = folder / "problems.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return DataConfig(task="jsonl", path=str(file), train_problems=None, heldout_problems=4)


def _grade_exact(answer: str, text: str, truncated: bool) -> Grade:
    """Equality of the stripped strings; an empty text is unparsable."""
    found = text.strip()
    if truncated or not found:
        return Grade(0.0, "truncated" if truncated else "unparsable")
    return Grade(1.0, "correct", found) if found == answer.strip() else Grade(0.0, "wrong", found)


def _load_reward(name: str) -> RewardFunction:
    function: RewardFunction = plugins.load("grpo_lab.tasks", name, "reward")
    return function


def _problems(rows: Iterable[Row], options: JsonlOptions) -> Iterator[Problem]:
    seen: dict[str, str] = {}
    for index, row in enumerate(rows):
        name = row.text("id") if row.record.get("id") is not None else f"row-{index}"
        if name in seen:
            raise ConfigError(f"{row.where}: id {name!r} stands at {seen[name]} already; ids must be unique")
        seen[name] = row.where
        needs_none = options.reward is not None and "answer" not in row.record
        answer = "" if needs_none else row.text("answer")
        if options.reward is None and options.grading != "exact":
            require_number(answer, row.where)
        yield Problem(name, _messages(row, options), answer, row.record)


def _messages(row: Row, options: JsonlOptions) -> tuple[Message, ...]:
    """The row's own conversation, its last turn the user's, with the options' instruction and system message added."""
    prompt = row.record.get("prompt")
    if not isinstance(prompt, list):
        return options.chat(row.text("prompt"))
    if not all(map(_is_message, prompt)) or not prompt or prompt[-1]["role"] != "user":
        raise ConfigError(
            f"{row.where}: a 'prompt' list must hold {{'role': system|user|assistant, 'content': text}} and end with "
            f"the user's turn, got {repr(prompt)[:80]}; correct the row"
        )
    if options.system is not None and prompt[0]["role"] == "system":
        raise ConfigError(f"{row.where}: the prompt has a system message and data.options.system is set too; drop one")
    *system, last = options.chat(prompt[-1]["content"])
    return (*system, *(Message(role=turn["role"], content=turn["content"]) for turn in prompt[:-1]), last)


def _is_message(turn: Any) -> bool:
    return (
        isinstance(turn, dict)
        and turn.get("role") in ("system", "user", "assistant")
        and isinstance(turn.get("content"), str)
    )
