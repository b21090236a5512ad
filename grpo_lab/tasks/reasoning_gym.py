"""Any generator of the reasoning_gym package as a task: questions made on the spot, nothing downloaded.

`data.options`: which generator, its `params`, and the `pool` of entries to make before equal questions are merged.
`native` grading asks the generator's own scorer about the text inside the last <answer>…</answer>, or all of it.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, JsonValue

from grpo_lab.config import DataConfig
from grpo_lab.errors import ConfigError, unknown_name
from grpo_lab.tasks._answers import grade_number, require_number
from grpo_lab.tasks._options import Options, read_options
from grpo_lab.tasks._split import split
from grpo_lab.types import Grade, Problem

_EVALUATES = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(")
_MAX_NATIVE_CHARS = 10_000


class ReasoningGymOptions(Options):
    """`data.options` of this task. `allow_eval` admits native scorers that run the model's text as Python."""

    generator: str = "chain_sum"
    params: dict[str, JsonValue] = Field({})
    seed: int = Field(0, ge=0)
    pool: int = Field(10_000, ge=2)
    grading: Literal["strict", "flexible", "native"] = "flexible"
    allow_eval: bool = False


class Task:
    """Problems "<generator>-<index>", the index being the generator's own; `Problem.data` is its whole entry."""

    def __init__(self, data: DataConfig) -> None:
        if data.path is not None:
            raise ConfigError(
                f"data.path={data.path!r}: task 'reasoning_gym' makes its problems and reads no file; remove it"
            )
        self._options = read_options(ReasoningGymOptions, data)
        self._dataset = _create_dataset(self._options)
        if self._options.grading == "native" and not self._options.allow_eval:
            _refuse_evaluating_scorer(self._options.generator, self._dataset)
        self.train, self.heldout = split(_problems(self._dataset, self._options), data)

    def grade(self, problem: Problem, text: str, truncated: bool) -> Grade:
        if self._options.grading == "native":
            return _grade_native(self._dataset, problem, text, truncated)
        return grade_number(problem.answer, text, truncated, self._options.grading)

    @classmethod
    def example(cls, folder: Path) -> DataConfig:
        """Sums of two digits, all of them."""
        params: JsonValue = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
        options: dict[str, JsonValue] = {"generator": "chain_sum", "params": params, "pool": 2000}
        return DataConfig(task="reasoning_gym", train_problems=None, heldout_problems=32, options=options)


def _create_dataset(options: ReasoningGymOptions) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ConfigError(f"task 'reasoning_gym' cannot be used ({error}): pip install reasoning-gym") from None
    if options.generator not in DATASETS:
        raise unknown_name("reasoning_gym generator", options.generator, DATASETS)
    allowed = {field.name for field in fields(DATASETS[options.generator][1])} - {"size", "seed"}
    for name in options.params.keys() - allowed:
        raise unknown_name(f"{options.generator} parameter", name, allowed)
    try:
        return create_dataset(options.generator, **options.params, seed=options.seed, size=options.pool)
    except Exception as error:
        raise ConfigError(f"data.options.params={options.params}: {options.generator} refuses them: {error}") from None


def _refuse_evaluating_scorer(generator: str, dataset: Any) -> None:
    if _EVALUATES.search(inspect.getsource(type(dataset).score_answer)):
        raise ConfigError(
            f"the native scorer of {generator!r} evaluates the model's text as Python code: choose grading strict "
            "or flexible, or set data.options.allow_eval=true where you may run whatever a model writes"
        )


def _problems(dataset: Any, options: ReasoningGymOptions) -> Iterator[Problem]:
    for index in range(options.pool):
        where = f"{options.generator} entry {index}"
        try:
            entry = dataset[index]
        except Exception as error:
            raise ConfigError(
                f"{where} cannot be made ({type(error).__name__}: {error}); change data.options.params"
            ) from None
        answer = "" if entry["answer"] is None else str(entry["answer"])
        if options.grading != "native":
            require_number(answer, where)
        yield Problem(f"{options.generator}-{index}", options.chat(entry["question"]), answer, entry)


def _grade_native(dataset: Any, problem: Problem, text: str, truncated: bool) -> Grade:
    """Reward 1 for a full score. An empty or overlong answer, and one its scorer chokes on, is unparsable."""
    if truncated:
        return Grade(0.0, "truncated")
    answer = _tagged_answer(text)
    if not 0 < len(answer) <= _MAX_NATIVE_CHARS:
        return Grade(0.0, "unparsable")
    try:
        correct = bool(dataset.score_answer(answer, problem.data) >= 1)
    except Exception:
        return Grade(0.0, "unparsable")
    return Grade(float(correct), "correct" if correct else "wrong", answer)


def _tagged_answer(text: str) -> str:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end].strip() if start >= 0 else text.strip()
