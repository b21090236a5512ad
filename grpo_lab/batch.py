"""The graded groups of one step: its problems, its seeds, what dynamic sampling and age did. A pure function of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_lab.rollout.dynamic import collect_mixed
from grpo_lab.rollout.overage import collect_young
from grpo_lab.seeding import derive_seed
from grpo_lab.tasks import problems_for_step
from grpo_lab.types import RolloutGroup

if TYPE_CHECKING:
    from grpo_lab.assemble import Parts

StepGroups = tuple[list[RolloutGroup], dict[str, float]]


def collect_step(parts: Parts, step: int) -> StepGroups:
    """The groups of the step after `step` finished ones, and counts of what was sampled and not used.

    No completion is of weights before version `step` - max_staleness. May be called from another thread than the learner's.
    """
    config, used, dropped = parts.config, set[str](), 0
    oldest = step - config.rollout.max_staleness

    def collect(index: int, count: int) -> list[RolloutGroup]:
        nonlocal dropped
        seed = derive_seed(config.seed, "regenerate", index) if index else config.seed
        stream = problems_for_step(parts.task.train, seed, step, config.prompts_per_step)  # pure in (seed, step)
        problems = [problem for problem in stream if index == 0 or problem.id not in used][:count]
        used.update(problem.id for problem in problems)
        if not problems:  # every problem of the data is in the batch
            return []
        purpose = ("rollout", step, index) if index else ("rollout", step)
        sample = lambda chosen: parts.collector.collect(chosen, config.group_size, parts.sampling, purpose)  # noqa: E731
        groups, late = collect_young(sample, problems, oldest)
        dropped += late
        return groups

    if not parts.objective.dynamic_sampling:
        groups = collect(0, config.prompts_per_step)
        return groups, {"rollouts/overage_groups": float(dropped)}
    mixed = collect_mixed(collect, config.prompts_per_step, config.objective.max_regenerations)
    sampled = float(mixed.sampled * config.group_size)
    counts = {"rollouts/sampled": sampled, "rollouts/unmixed_groups": float(mixed.unmixed)}
    return mixed.groups, {"rollouts/overage_groups": float(dropped), **counts}
