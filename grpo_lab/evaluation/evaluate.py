"""Groups sampled from a policy -> its free-energy numbers. Every mean is over prompts, every error clustered by prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_lab.evaluation.bank import ReferenceBank
from grpo_lab.learner.collate import collate
from grpo_lab.learner.learner import Learner
from grpo_lab.thermo.binary import frontier
from grpo_lab.thermo.floor import FloorBracket, PolicyFloor, bracket, policy_side
from grpo_lab.thermo.gap import GapSplit, gap_from_returns, smoothed, split_gap
from grpo_lab.thermo.statistics import Estimate, clustered, paired_difference, pass_at
from grpo_lab.types import RolloutGroup

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Evaluation:
    """One policy on the held-out problems. KL is per sequence in nats; `kl` is k1, `kl_rao_blackwell` sums the vocabulary.

    `against_reference` is F - F_ref, paired by problem. `frontier` lists KL and reward of the Gibbs policies.
    `gap_split` is None unless the reward is binary.
    """

    rollouts: int
    beta: float
    problems: int
    samples: int
    reward: Estimate
    kl: Estimate
    kl_rao_blackwell: Estimate
    free_energy: Estimate
    reference_reward: Estimate
    against_reference: Estimate
    floor: FloorBracket
    policy_floor: PolicyFloor
    gap_split: GapSplit | None
    gap_from_returns: float
    frontier: dict[str, list[float]]
    pass_at_samples: float
    truncated: float
    unparsable: float
    entropy: float
    length: float

    def to_json(self) -> dict[str, Any]:
        """Plain nested numbers."""
        return asdict(self)

    def flat(self) -> dict[str, float]:
        """The numbers a tracker plots, by their logged names."""
        return {
            "eval/reward": self.reward.mean,
            "eval/kl": self.kl.mean,
            "eval/free_energy": self.free_energy.mean,
            "eval/free_energy_se": self.free_energy.se,
            "eval/floor_lower": self.floor.lower.mean,
            "eval/floor_upper": self.floor.upper.mean,
        }


def measure(
    learner: Learner, groups: Sequence[RolloutGroup], bank: ReferenceBank, beta: float, rollouts: int
) -> Evaluation:
    """The evaluation of the learner's policy from `groups` it sampled, against the bank of the same problems."""
    tokens = collate(groups)
    shape = (len(groups), tokens.group_size)
    statistics = learner.statistics(tokens)
    rewards = tokens.rewards.double().numpy().reshape(shape)
    log_ratios = (statistics.logprobs - statistics.ref_logprobs).double().sum(dim=1).numpy().reshape(shape)
    full_kl = statistics.full_kl.double().sum(dim=1).numpy().reshape(shape)
    reference = np.asarray(bank.rewards, dtype=np.float64)
    grades = [grade for group in groups for grade in group.grades]
    return Evaluation(
        rollouts=rollouts,
        beta=beta,
        problems=shape[0],
        samples=shape[1],
        reward=clustered(rewards),
        kl=clustered(log_ratios),
        kl_rao_blackwell=clustered(full_kl),
        free_energy=clustered(beta * log_ratios - rewards),
        reference_reward=clustered(reference),
        against_reference=paired_difference(beta * log_ratios - rewards, -reference),
        floor=bracket(reference, beta, largest=_largest_reward(rewards, reference)),
        policy_floor=policy_side(rewards, log_ratios, beta),
        gap_split=_gap_split(rewards, reference, full_kl, beta),
        gap_from_returns=gap_from_returns(rewards, log_ratios, beta),
        frontier=_frontier(reference),
        pass_at_samples=pass_at((rewards > 0).sum(axis=1), shape[1], shape[1]),
        truncated=sum(grade.outcome == "truncated" for grade in grades) / len(grades),
        unparsable=sum(grade.outcome == "unparsable" for grade in grades) / len(grades),
        entropy=float(statistics.entropy.sum() / tokens.completion_mask.sum()),
        length=float(tokens.completion_mask.sum() / tokens.num_sequences),
    )


def _frontier(reference: Array) -> dict[str, list[float]]:
    """KL and reward of the Gibbs policies from cold to hot, on smoothed success rates of the bank."""
    p = smoothed((reference > 0).sum(axis=1), reference.shape[1])
    kl, reward = frontier(p, np.geomspace(0.02, 20, 80))
    return {"kl": kl.tolist(), "reward": reward.tolist()}


def _is_binary(*rewards: Array) -> bool:
    return all(np.isin(values, (0.0, 1.0)).all() for values in rewards)


def _largest_reward(*rewards: Array) -> float:
    """1 for binary rewards; otherwise the greatest seen, since a task may pay more."""
    return 1.0 if _is_binary(*rewards) else max(1.0, *(float(values.max()) for values in rewards))


def _gap_split(rewards: Array, reference: Array, kl: Array, beta: float) -> GapSplit | None:
    if not _is_binary(rewards, reference):
        return None
    p = smoothed(reference.sum(axis=1), reference.shape[1])
    return split_gap(rewards.mean(axis=1), p, kl.mean(axis=1), beta)
