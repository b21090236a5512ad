"""The Gibbs floor from finitely many samples: a bracket in mean from the reference's, a point from the policy's own."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grpo_lab.thermo.statistics import Estimate, clustered

Array = NDArray[np.float64]


@dataclass(frozen=True)
class FloorBracket:
    """E[lower] <= F* <= E[upper] over the draw of the reference samples, both in units of reward.

    `no_success` is the share of prompts without a single positive reward, where the bracket is widest.
    """

    lower: Estimate
    upper: Estimate
    no_success: float


@dataclass(frozen=True)
class PolicyFloor:
    """F* from the policy's own samples (too high in mean, by Jensen) and `ess`, their mean effective number per prompt.

    (sum w)^2 / sum w^2 with w = e^{R / beta}: K at the Gibbs policy, 1 where one sample rules.
    """

    floor: Estimate
    ess: float


def plug_in(rewards: Array, beta: float) -> Array:
    """-beta log mean_i e^{r_i / beta} per prompt, [N, K] -> [N]. By Jensen its mean is at or above F*."""
    return -beta * _log_mean_exp(rewards / beta)


def u_statistic(rewards: Array, beta: float, largest: float) -> Array:
    """A lower bound in mean on F* per prompt, [N, K] -> [N]; `largest` is the greatest possible reward.

    -beta L with L = r_max / beta - sum_{n=1}^K e_n(w) / (n C(K, n)), w_i = 1 - e^{(r_i - r_max) / beta}: the series
    of log Z = r_max / beta + log(1 - E[w]), each power of E[w] estimated without bias by a U-statistic (Hoeffding).
    """
    assert (rewards <= largest).all(), "a reward exceeds the greatest possible one"
    weights = -np.expm1((rewards - largest) / beta)
    means = _mean_products(weights)
    orders = np.arange(1, rewards.shape[1] + 1)
    return -largest + beta * (means / orders).sum(axis=1)


def bracket(rewards: Array, beta: float, largest: float = 1.0) -> FloorBracket:
    """The floor bracket of reference rewards [N, K], averaged over prompts with clustered errors."""
    return FloorBracket(
        lower=clustered(u_statistic(rewards, beta, largest)),
        upper=clustered(plug_in(rewards, beta)),
        no_success=float((rewards.max(axis=1) <= 0).mean()),
    )


def policy_side(rewards: Array, log_ratios: Array, beta: float) -> PolicyFloor:
    """-beta log mean e^{R / beta}, R = r - beta l, per prompt from the policy's samples [N, K], then averaged.

    An independent route to F*, since Z = E_pi[e^{R / beta}] (Jarzynski 1997 in form); no variance at the Gibbs policy.
    """
    exponents = rewards / beta - log_ratios
    ess = np.exp(2 * _log_mean_exp(exponents) - _log_mean_exp(2 * exponents)) * rewards.shape[1]
    return PolicyFloor(clustered(-beta * _log_mean_exp(exponents)), float(ess.mean()))


def until_first_success(draws: int, beta: float) -> float:
    """F* of one prompt, exactly unbiased, from the number of reference draws up to and with the first success.

    -beta L with L = 1 / beta - sum_{n < draws} c^n / n, c = 1 - e^{-1/beta} (inverse binomial sampling).
    """
    assert draws >= 1, "the first success takes at least one draw"
    orders = np.arange(1, draws)
    return float(-1 + beta * ((-np.expm1(-1 / beta)) ** orders / orders).sum())


def _mean_products(weights: Array) -> Array:
    """e_n(w) / C(K, n) for n = 1..K, [N, K] -> [N, K]: means of products over all n-subsets, by a stable recurrence.

    With i weights seen, m_n <- m_n (i - n) / i + w m_{n-1} n / i: a convex combination, so nothing overflows.
    """
    prompts, samples = weights.shape
    means = np.zeros((prompts, samples + 1))
    means[:, 0] = 1.0
    orders = np.arange(1, samples + 1)
    for seen in range(1, samples + 1):
        stay = np.clip((seen - orders) / seen, 0, 1)
        enter = np.where(orders <= seen, orders / seen, 0.0)
        means[:, 1:] = means[:, 1:] * stay + weights[:, seen - 1 : seen] * means[:, :-1] * enter
    return means[:, 1:]


def _log_mean_exp(values: Array) -> Array:
    top = values.max(axis=1, keepdims=True)
    return (top + np.log(np.exp(values - top).mean(axis=1, keepdims=True)))[:, 0]
