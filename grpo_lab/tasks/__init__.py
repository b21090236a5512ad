"""Tasks: one file = prompt + dataset + reward. A file here that defines `Task` is a task, named as the file.

`Task(data: DataConfig)` loads and splits the data, reading its own keys from `data.options`. `Task.example(folder)`
writes a tiny data set there and returns the DataConfig for it; the contract test runs every task on its example, where
`#### <answer>` or `<answer>` alone must be graded correct.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from grpo_lab import plugins
from grpo_lab.config import DataConfig
from grpo_lab.errors import ConfigError, UserError, in_words
from grpo_lab.tasks._stream import problems_for_step
from grpo_lab.types import Grade, Problem

__all__ = ["TaskProtocol", "load_task", "problems_for_step"]


class TaskProtocol(Protocol):
    """What the trainer asks of a task. `train` and `heldout` are disjoint and depend on `data` alone.

    A task that pays more than 1 says so in an attribute `largest_reward`: the floor is a bound for rewards up to it.
    """

    train: Sequence[Problem]
    heldout: Sequence[Problem]

    def grade(self, problem: Problem, text: str, truncated: bool) -> Grade:
        """The reward of one completion's text. Called for every completion; must be pure."""
        ...


def load_task(data: DataConfig) -> TaskProtocol:
    """The task `data.task` names; ConfigError when the name, its options or its data are wrong."""
    try:
        task: TaskProtocol = find_task(data.task)(data)
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(f"task {data.task!r} cannot be made: {in_words(error)}; see `jsonl` for one") from None
    if missing := [name for name in ("train", "heldout", "grade") if not hasattr(task, name)]:
        raise ConfigError(f"task {data.task!r} has no {' and no '.join(missing)}; a task has train, heldout and grade")
    return task


def find_task(name: str) -> Callable[[DataConfig], TaskProtocol]:
    """The class of the task `name`; ConfigError when there is none."""
    return plugins.load("grpo_lab.tasks", name, "Task")  # type: ignore[no-any-return]
