"""Batches sampled ahead keep their order and their age; groups that are too old are dropped and sampled again."""

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from grpo_lab.errors import RunError
from grpo_lab.rollout.ahead import BatchesAhead, SamplingTimes
from grpo_lab.rollout.overage import collect_young
from grpo_lab.types import Completion, Grade, Problem, RolloutGroup


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.002)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_batches_come_in_order_and_begin_as_soon_as_their_age_allows(staleness: int) -> None:
    steps, version, begun = 6, 0, dict[int, int]()

    def collect(step: int) -> str:
        begun[step] = version
        return f"batch {step}"

    with BatchesAhead(collect, staleness, steps) as sampler:
        for step in range(steps):
            sampler.allow(step)
            assert sampler.take(step)[0] == f"batch {step}"
            allowed = min(step + staleness, steps - 1)
            until(lambda: allowed in begun)  # noqa: B023
            time.sleep(0.01)  # the learner trains; a batch that may not begin yet has time to
            assert sorted(begun) == list(range(allowed + 1))
            version = step + 1
    assert begun == {step: max(0, step - staleness) for step in range(steps)}


def test_a_quick_batch_waits_for_its_turn() -> None:
    second = threading.Event()

    def collect(step: int) -> int:
        if step == 0:
            assert second.wait(5)
        else:
            second.set()
        return step

    with BatchesAhead(collect, 1, 2) as sampler:
        sampler.allow(0)
        assert [sampler.take(step)[0] for step in range(2)] == [0, 1]


def test_without_staleness_a_batch_is_made_in_the_callers_thread_when_it_is_taken() -> None:
    threads: list[threading.Thread] = []
    with BatchesAhead(lambda step: threads.append(threading.current_thread()), 0, 2) as sampler:
        sampler.allow(0)
        assert not threads
        sampler.take(0)
    assert threads == [threading.current_thread()]


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_error_of_sampling_is_raised_where_its_batch_is_taken(staleness: int) -> None:
    def collect(step: int) -> int:
        if step == 1:
            raise RunError("no worker is left")
        return step

    with BatchesAhead(collect, staleness, 3) as sampler:
        sampler.allow(0)
        assert sampler.take(0)[0] == 0
        sampler.allow(1)
        with pytest.raises(RunError, match="no worker is left"):
            sampler.take(1)


def test_nothing_is_sampled_twice_or_past_the_end() -> None:
    begun: list[int] = []
    with BatchesAhead(begun.append, 5, 3) as sampler:
        for version in (0, 0, 1, 2, 3):
            sampler.allow(version)
        for step in range(3):
            sampler.take(step)
        time.sleep(0.02)
    assert sorted(begun) == [0, 1, 2]


def test_a_resumed_run_begins_at_its_step() -> None:
    begun: list[int] = []
    with BatchesAhead(begun.append, 1, 9) as sampler:
        sampler.allow(4)
        sampler.take(4)
        until(lambda: len(begun) == 2)
    assert sorted(begun) == [4, 5]


def test_the_times_tell_who_waited() -> None:
    with BatchesAhead(lambda step: time.sleep(0.3 * (step == 0)), 1, 3) as sampler:
        sampler.allow(0)
        first = sampler.take(0)[1]
        sampler.take(1)
        time.sleep(0.3)
        sampler.allow(1)
        last = sampler.take(2)[1]
    assert first.generate >= 0.3 and first.wait_rollouts >= 0.15 and first.wait_learner < 0.15
    assert last.wait_learner >= 0.3 and last.wait_rollouts < 0.15


@pytest.mark.parametrize(("staleness", "ahead"), [(0, False), (1, True), (2, True)])
def test_the_times_tell_whether_a_batch_was_begun_before_it_was_asked_for(staleness: int, ahead: bool) -> None:
    with BatchesAhead(lambda step: step, staleness, 3) as sampler:
        for step in range(3):
            sampler.allow(step)
            assert sampler.take(step)[1].ahead is ahead


@pytest.mark.parametrize(("generate", "waited", "overlap"), [(2, 0.5, 0.75), (2, 0, 1), (1, 1.1, 0), (0, 0, 0)])
def test_overlap_is_the_share_of_sampling_nobody_waited_for(generate: float, waited: float, overlap: float) -> None:
    assert SamplingTimes(generate, waited, 0).overlap == overlap


# -- groups that are too old -----------------------------------------------------------------------------------------

PROBLEMS = [Problem(name, (), "") for name in "abc"]


def group(problem: Problem, *versions: int) -> RolloutGroup:
    completions = tuple(Completion((1,), (-0.1,), "", "stop", version) for version in versions)
    return RolloutGroup(problem, (1,), completions, tuple(Grade(0, "wrong") for _ in versions))


class Sampler:
    """Answers with the versions given for each round, then with those of the last."""

    def __init__(self, *rounds: Sequence[tuple[int, ...]]) -> None:
        self.rounds, self.asked = list(rounds), list[str]()

    def __call__(self, problems: Sequence[Problem]) -> list[RolloutGroup]:
        self.asked.append("".join(problem.id for problem in problems))
        versions = self.rounds.pop(0) if len(self.rounds) > 1 else self.rounds[0]
        return [group(problem, *own) for problem, own in zip(problems, versions, strict=True)]


def test_young_groups_are_taken_as_they_are() -> None:
    sampler = Sampler([(2, 2), (3, 2), (3, 3)])
    groups, dropped = collect_young(sampler, PROBLEMS, 2)
    assert [g.problem for g in groups] == PROBLEMS
    assert (dropped, sampler.asked) == (0, ["abc"])


def test_late_groups_are_replaced_at_their_place_and_counted() -> None:
    sampler = Sampler([(3, 1), (2, 2), (1, 1)], [(3, 3), (1, 3)], [(2, 3)])
    groups, dropped = collect_young(sampler, PROBLEMS, 2)
    assert [(g.problem.id, g.weight_version) for g in groups] == [("a", 3), ("b", 2), ("c", 2)]
    assert (dropped, sampler.asked) == (3, ["abc", "ac", "c"])


def test_groups_that_come_young_at_the_last_try_are_taken() -> None:
    sampler = Sampler([(0,)], [(0,)], [(0,)], [(1,)])
    groups, dropped = collect_young(sampler, PROBLEMS[:1], 1)
    assert (groups[0].weight_version, dropped, len(sampler.asked)) == (1, 3, 4)


def test_a_sampler_that_stays_behind_fails_the_run() -> None:
    sampler = Sampler([(4,), (1,)], [(1,)])
    with pytest.raises(RunError, match="weight version 1, though 2 is the oldest allowed"):
        collect_young(sampler, PROBLEMS[:2], 2)
    assert sampler.asked == ["ab", "b", "b", "b"]
