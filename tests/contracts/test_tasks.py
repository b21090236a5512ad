"""What holds for every file of grpo_lab/tasks, on the example it brings along. A new file is found by itself."""

from pathlib import Path

import pytest

from grpo_lab import plugins
from grpo_lab.config import DataConfig
from grpo_lab.tasks import TaskProtocol, load_task
from grpo_lab.types import Grade, Problem

NAMES = plugins.names("grpo_lab.tasks")


@pytest.fixture(params=NAMES)
def data(request: pytest.FixtureRequest, tmp_path: Path) -> DataConfig:
    example: DataConfig = plugins.load("grpo_lab.tasks", request.param, "Task").example(tmp_path)
    assert example.task == request.param
    return example


@pytest.fixture
def task(data: DataConfig) -> TaskProtocol:
    return load_task(data)


def _all(task: TaskProtocol) -> list[Problem]:
    return [*task.train, *task.heldout]


def _prompt(problem: Problem) -> str:
    return "\n".join(message["content"] for message in problem.messages)


def _grade_answer(task: TaskProtocol, problem: Problem, answer: str) -> set[str]:
    return {task.grade(problem, text, False).outcome for text in (f"#### {answer}", answer)}


def test_the_shipped_tasks_are_found() -> None:
    assert {"gsm8k", "jsonl", "reasoning_gym"} <= set(NAMES)


def test_sizes_follow_the_configuration(task: TaskProtocol, data: DataConfig) -> None:
    assert len(task.heldout) == data.heldout_problems
    assert len(task.train) == data.train_problems or (data.train_problems is None and len(task.train) >= 1)


def test_problems_are_distinct_in_id_and_prompt_over_both_sides(task: TaskProtocol) -> None:
    problems = _all(task)
    assert len({problem.id for problem in problems}) == len(problems)
    assert len({_prompt(problem) for problem in problems}) == len(problems)


def test_every_prompt_ends_with_a_user_turn_that_says_something(task: TaskProtocol) -> None:
    for problem in _all(task):
        assert problem.messages[-1]["role"] == "user"
        assert all(set(message) == {"role", "content"} and message["content"].strip() for message in problem.messages)


def test_loading_is_a_pure_function_of_the_configuration(task: TaskProtocol, data: DataConfig) -> None:
    again, other = load_task(data), load_task(data.model_copy(update={"split_seed": data.split_seed + 1}))
    assert (again.train, again.heldout) == (task.train, task.heldout)
    assert {p.id for p in other.heldout} != {p.id for p in task.heldout}


def test_the_right_answer_is_correct_and_another_one_is_wrong(task: TaskProtocol) -> None:
    for problem in _all(task):
        assert "correct" in _grade_answer(task, problem, problem.answer)
        others = next(p.answer for p in _all(task) if p.answer != problem.answer)
        assert "correct" not in _grade_answer(task, problem, others)


def test_reward_and_outcome_agree_and_grading_is_pure(task: TaskProtocol) -> None:
    problem = task.train[0]
    for text in (f"#### {problem.answer}", problem.answer, "#### 987654", "no idea", "", "\x00" * 1000, "9" * 100_000):
        grade = task.grade(problem, text, False)
        assert grade.outcome in ("correct", "wrong", "unparsable")
        assert grade.reward == float(grade.outcome == "correct")
        assert task.grade(problem, text, False) == grade


def test_a_truncated_completion_gets_no_reward(task: TaskProtocol) -> None:
    problem = task.train[0]
    for text in (f"#### {problem.answer}", problem.answer):
        assert task.grade(problem, text, True) == Grade(0.0, "truncated")


def test_an_empty_completion_is_unparsable(task: TaskProtocol) -> None:
    assert task.grade(task.train[0], "", False) == Grade(0.0, "unparsable")
