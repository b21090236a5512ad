"""Dynamic sampling: equal groups are replaced until the batch is full or the cap is met; nothing is lost or doubled."""

from grpo_lab.rollout.dynamic import collect_mixed
from grpo_lab.types import Completion, Grade, Problem, RolloutGroup


def group(name: str, *rewards: float) -> RolloutGroup:
    completions = tuple(Completion((1,), (-0.1,), "", "stop", 0) for _ in rewards)
    return RolloutGroup(Problem(name, (), ""), (1,), completions, tuple(Grade(r, "correct") for r in rewards))


def source(*rounds: list[RolloutGroup]):  # type: ignore[no-untyped-def]
    asked: list[tuple[int, int]] = []

    def collect(index: int, count: int) -> list[RolloutGroup]:
        asked.append((index, count))
        return rounds[index][:count]

    return collect, asked


def test_a_mixed_batch_is_taken_as_it_is() -> None:
    collect, asked = source([group("a", 0, 1), group("b", 1, 0)])
    result = collect_mixed(collect, 2, 3)
    assert [g.problem.id for g in result.groups] == ["a", "b"]
    assert (result.sampled, result.unmixed, asked) == (2, 0, [(0, 2)])


def test_equal_groups_are_replaced() -> None:
    rounds = [
        [group("a", 1, 1), group("b", 0, 1), group("c", 0, 0)],
        [group("d", 0, 0), group("e", 1, 0)],
        [group("f", 0, 1)],
    ]
    collect, asked = source(*rounds)
    result = collect_mixed(collect, 3, 5)
    assert [g.problem.id for g in result.groups] == ["b", "e", "f"]
    assert (result.sampled, result.unmixed, asked) == (6, 0, [(0, 3), (1, 2), (2, 1)])


def test_the_cap_keeps_the_batch_full() -> None:
    collect, asked = source([group("a", 1, 1), group("b", 0, 1)], [group("c", 0, 0)])
    result = collect_mixed(collect, 2, 1)
    assert [g.problem.id for g in result.groups] == ["b", "a"]
    assert (result.sampled, result.unmixed, asked) == (3, 1, [(0, 2), (1, 1)])
