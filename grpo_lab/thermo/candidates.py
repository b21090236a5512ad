"""The floor on a set of candidate completions: their weights define a small reference on which everything is exact."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from grpo_lab.thermo.gap import categorical_kl, discrete_gibbs

Array = NDArray[np.float64]
Weighting = Literal["full_sequence", "length_normalised", "mc"]


@dataclass(frozen=True)
class CandidateFloor:
    """The Gibbs quantities of one prompt's candidates, `weights` and `gibbs` [K] each.

    Floor and rewards are in units of reward, the KL in nats. `ess` = 1 / sum w^2: how many candidates the weights use.
    """

    weights: Array
    gibbs: Array
    floor: float
    reference_reward: float
    gibbs_reward: float
    gibbs_kl: float
    heat_capacity: float
    ess: float


def candidate_weights(logprobs: Array, lengths: Array, weighting: Weighting) -> Array:
    """Normalised weights of candidates [K]: softmax of log pi_ref, of log pi_ref / length, or uniform (`mc`).

    Only `mc` with candidates drawn at temperature 1 estimates the reference's own floor; the others weight twice.
    """
    if weighting == "mc":
        return np.full(len(logprobs), 1 / len(logprobs))
    scores = logprobs / lengths if weighting == "length_normalised" else logprobs
    return np.exp(scores - np.logaddexp.reduce(scores))


def merge_duplicates(weights: Array, rewards: Array, sequences: Sequence[Hashable]) -> tuple[Array, Array]:
    """Weights and rewards [K] with equal `sequences` made one, their weights added: both [distinct], first seen first.

    The floor stays as it was; `ess` then counts distinct sequences.
    """
    first: dict[Hashable, int] = {}
    places = np.array([first.setdefault(sequence, len(first)) for sequence in sequences])
    merged_weights, merged_rewards = np.zeros(len(first)), np.zeros(len(first))
    np.add.at(merged_weights, places, weights)
    merged_rewards[places] = rewards
    assert (merged_rewards[places] == rewards).all(), "equal sequences have different rewards"
    return merged_weights, merged_rewards


def candidate_floor(weights: Array, rewards: Array, beta: float) -> CandidateFloor:
    """Z = sum_j w_j e^{r_j / beta} and what follows from it, for weights and rewards [K]."""
    gibbs, floor = discrete_gibbs(weights, rewards, beta)
    mean = float((gibbs * rewards).sum())
    return CandidateFloor(
        weights=weights,
        gibbs=gibbs,
        floor=floor,
        reference_reward=float((weights * rewards).sum()),
        gibbs_reward=mean,
        gibbs_kl=categorical_kl(gibbs, weights),
        heat_capacity=float((gibbs * (rewards - mean) ** 2).sum() / beta**2),
        ess=float(1 / (weights**2).sum()),
    )
