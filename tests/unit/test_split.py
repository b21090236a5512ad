"""The train/held-out split and the stream of training problems by step: disjoint, seeded, pure."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lab.config import DataConfig
from grpo_lab.errors import ConfigError
from grpo_lab.tasks import problems_for_step
from grpo_lab.tasks._split import split
from grpo_lab.types import Message, Problem


def _problem(name: str, prompt: str) -> Problem:
    return Problem(name, (Message(role="user", content=prompt),), "0")


def _problems(count: int) -> list[Problem]:
    return [_problem(f"p{n}", f"question {n}") for n in range(count)]


def _data(train: int | None, heldout: int, seed: int = 0) -> DataConfig:
    return DataConfig(task="jsonl", train_problems=train, heldout_problems=heldout, split_seed=seed)


def _ids(problems: Sequence[Problem]) -> list[str]:
    return [problem.id for problem in problems]


def test_sizes_are_as_asked_and_the_sides_disjoint() -> None:
    train, heldout = split(_problems(50), _data(30, 10))
    assert (len(train), len(heldout)) == (30, 10)
    assert len({*_ids(train), *_ids(heldout)}) == 40


def test_null_takes_all_that_are_not_held_out() -> None:
    train, heldout = split(_problems(50), _data(None, 10))
    assert sorted(_ids(train) + _ids(heldout)) == sorted(_ids(_problems(50)))


def test_the_split_follows_its_seed_alone() -> None:
    first, again, other = (split(_problems(50), _data(30, 10, seed)) for seed in (0, 0, 1))
    assert first == again
    assert set(_ids(first[1])) != set(_ids(other[1]))


def test_the_held_out_problems_do_not_depend_on_the_number_of_training_problems() -> None:
    assert split(_problems(50), _data(5, 10))[1] == split(_problems(50), _data(40, 10))[1]


def test_known_split_stays_the_same_from_version_to_version() -> None:
    """A changed split makes old checkpoints train on their own held-out problems."""
    train, heldout = split(_problems(8), _data(None, 3))
    assert (_ids(heldout), _ids(train)) == (["p5", "p7", "p0"], ["p4", "p2", "p6", "p3", "p1"])


def test_equal_prompts_count_once_whatever_their_white_space() -> None:
    twins = [_problem(f"twin{n}", f" question \n{n}") for n in range(20)]
    train, heldout = split(_problems(20) + twins, _data(None, 5))
    assert sorted(_ids(train) + _ids(heldout)) == sorted(_ids(_problems(20)))


def test_too_few_problems_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError) as error:
        split(_problems(20) + _problems(20), _data(16, 5))
    text = str(error.value)
    assert "\n" not in text
    for part in ("20 distinct problems of 40", "data.heldout_problems=5", "data.train_problems=16", "need 21", "lower"):
        assert part in text


def test_null_still_needs_one_training_problem() -> None:
    assert len(split(_problems(6), _data(None, 5))[0]) == 1
    with pytest.raises(ConfigError, match=r"data.train_problems=null \(at least 1\) need 6"):
        split(_problems(5), _data(None, 5))


@given(st.integers(1, 9), st.integers(1, 25), st.integers(0, 5))
def test_steps_are_consecutive_pieces_of_shuffled_epochs(size: int, count: int, seed: int) -> None:
    problems = _problems(size)
    stream = [p.id for step in range(12) for p in problems_for_step(problems, seed, step, count)]
    assert len(stream) == 12 * count
    for epoch in range(len(stream) // size):
        assert sorted(stream[epoch * size : (epoch + 1) * size]) == _ids(problems)


def test_how_the_stream_is_cut_into_steps_does_not_change_it() -> None:
    problems = _problems(7)
    whole = problems_for_step(problems, 3, 0, 60)
    assert [p for step in range(15) for p in problems_for_step(problems, 3, step, 4)] == whole


def test_a_step_is_a_pure_function_of_seed_and_step() -> None:
    problems = _problems(100)
    late = problems_for_step(problems, 3, 11, 30)
    problems_for_step(problems, 3, 0, 30)
    assert problems_for_step(problems, 3, 11, 30) == late
    assert problems_for_step(problems, 4, 11, 30) != late


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    problems = _problems(10)
    orders = Counter(tuple(_ids(problems_for_step(problems, seed, step, 10))) for seed in range(5) for step in range(5))
    assert len(orders) == 25
