"""What the bank says of every temperature at once: floor, Gibbs policies, heat capacity."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grpo_lab.thermo.family import gibbs_policies
from grpo_lab.thermo.floor import plug_in, u_statistic

Array = NDArray[np.float64]
BETAS = np.geomspace(0.005, 20, 120)


@dataclass(frozen=True)
class Landscape:
    """By temperature `beta` [M]: the floor's bracket, and reward, KL (nats) and heat capacity of the Gibbs policies.

    All are means over problems. The frontier starts at the measured reference; see `gibbs_policies` for unsolved problems.
    """

    beta: list[float]
    floor_lower: list[float]
    floor_upper: list[float]
    reward: list[float]
    kl: list[float]
    heat_capacity: list[float]


def landscape(rewards: Array, betas: Array = BETAS, largest: float = 1.0) -> Landscape:
    """The landscape of reference rewards [N, K], none above `largest`, averaged over problems."""
    policies = [gibbs_policies(rewards, float(beta)) for beta in betas]
    return Landscape(
        beta=betas.tolist(),
        floor_lower=[float(u_statistic(rewards, float(beta), largest).mean()) for beta in betas],
        floor_upper=[float(plug_in(rewards, float(beta)).mean()) for beta in betas],
        reward=[float(one.reward.mean()) for one in policies],
        kl=[float(one.kl.mean()) for one in policies],
        heat_capacity=[float(one.heat_capacity.mean()) for one in policies],
    )
