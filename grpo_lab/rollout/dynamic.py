"""Dynamic sampling: groups whose rewards are all equal are replaced by groups of other problems, within a cap."""

from collections.abc import Callable
from dataclasses import dataclass

from grpo_lab.types import RolloutGroup


@dataclass(frozen=True)
class MixedGroups:
    """The wanted number of groups. `sampled` counts all that were generated, `unmixed` those of `groups` kept anyway."""

    groups: list[RolloutGroup]
    sampled: int
    unmixed: int


def collect_mixed(collect: Callable[[int, int], list[RolloutGroup]], wanted: int, rounds: int) -> MixedGroups:
    """`wanted` groups, those with different rewards first come first served; `collect(round, count)` samples `count` groups.

    Round 0 samples the step's own problems, rounds 1 to `rounds` replacements for what is still missing. What the cap leaves
    unfilled is taken from the groups of equal rewards, oldest first: a batch is always full. Source: DAPO (Yu et al.
    2503.14476 sec. 3.2), whose refill has no cap.
    """
    mixed: list[RolloutGroup] = []
    equal: list[RolloutGroup] = []
    sampled = 0
    for index in range(rounds + 1):
        groups = collect(index, wanted - len(mixed))
        sampled += len(groups)
        for group in groups:
            (mixed if len(set(group.rewards)) > 1 else equal).append(group)
        if len(mixed) >= wanted:
            break
    missing = wanted - len(mixed)
    return MixedGroups(mixed + equal[:missing], sampled, missing)
