"""The Gibbs policies from samples: closed forms for rewards of 0 and 1, sums over every sample in plain Python for others."""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest

from grpo_lab.evaluation.landscape import landscape
from grpo_lab.thermo import binary
from grpo_lab.thermo.family import gibbs_policies


@pytest.mark.parametrize("beta", [0.005, 0.05, 0.3, 1.0, 20.0])
def test_binary_rewards_give_the_closed_forms(beta: float) -> None:
    """At (k + p) / (K + 1), unsolved and always solved problems among them."""
    rng = np.random.default_rng(0)
    rewards = (rng.random((9, 12)) < np.linspace(0, 1, 9)[:, None]).astype(np.float64)
    rates = (rewards.sum(axis=1) + rewards.mean()) / 13
    found = gibbs_policies(rewards, beta)
    np.testing.assert_allclose(found.reward, binary.gibbs_success(rates, beta), rtol=1e-12)
    np.testing.assert_allclose(found.kl, binary.gibbs_kl(rates, beta), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found.heat_capacity, binary.heat_capacity(rates, beta), rtol=1e-9, atol=1e-15 / beta**2)


@pytest.mark.parametrize("beta", [0.02, 0.4, 3.0])
def test_graded_rewards_by_summing_over_every_sample(beta: float) -> None:
    rewards = np.random.default_rng(1).choice([-1.0, 0.0, 0.3, 0.75, 2.0], size=(5, 7))
    found = gibbs_policies(rewards, beta)
    pool = [(float(r), 1 / (8 * 35)) for r in rewards.ravel()]
    for row, problem in enumerate(rewards):
        reference = [(float(r), 1 / 8) for r in problem] + pool
        z = sum(share * exp(r / beta) for r, share in reference)
        gibbs = [(r, share, share * exp(r / beta) / z) for r, share in reference]
        mean = sum(q * r for r, _, q in gibbs)
        assert found.reward[row] == pytest.approx(mean, rel=1e-12, abs=1e-13)
        assert found.kl[row] == pytest.approx(sum(q * log(q / share) for _, share, q in gibbs), rel=1e-10, abs=1e-13)
        variance = sum(q * (r - mean) ** 2 for r, _, q in gibbs)
        assert found.heat_capacity[row] == pytest.approx(variance / beta**2, rel=1e-9, abs=1e-14 / beta**2)


def test_reward_rises_by_beta_for_each_nat_along_the_family() -> None:
    """dE*/dKL* = beta and dE*/dbeta = -heat capacity, for graded rewards too."""
    rewards, beta, step = np.random.default_rng(2).random((6, 16)), 0.3, 1e-5
    low, at, high = (gibbs_policies(rewards, b) for b in (beta - step, beta, beta + step))
    rise = high.reward - low.reward
    np.testing.assert_allclose(rise / (high.kl - low.kl), beta, rtol=1e-5)
    np.testing.assert_allclose(rise / (2 * step), -at.heat_capacity, rtol=1e-6)


def test_the_landscape_of_graded_rewards_lies_between_what_was_measured_and_the_best() -> None:
    rewards = np.random.default_rng(3).choice([0.0, 0.5, 2.0], size=(8, 16))
    found = landscape(rewards, np.array([1e-3, 0.1, 1e6]), largest=2.0)
    assert found.reward[-1] == pytest.approx(rewards.mean(), abs=1e-5) and found.reward[0] == pytest.approx(2.0)
    assert found.kl[0] > found.kl[1] > found.kl[2] == pytest.approx(0, abs=1e-9)
    assert all(low <= high for low, high in zip(found.floor_lower, found.floor_upper, strict=True))
    with pytest.raises(AssertionError, match="greatest possible"):
        landscape(rewards, largest=1.0)
