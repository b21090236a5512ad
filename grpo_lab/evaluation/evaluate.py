"""Groups sampled from a policy -> its free-energy numbers. Every mean is over prompts, every error clustered by prompt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_lab.errors import RunError
from grpo_lab.evaluation.bank import ReferenceBank
from grpo_lab.evaluation.landscape import Landscape, landscape
from grpo_lab.learner.collate import collate
from grpo_lab.learner.learner import Learner
from grpo_lab.thermo.floor import FloorBracket, PolicyFloor, bracket, policy_side
from grpo_lab.thermo.gap import GapSplit, IdentityCheck, gap_from_returns, identity_check, smoothed, split_gap
from grpo_lab.thermo.statistics import Estimate, bootstrap_interval, clustered, paired_difference, pass_at
from grpo_lab.types import Problem, RolloutGroup

Array = NDArray[np.float64]


@dataclass(frozen=True)
class PerProblem:
    """Means over the samples of each problem, in the order of `ids`: what two evaluations are compared by, pair by pair.

    `kl` is k1, as F takes it; evaluations of equal `digest` asked the same problems.
    """

    digest: str
    ids: list[str]
    reward: list[float]
    kl: list[float]
    kl_rao_blackwell: list[float]
    reference_reward: list[float]


@dataclass(frozen=True)
class Evaluation:
    """One policy on the held-out problems. KL is per sequence in nats; `kl` is k1, `kl_rao_blackwell` sums the vocabulary.

    `against_reference` is F - F_ref, paired by problem; `free_energy_interval` is a 95 % bootstrap over problems. `landscape`
    is the floor and the Gibbs policies over temperatures. `gap_split` is None unless the reward is binary, `identity` where no
    problem has different rewards.
    """

    rollouts: int
    beta: float
    problems: int
    samples: int
    reward: Estimate
    kl: Estimate
    kl_rao_blackwell: Estimate
    free_energy: Estimate
    free_energy_interval: tuple[float, float]
    reference_reward: Estimate
    against_reference: Estimate
    floor: FloorBracket
    policy_floor: PolicyFloor
    gap_split: GapSplit | None
    gap_from_returns: float
    identity: IdentityCheck | None
    landscape: Landscape
    pass_at: dict[str, float]
    truncated: float
    unparsable: float
    entropy: float
    length: float
    per_problem: PerProblem

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
    learner: Learner,
    groups: Sequence[RolloutGroup],
    bank: ReferenceBank,
    beta: float,
    rollouts: int,
    largest_reward: float = 1.0,
) -> Evaluation:
    """The evaluation of the learner's policy from `groups` it sampled, against the bank of the same problems.

    `largest_reward` is the most the task pays; the lower end of the floor bracket is a bound for rewards up to it.
    """
    tokens = collate(groups)
    shape = (len(groups), tokens.group_size)
    statistics = learner.statistics(tokens)
    rewards = tokens.rewards.double().numpy().reshape(shape)
    log_ratios = (statistics.logprobs - statistics.ref_logprobs).double().sum(dim=1).numpy().reshape(shape)
    full_kl = statistics.full_kl.double().sum(dim=1).numpy().reshape(shape)
    reference = np.asarray(bank.rewards, dtype=np.float64)
    refuse_above(largest_reward, rewards, reference)
    binary = bool(np.isin(rewards, (0.0, 1.0)).all() and np.isin(reference, (0.0, 1.0)).all())
    grades = [grade for group in groups for grade in group.grades]
    solved = np.array([grade.outcome == "correct" for grade in grades]).reshape(shape).sum(axis=1)
    free_energies = beta * log_ratios - rewards
    return Evaluation(
        rollouts=rollouts,
        beta=beta,
        problems=shape[0],
        samples=shape[1],
        reward=clustered(rewards),
        kl=clustered(log_ratios),
        kl_rao_blackwell=clustered(full_kl),
        free_energy=clustered(free_energies),
        free_energy_interval=bootstrap_interval(free_energies),
        reference_reward=clustered(reference),
        against_reference=paired_difference(free_energies, -reference),
        floor=bracket(reference, beta, largest=largest_reward),
        policy_floor=policy_side(rewards, log_ratios, beta),
        gap_split=_gap_split(rewards, reference, full_kl, beta) if binary else None,
        gap_from_returns=gap_from_returns(rewards, log_ratios, beta),
        identity=identity_check(rewards, log_ratios, beta),
        landscape=landscape(reference, largest=largest_reward),
        pass_at={str(k): pass_at(solved, shape[1], k) for k in _powers_of_two(shape[1])},
        truncated=sum(grade.outcome == "truncated" for grade in grades) / len(grades),
        unparsable=sum(grade.outcome == "unparsable" for grade in grades) / len(grades),
        entropy=float(statistics.entropy.sum() / tokens.completion_mask.sum()),
        length=float(tokens.completion_mask.sum() / tokens.num_sequences),
        per_problem=PerProblem(
            problems_digest([group.problem for group in groups]),
            [group.problem.id for group in groups],
            *(values.mean(axis=1).tolist() for values in (rewards, log_ratios, full_kl, reference)),
        ),
    )


def refuse_above(largest: float, *rewards: Array) -> None:
    """RunError where a reward is greater than the task said that it could be."""
    top = max(float(each.max()) for each in rewards)
    if top > largest:
        raise RunError(
            f"a reward of {top:g} is more than the task's largest_reward={largest:g}, for which the floor is computed: give "
            "the task class an attribute largest_reward with the most it can pay"
        )


def problems_digest(problems: Sequence[Problem]) -> str:
    """sha256 over the problems: ids, messages and answers, in their order."""
    asked = [[problem.id, problem.messages, problem.answer] for problem in problems]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def _powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    return sorted({*(2**n for n in range(most.bit_length()) if 2**n <= most), most})


def _gap_split(rewards: Array, reference: Array, kl: Array, beta: float) -> GapSplit:
    p = smoothed(reference.sum(axis=1), reference.shape[1])
    return split_gap(rewards.mean(axis=1), p, kl.mean(axis=1), beta)
