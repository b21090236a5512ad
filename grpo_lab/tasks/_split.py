"""Problems -> disjoint (train, held-out), a function of the problems and `data` alone. Knows no run seed."""

from collections.abc import Iterable
from random import Random

from grpo_lab.config import DataConfig
from grpo_lab.errors import ConfigError
from grpo_lab.seeding import derive_seed
from grpo_lab.types import Problem


def split(problems: Iterable[Problem], data: DataConfig) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    """Shuffle by `data.split_seed`, take the held-out problems first, then the training problems (null = all the rest).

    Prompts equal up to white space count once (the first stays), so no prompt stands on both sides. The held-out set
    does not depend on `data.train_problems`. Raises ConfigError, with the numbers, when there are too few.
    """
    given = list(problems)
    distinct = list({_prompt_key(problem): problem for problem in reversed(given)}.values())[::-1]
    wanted_train = 1 if data.train_problems is None else data.train_problems
    if len(distinct) < data.heldout_problems + wanted_train:
        train = data.train_problems or "null (at least 1)"
        raise ConfigError(
            f"task {data.task!r}: {len(distinct)} distinct problems of {len(given)}, but data.heldout_problems="
            f"{data.heldout_problems} + data.train_problems={train} need {data.heldout_problems + wanted_train}: "
            "lower them (train_problems=null takes all the rest) or give more data"
        )
    Random(derive_seed(data.split_seed, "split")).shuffle(distinct)
    heldout, rest = distinct[: data.heldout_problems], distinct[data.heldout_problems :]
    return tuple(rest[: data.train_problems]), tuple(heldout)


def _prompt_key(problem: Problem) -> tuple[tuple[str, str], ...]:
    return tuple((message["role"], " ".join(message["content"].split())) for message in problem.messages)
