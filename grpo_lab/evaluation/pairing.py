"""Two policies on the same problems: the difference per problem, its clustered error, a sign-flip test, Holm's correction.

Pure numpy on values by problem; knows nothing of runs and files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grpo_lab.thermo.statistics import Estimate, paired_difference

Array = NDArray[np.float64]
EXACT_UP_TO = 16  # problems that differ: all 2^16 signs are tried; beyond, random ones
DRAWS = 20_000


@dataclass(frozen=True)
class PairedTest:
    """first - second over the same problems. `difference.se` is clustered by problem, `t` their quotient (nan for 0 / 0).

    `p` is the two-sided sign-flip p-value, over all signs where `exact`; `problems` counts them, `differing` those that differ.
    """

    difference: Estimate
    t: float
    p: float
    exact: bool
    problems: int
    differing: int


def paired_test(first: Array, second: Array, draws: int = DRAWS, seed: int = 0) -> PairedTest:
    """Test that two policies are alike from [N] values by problem each, in the same order of problems.

    Null hypothesis: in every problem the two could change places. Under it every sign of every difference is as likely, so
    p is the share of signs whose |mean| reaches the observed one. Since sum d^2 is the same for every choice of signs, this
    is also the sign-flip test of t. Problems without a difference do not matter to p.
    """
    difference = paired_difference(first, second)
    values = first - second
    kept = values[values != 0]
    exact = len(kept) <= EXACT_UP_TO
    with np.errstate(divide="ignore", invalid="ignore"):
        t = float(np.divide(difference.mean, difference.se))
    p = sign_flip_exact(kept) if exact else sign_flip_random(kept, draws, seed)
    return PairedTest(difference, t, p, exact, len(values), len(kept))


def sign_flip_exact(values: Array) -> float:
    """Share of all 2^N sign choices s of `values` [N] with |sum s d| >= |sum d|; 1 for N = 0."""
    sums = np.zeros(1)
    for value in values[1:]:  # the first sign is free: the other half mirrors this one
        sums = np.concatenate([sums + value, sums - value])
    sums = sums + (values[0] if len(values) else 0.0)
    return float(_reaches(sums, values).mean())


def sign_flip_random(values: Array, draws: int, seed: int) -> float:
    """(1 + hits) / (1 + draws) over random signs: the observed choice counts too, so the test holds its level.

    Phipson & Smyth 2010.
    """
    generator = np.random.default_rng(seed)
    hits, left = 0, draws
    while left:
        rows = min(left, max(1, 4_000_000 // len(values)))
        signs = generator.integers(0, 2, size=(rows, len(values)), dtype=np.int8) * 2.0 - 1.0
        hits += int(_reaches(signs @ values, values).sum())
        left -= rows
    return (1 + hits) / (1 + draws)


def _reaches(sums: Array, values: Array) -> NDArray[np.bool_]:
    """|sums| >= |sum of values|, ties by rounding included."""
    return np.abs(sums) >= abs(float(values.sum())) - 1e-9 * float(np.abs(values).sum())


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the given order: the family-wise error holds under any dependence (Holm 1979)."""
    order = np.argsort(p_values, kind="stable")
    scaled = np.asarray(p_values, dtype=np.float64)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return [float(value) for value in adjusted]


def at_level(rewards: Array, kls: Array, level: float) -> Array | None:
    """E[r] where the mean KL of a path first reaches `level`, as [N] values by problem; None where it never does.

    `rewards` and `kls` are [T, N]: evaluations in order, by problem. Between two evaluations the path is a straight line.
    The mean of the result is the interpolated reward; its spread over problems also carries the error of the KL (delta
    method: r - (dE/dKL) (KL - level)), so that errors and differences of results may be clustered as any others.
    """
    means = kls.mean(axis=1)
    reached = np.flatnonzero(means >= level)
    if not len(reached):
        return None
    end = int(reached[0])
    if end == 0:
        return rewards[0]
    share = (level - means[end - 1]) / (means[end] - means[end - 1])
    slope = (rewards[end].mean() - rewards[end - 1].mean()) / (means[end] - means[end - 1])
    reward, kl = ((1 - share) * path[end - 1] + share * path[end] for path in (rewards, kls))
    return reward - slope * (kl - level)
