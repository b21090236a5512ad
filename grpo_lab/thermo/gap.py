"""The gap F - F* taken apart, and the identities it must obey."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grpo_lab.thermo.binary import bernoulli_kl, kl_to_gibbs

Array = NDArray[np.float64]


@dataclass(frozen=True)
class GapSplit:
    """F - F* = wasted + tilt for a binary reward, both in units of F (beta times nats), averaged over prompts.

    wasted = beta (KL - d(q || p)): KL spent on anything but the success rate.
    tilt = beta d(q || q*): the success rate itself being another than the Gibbs policy's.
    """

    wasted: float
    tilt: float

    @property
    def gap(self) -> float:
        return self.wasted + self.tilt


def split_gap(success: Array, reference_success: Array, kl: Array, beta: float) -> GapSplit:
    """The exact split from per-prompt q, p and KL (nats per sequence), [N] each; p must lie strictly inside (0, 1).

    Per prompt F - F* = (-q + beta KL) + beta log Z, an identity for every q, KL and beta.
    """
    assert ((reference_success > 0) & (reference_success < 1)).all(), "smooth success rates of 0 and 1 first"
    wasted = beta * (kl - bernoulli_kl(success, reference_success))
    tilt = beta * kl_to_gibbs(success, reference_success, beta)
    return GapSplit(float(wasted.mean()), float(tilt.mean()))


def smoothed(successes: Array, samples: int) -> Array:
    """(k + 1/2) / (K + 1): success rates kept inside (0, 1), as `split_gap` and frontiers need them."""
    return (successes + 0.5) / (samples + 1)


def gap_from_returns(rewards: Array, log_ratios: Array, beta: float) -> float:
    """Var(R) / (2 beta) within groups [N, K], R = r - beta l: the gap to second order, without any estimate of Z.

    `log_ratios` l are nats per sequence, K >= 2; the result, in units of F, is exact only as the policy nears Gibbs.
    """
    returns = rewards - beta * log_ratios
    return float(returns.var(axis=1, ddof=1).mean() / (2 * beta))


@dataclass(frozen=True)
class IdentityCheck:
    """The regression of beta l on r within prompts: slope 1 and r_squared 1 at the Gibbs policy, where beta l = r - beta log Z.

    A slope below 1 is a policy too near the reference for its rewards, above 1 one too far; `samples` took part.
    """

    slope: float
    r_squared: float
    samples: int


def identity_check(rewards: Array, log_ratios: Array, beta: float) -> IdentityCheck | None:
    """Least squares of beta l on r over samples [N, K], both centred by prompt; None where no prompt has different rewards.

    Source: the closed form behind DPO (Rafailov et al. 2305.18290, eq. 5) taken as a test.
    """
    mixed = rewards.max(axis=1) > rewards.min(axis=1)
    if not mixed.any():
        return None
    x = (rewards - rewards.mean(axis=1, keepdims=True))[mixed]
    y = beta * (log_ratios - log_ratios.mean(axis=1, keepdims=True))[mixed]
    slope = float((x * y).sum() / (x * x).sum())
    total = float((y * y).sum())
    return IdentityCheck(slope, slope**2 * float((x * x).sum()) / total if total > 0 else 0.0, int(x.size))


def discrete_gibbs(reference: Array, rewards: Array, beta: float) -> tuple[Array, float]:
    """The Gibbs policy pi* ~ pi_ref e^{r / beta} over an enumerated set, and F* = -beta log Z."""
    with np.errstate(divide="ignore"):
        logits = np.log(reference) + rewards / beta
    log_z = float(np.logaddexp.reduce(logits))
    return np.exp(logits - log_z), -beta * log_z


def free_energy(policy: Array, reference: Array, rewards: Array, beta: float) -> float:
    """F = -E[r] + beta KL(pi || pi_ref) over an enumerated set."""
    return float(-(policy * rewards).sum() + beta * categorical_kl(policy, reference))


def categorical_kl(first: Array, second: Array) -> float:
    """KL(first || second) of two distributions over an enumerated set, nats; 0 log 0 = 0."""
    kept = first > 0
    return float((first[kept] * np.log(first[kept] / second[kept])).sum())
