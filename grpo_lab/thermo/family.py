"""The Gibbs policies of a temperature from finitely many reference samples, whatever values the reward takes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class GibbsPolicies:
    """One Gibbs policy a problem, [N] each: E[r], KL to the reference in nats, heat capacity Var(r) / beta^2."""

    reward: Array
    kl: Array
    heat_capacity: Array


def gibbs_policies(rewards: Array, beta: float) -> GibbsPolicies:
    """The tilt pi* ~ pi_ref e^{r / beta} of each problem's reference samples [N, K].

    A problem's samples are joined by one more, of weight 1, spread over the samples of all problems: so what K samples never
    showed can still be learned, and without tilt the rewards average to the measured mean. For rewards of 0 and 1 these are
    the closed forms of binary.py at the rates (k + p) / (K + 1), p the mean over problems.
    """
    samples = rewards.shape[1]
    top = float(rewards.max())  # e^{(r - top) / beta} cannot overflow
    weights = np.exp((rewards - top) / beta)

    def moment(values: Array) -> Array:
        """sum_i w_i v_i over a problem's samples, and the mean over all samples for the one that joins them; [N]."""
        return (weights * values).sum(axis=1) + (weights * values).mean()

    total = moment(np.ones_like(rewards))
    reward = moment(rewards) / total
    log_z = np.log(total / (samples + 1)) + top / beta
    variance = moment(rewards**2) / total - reward**2
    return GibbsPolicies(
        reward=reward,
        kl=np.maximum(reward / beta - log_z, 0.0),
        heat_capacity=np.maximum(variance, 0.0) / beta**2,
    )
