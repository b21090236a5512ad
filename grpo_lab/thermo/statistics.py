"""Means and errors of samples that come in prompts: prompts are the independent units, not samples."""

from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error, in the quantity's own unit."""

    mean: float
    se: float

    def __str__(self) -> str:
        return f"{round(self.mean, 3) + 0.0:.3f} +- {self.se:.3f}"  # no negative zero


def clustered(values: Array) -> Estimate:
    """Mean over prompts and its standard error for new prompts, of [N] prompt values or [N, K] samples.

    se = sqrt(sum_x (m_x - m)^2 / (N - 1) / N) with prompt means m_x; nan for N = 1 (Miller 2411.00640, clustered).
    """
    means = values.mean(axis=1) if values.ndim == 2 else values
    spread = means.std(ddof=1) if len(means) > 1 else np.nan
    return Estimate(float(means.mean()), float(spread / np.sqrt(len(means))))


def bootstrap_interval(values: Array, level: float = 0.95, draws: int = 2000, seed: int = 0) -> tuple[float, float]:
    """Percentile interval of the mean over prompts, of [N] prompt values or [N, K] samples: prompts are drawn again.

    The same values give the same interval: the draws come from `seed`. Source: Efron & Tibshirani 1993, ch. 13.
    """
    means = values.mean(axis=1) if values.ndim == 2 else values
    chosen = np.random.default_rng(seed).integers(len(means), size=(draws, len(means)))
    low, high = np.quantile(means[chosen].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def fixed_prompts_se(samples: Array) -> float:
    """Standard error of the mean of [N, K] samples, K >= 2, when the prompts are fixed: sqrt(sum_x s_x^2 / K) / N."""
    prompts, count = samples.shape
    return float(np.sqrt((samples.var(axis=1, ddof=1) / count).sum()) / prompts)


def paired_difference(first: Array, second: Array) -> Estimate:
    """first - second per prompt, then clustered. Both are [N] or [N, K] over the same prompts in the same order."""
    per_prompt = [values.mean(axis=1) if values.ndim == 2 else values for values in (first, second)]
    return clustered(per_prompt[0] - per_prompt[1])


def pass_at(successes: Array, samples: int, k: int) -> float:
    """Unbiased pass@k, averaged over prompts with c of n successes: mean of 1 - C(n - c, k) / C(n, k), 1 <= k <= n.

    Chen et al. 2107.03374, equation 1.
    """
    assert 1 <= k <= samples, f"pass@{k} needs at least {k} samples a prompt, here {samples}"
    return float(np.mean([1 - comb(samples - int(c), k) / comb(samples, k) for c in successes]))
