"""Free-energy maths against calculations that share no code with it: enumeration, subsets, series, exact decimals."""

from decimal import Decimal, getcontext
from itertools import combinations, product
from math import comb, exp, log, prod

import numpy as np
import pytest

from grpo_lab.thermo import candidates, floor, gap, statistics

getcontext().prec = 60
REFERENCE, LEVELS = np.array([0.6, 0.3, 0.1]), np.array([0.0, 0.5, 1.0])


@pytest.mark.parametrize("beta", [0.001, 0.01, 0.02, 0.03, 0.1, 1.0])
@pytest.mark.parametrize("q", [0.0, 0.6, 1.0])
def test_gap_split_sums_to_the_gap_at_every_beta(beta: float, q: float) -> None:
    """q* rounds to 1 below beta = 0.03; the split must not."""
    p, kl = 0.3, 2.5
    log_z = (1 - Decimal(p) + Decimal(p) * (1 / Decimal(beta)).exp()).ln()
    expected = -Decimal(q) + Decimal(beta) * Decimal(kl) + Decimal(beta) * log_z
    split = gap.split_gap(np.array([q]), np.array([p]), np.array([kl]), beta)
    assert split.gap == pytest.approx(float(expected), rel=1e-12)
    bernoulli = {0.0: -log(0.7), 0.6: 0.6 * log(2) + 0.4 * log(4 / 7), 1.0: -log(0.3)}[q]
    assert split.wasted == pytest.approx(beta * (2.5 - bernoulli), rel=1e-12)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_gap_split_refuses_success_rates_on_the_edge(p: float) -> None:
    with pytest.raises(AssertionError, match="smooth"):
        gap.split_gap(np.array([0.5]), np.array([p]), np.array([1.0]), 0.1)


@pytest.mark.parametrize("beta", [0.1, 0.4, 2.0])
def test_identity_12_on_random_policies(beta: float) -> None:
    """F - F* = beta KL(pi || pi*), with pi* and Z computed the naive way."""
    rng = np.random.default_rng(7)
    for _ in range(20):
        pi, ref, r = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6)), rng.random(6)
        tilted = [a * exp(b / beta) for a, b in zip(ref, r, strict=True)]
        z = sum(tilted)
        to_gibbs = sum(a * log(a * z / b) for a, b in zip(pi, tilted, strict=True))
        f_star = gap.discrete_gibbs(ref, r, beta)[1]
        assert f_star == pytest.approx(-beta * log(z), abs=1e-12)
        assert gap.free_energy(pi, ref, r, beta) - f_star == pytest.approx(beta * to_gibbs, abs=1e-12)


def test_u_statistic_by_summing_over_every_subset() -> None:
    rewards, beta, largest = [0.0, 0.25, 0.25, 1.0, 0.7], 0.3, 1.2
    w = [1 - exp((r - largest) / beta) for r in rewards]
    log_z = largest / beta
    for n in range(1, 6):
        log_z -= sum(prod(subset) for subset in combinations(w, n)) / comb(5, n) / n
    assert floor.u_statistic(np.array([rewards]), beta, largest)[0] == pytest.approx(-beta * log_z, rel=1e-12)


@pytest.mark.parametrize("k, samples", [(0, 512), (3, 512), (200, 512)])
def test_u_statistic_of_many_samples_in_exact_arithmetic(k: int, samples: int) -> None:
    """e_n of 512 weights spans hundreds of orders of magnitude; the recurrence must keep its digits."""
    beta = 0.05
    c = 1 - (-1 / Decimal(beta)).exp()
    terms = [c**n * comb(samples - k, n) / (n * Decimal(comb(samples, n))) for n in range(1, samples + 1)]
    expected = -1 + Decimal(beta) * sum(terms)
    rewards = np.array([[1.0] * k + [0.0] * (samples - k)])
    assert floor.u_statistic(rewards, beta, 1.0)[0] == pytest.approx(float(expected), rel=1e-11)


def test_u_statistic_refuses_a_reward_above_the_greatest() -> None:
    with pytest.raises(AssertionError, match="greatest"):
        floor.u_statistic(np.array([[2.0, 0.0]]), 0.1, 1.0)


@pytest.mark.parametrize("beta", [0.2, 0.5])
def test_bracket_of_three_levels_of_reward_over_all_draws(beta: float) -> None:
    """All 3^5 draws: the U-statistic misses by exactly the tail of the log series, the plug-in by Jensen."""
    draws = list(product(range(3), repeat=5))
    rewards = LEVELS[np.array(draws)]
    chance = np.array([prod(REFERENCE[i] for i in draw) for draw in draws])
    z = sum(a * exp(r / beta) for a, r in zip(REFERENCE, LEVELS, strict=True))
    mean_weight = 1 - z * exp(-1 / beta)
    tail = sum(mean_weight**n / n for n in range(6, 4000))
    assert chance @ floor.u_statistic(rewards, beta, 1.0) + beta * log(z) == pytest.approx(-beta * tail, rel=1e-9)
    assert chance @ floor.plug_in(rewards, beta) + beta * log(z) > 0.001


@pytest.mark.parametrize("p, plug_in_bias, u_bias", [
    (0.05, 0.094, -0.022), (0.348, 0.008, -4e-7), (0.02, 0.112, -0.081),
])  # fmt: skip
def test_bracket_means_of_many_prompts(p: float, plug_in_bias: float, u_bias: float) -> None:
    """`bracket` on drawn banks agrees with THEORY's expected biases within four of its own standard errors."""
    rewards = (np.random.default_rng(3).random((4000, 24)) < p).astype(float)
    result, f_star = floor.bracket(rewards, 0.2), -0.2 * log(1 - p + p * exp(5))
    assert abs(result.upper.mean - f_star - plug_in_bias) < 4 * result.upper.se + 5e-4
    assert abs(result.lower.mean - f_star - u_bias) < 4 * result.lower.se + 5e-4
    assert result.no_success == pytest.approx((1 - p) ** 24, abs=0.03)


