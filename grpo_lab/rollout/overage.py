"""Groups whose weights are older than a run allows are dropped and sampled again, so that none is ever trained on."""

from collections.abc import Callable, Sequence

from grpo_lab.errors import RunError
from grpo_lab.types import Problem, RolloutGroup

_ROUNDS = 3


def collect_young(
    collect: Callable[[Sequence[Problem]], list[RolloutGroup]], problems: Sequence[Problem], oldest: int
) -> tuple[list[RolloutGroup], int]:
    """A group for each problem, no completion of which is of a weight version before `oldest`; and how many were dropped.

    RunError when the sampler goes on answering with older weights.
    """
    groups, dropped = collect(problems), 0
    for _ in range(_ROUNDS):
        late = [index for index, group in enumerate(groups) if group.weight_version < oldest]
        if not late:
            return groups, dropped
        dropped += len(late)
        for index, group in zip(late, collect([problems[index] for index in late]), strict=True):
            groups[index] = group
    version = min(group.weight_version for group in groups)
    if version < oldest:
        raise RunError(
            f"the sampler goes on answering with weight version {version}, though {oldest} is the oldest allowed: a push was "
            "lost; check the rollout workers, then continue with --resume"
        )
    return groups, dropped
