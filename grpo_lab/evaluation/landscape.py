"""What the bank says of every temperature at once: floor, Gibbs policies, heat capacity, for a binary reward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grpo_lab.thermo.binary import frontier, heat_capacity
from grpo_lab.thermo.floor import plug_in, u_statistic

Array = NDArray[np.float64]
BETAS = np.geomspace(0.005, 20, 120)


@dataclass(frozen=True)
class Landscape:
    """By temperature `beta` [M]: the floor's bracket, and reward, KL (nats) and heat capacity of the Gibbs policies.

    The Gibbs policies are those of each problem's success rate (k + p) / (K + 1), with p the mean over problems: the frontier
    starts at the measured reference, and a problem that K samples never solved can still be learned.
    """

    beta: list[float]
    floor_lower: list[float]
    floor_upper: list[float]
    reward: list[float]
    kl: list[float]
    heat_capacity: list[float]


def landscape(rewards: Array, betas: Array = BETAS) -> Landscape:
    """The landscape of reference rewards [N, K] in {0, 1}, averaged over problems."""
    p = (rewards.sum(axis=1) + rewards.mean()) / (rewards.shape[1] + 1)
    kl, reward = frontier(p, betas)
    means = lambda values: [float(np.mean(value)) for value in values]  # noqa: E731
    return Landscape(
        beta=betas.tolist(),
        floor_lower=means(u_statistic(rewards, beta, 1.0) for beta in betas),
        floor_upper=means(plug_in(rewards, beta) for beta in betas),
        reward=reward.tolist(),
        kl=kl.tolist(),
        heat_capacity=means(heat_capacity(p, beta) for beta in betas),
    )