@pytest.mark.parametrize("p, beta", [(0.3, 0.1), (0.05, 0.5)])
def test_first_success_is_unbiased(p: float, beta: float) -> None:
    expected = sum(p * (1 - p) ** (n - 1) * floor.until_first_success(n, beta) for n in range(1, 900))
    assert expected == pytest.approx(-beta * log(1 - p + p * exp(1 / beta)), abs=1e-9)


def test_policy_side_weights_average_to_z_over_all_draws() -> None:
    """E_pi[e^{-F / beta}] = Z over all pairs of draws; the floor is too high in mean, and ess is Kish's number."""
    pi, beta = np.array([0.2, 0.5, 0.3]), 0.4
    pairs = np.array(list(product(range(3), repeat=2)))
    chance, ratios = pi[pairs].prod(axis=1), np.log(pi / REFERENCE)[pairs]
    each = [floor.policy_side(LEVELS[i][None], r[None], beta) for i, r in zip(pairs, ratios, strict=True)]
    floors = np.array([side.floor.mean for side in each])
    z = sum(a * exp(r / beta) for a, r in zip(REFERENCE, LEVELS, strict=True))
    assert chance @ np.exp(-floors / beta) == pytest.approx(z, rel=1e-12)
    assert chance @ floors > -beta * log(z) + 0.001
    w = [0.6 / 0.2, 0.1 / 0.3 * exp(1 / beta)]
    side = floor.policy_side(LEVELS[[0, 2]][None], np.log(pi / REFERENCE)[[0, 2]][None], beta)
    assert side.ess == pytest.approx(sum(w) ** 2 / sum(x * x for x in w), rel=1e-12)


@pytest.mark.parametrize("part, within", [(0.9, 0.06), (0.97, 0.02), (0.999, 0.001)])
def test_gap_from_returns_tends_to_the_gap_near_gibbs(part: float, within: float) -> None:
    """A bank that holds each state in proportion to pi, so that within-group moments are those of pi."""
    beta = 0.25
    tilted = REFERENCE * np.exp(LEVELS / beta)
    gibbs = tilted / tilted.sum()
    pi = REFERENCE ** (1 - part) * gibbs**part
    pi /= pi.sum()
    counts = np.round(pi * 200_000).astype(int)
    rewards, ratios = np.repeat(LEVELS, counts)[None], np.repeat(np.log(pi / REFERENCE), counts)[None]
    exact = beta * sum(a * log(a / b) for a, b in zip(pi, gibbs, strict=True))
    assert gap.gap_from_returns(rewards, ratios, beta) / exact == pytest.approx(1, abs=within)


def test_merged_duplicates_keep_the_floor_and_count_once() -> None:
    weights, rewards = np.array([0.25, 0.25, 0.25, 0.25]), np.array([1.0, 0.0, 1.0, 0.0])
    merged, kept = candidates.merge_duplicates(weights, rewards, ["a", "b", "a", "c"])
    assert (merged.tolist(), kept.tolist()) == ([0.5, 0.25, 0.25], [1, 0, 0])
    result = candidates.candidate_floor(merged, kept, 0.3)
    assert result.floor == pytest.approx(-0.3 * log(0.5 + 0.5 * exp(1 / 0.3)), rel=1e-12)
    assert result.ess == pytest.approx(1 / (0.25 + 2 / 16))


def test_merged_duplicates_must_agree_on_the_reward() -> None:
    with pytest.raises(AssertionError, match="different rewards"):
        candidates.merge_duplicates(np.array([0.5, 0.5]), np.array([1.0, 0.0]), ["a", "a"])


def test_uniform_weights_are_the_plug_in_floor() -> None:
    """3 right of 4, by hand: -beta log(1/4 + 3/4 e^{1/beta})."""
    weights = candidates.candidate_weights(np.array([-9.0, -1.0, -30.0, -2.0]), np.array([3, 1, 9, 2]), "mc")
    result = candidates.candidate_floor(weights, np.array([1.0, 0.0, 1.0, 1.0]), 0.5)
    assert result.floor == pytest.approx(-0.5 * log(0.25 + 0.75 * exp(2)), rel=1e-12)
    assert result.ess == pytest.approx(4)


@pytest.mark.parametrize("successes", range(6))
@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_over_every_choice_of_samples(successes: int, k: int) -> None:
    outcomes = [1] * successes + [0] * (5 - successes)
    choices = [max(choice) for choice in combinations(outcomes, k)]
    assert statistics.pass_at(np.array([successes]), 5, k) == pytest.approx(sum(choices) / len(choices))


@pytest.mark.parametrize("k", [0, 6])
def test_pass_at_k_refuses_more_than_the_samples(k: int) -> None:
    with pytest.raises(AssertionError, match="samples"):
        statistics.pass_at(np.array([1]), 5, k)


def test_paired_difference_takes_prompts_first() -> None:
    """Differences 1, 2, 6 per prompt: mean 3, se = sqrt(14 / 2 / 3); the two sides may have other sample counts."""
    first, second = np.array([[2.0, 4.0], [12.0, 14.0], [100.0, 114.0]]), np.array([2.0, 11.0, 101.0])
    result = statistics.paired_difference(first, second)
    assert (result.mean, result.se) == pytest.approx((3, (14 / 2 / 3) ** 0.5))
