"""The estimators of an evaluation on the enumerated model, where every expectation is a sum over 15 sequences."""

import math

import numpy as np
import pytest
import torch

from grpo_lab.evaluation.landscape import landscape
from grpo_lab.lab.toy import REFERENCE, REWARDS, gibbs_logits, measure, token_logprobs
from grpo_lab.thermo.binary import floor, gibbs_kl, gibbs_success
from grpo_lab.thermo.floor import plug_in, u_statistic
from grpo_lab.thermo.gap import gap_from_returns, identity_check
from grpo_lab.thermo.statistics import bootstrap_interval, clustered

BETA = 0.25


def drawn(logits: torch.Tensor, prompts: int, samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rewards and log-ratios [prompts, samples] of sequences drawn from the policy; every prompt is the same toy."""
    log_pi, log_ref = token_logprobs(logits).sum(1), token_logprobs(REFERENCE).sum(1)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.multinomial(log_pi.exp(), prompts * samples, replacement=True, generator=generator)
    shape = (prompts, samples)
    return REWARDS[chosen].numpy().reshape(shape), (log_pi - log_ref)[chosen].numpy().reshape(shape)


def test_estimators_are_right_in_mean() -> None:
    """E[r], KL (k1) and F of 200,000 draws lie within four errors of the enumerated values."""
    logits = REFERENCE + torch.linspace(-1, 1, REFERENCE.numel(), dtype=torch.float64).view_as(REFERENCE)
    exact = measure(logits, BETA)
    rewards, log_ratios = drawn(logits, 2000, 100, seed=1)
    for values, wanted in (
        (rewards, exact.reward),
        (log_ratios, exact.kl),
        (BETA * log_ratios - rewards, exact.free_energy),
    ):
        got = clustered(values)
        assert abs(got.mean - wanted) < 4 * got.se


@pytest.mark.parametrize("beta", [0.05, 0.25, 1.0])
@pytest.mark.parametrize("samples", [2, 8, 24])
def test_the_bracket_holds_in_mean_on_the_enumerated_model(beta: float, samples: int) -> None:
    """Summed over every number of successes: the U-statistic's mean is at or below F*, the plug-in's at or above it."""
    p = float((token_logprobs(REFERENCE).sum(1).exp() * REWARDS).sum())
    successes = np.arange(samples + 1)
    draws = (np.arange(samples) < successes[:, None]).astype(float)
    chance = np.array([math.comb(samples, k) * p**k * (1 - p) ** (samples - k) for k in successes])
    wanted = measure(REFERENCE, beta).floor
    assert chance @ u_statistic(draws, beta, 1.0) <= wanted + 1e-12
    assert chance @ plug_in(draws, beta) >= wanted - 1e-12


def test_identity_is_one_at_the_gibbs_policy_and_other_elsewhere() -> None:
    """beta l = r - beta log Z there, for every sequence; at the Gibbs policy of twice the beta the slope is one half."""
    rewards, log_ratios = drawn(gibbs_logits(BETA), 50, 8, seed=3)
    found = identity_check(rewards, log_ratios, BETA)
    assert found and found.slope == pytest.approx(1, abs=1e-10) and found.r_squared == pytest.approx(1, abs=1e-10)
    assert gap_from_returns(rewards, log_ratios, BETA) == pytest.approx(0, abs=1e-20)
    colder = identity_check(*drawn(gibbs_logits(2 * BETA), 50, 8, seed=4), BETA)
    assert colder and colder.slope == pytest.approx(0.5, abs=1e-10)


def test_identity_needs_different_rewards() -> None:
    assert identity_check(np.ones((3, 4)), np.random.default_rng(0).normal(size=(3, 4)), BETA) is None
    still = identity_check(np.array([[0.0, 1.0]]), np.zeros((1, 2)), BETA)
    assert still and (still.slope, still.r_squared, still.samples) == (0.0, 0.0, 2)


def test_bootstrap_interval_is_the_clustered_one_for_many_prompts() -> None:
    """For 400 prompts the percentile interval agrees with mean +- 1.96 se, and the same values give the same interval."""
    values = np.random.default_rng(5).normal(0.3, 1.0, size=(400, 4)) + np.random.default_rng(6).normal(size=(400, 1))
    estimate, interval = clustered(values), bootstrap_interval(values)
    assert interval == bootstrap_interval(values)
    for end, sign in zip(interval, (-1, 1), strict=True):
        assert end == pytest.approx(estimate.mean + sign * 1.96 * estimate.se, abs=0.1 * estimate.se)


def test_bootstrap_interval_covers() -> None:
    """At nominal 95 % it covers at least 93 % of 600 evaluations of 60 prompts that differ, 4 samples each."""
    rng, covered = np.random.default_rng(7), 0
    for _ in range(600):
        p = rng.beta(0.6, 1.12, size=(60, 1))
        low, high = bootstrap_interval((rng.random((60, 4)) < p).astype(float), draws=500)
        covered += low <= 0.6 / 1.72 <= high
    assert covered / 600 >= 0.93 - 2 * (0.05 * 0.95 / 600) ** 0.5


def test_landscape_is_the_closed_form_where_every_problem_has_one_rate() -> None:
    rewards = np.array([[1, 0, 0, 0], [0, 1, 0, 0]], dtype=float)
    got = landscape(rewards, np.array([0.05, 0.5]))
    for i, beta in enumerate((0.05, 0.5)):
        assert got.floor_upper[i] == pytest.approx(float(floor(0.25, beta)), abs=1e-12)
        assert got.floor_lower[i] <= got.floor_upper[i]
        assert got.reward[i] == pytest.approx(float(gibbs_success(0.25, beta)), abs=1e-12)
        assert got.kl[i] == pytest.approx(float(gibbs_kl(0.25, beta)), abs=1e-12)
    uneven = landscape(np.array([[1, 1, 0, 0], [0, 0, 0, 0]], dtype=float), np.array([1e6, 1e-3]))
    assert uneven.reward == pytest.approx([0.25, 1.0], abs=1e-5)  # from the measured mean to every problem solved
    hot = landscape(rewards, np.array([1e6]))
    assert hot.reward[0] == pytest.approx(0.25, abs=1e-5) and hot.kl[0] == pytest.approx(0, abs=1e-9)
