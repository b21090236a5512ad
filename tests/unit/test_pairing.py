"""Paired tests, Holm's correction and rewards at equal KL: hand values, full enumeration, simulated coverage."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from grpo_lab.evaluation.pairing import at_level, holm, paired_test, sign_flip_exact, sign_flip_random
from grpo_lab.thermo.statistics import clustered


def test_paired_differences_by_hand() -> None:
    """Differences 0.5, 0.25, 0.25, 0: mean 1/4, se sqrt((1/16 + 1/16) / 3 / 4), t sqrt(6); 2 of the 8 signs reach 1."""
    test = paired_test(np.array([1.0, 0.5, 0.75, 0.5]), np.array([0.5, 0.25, 0.5, 0.5]))
    assert test.difference.mean == 0.25
    assert test.difference.se == pytest.approx(math.sqrt(1 / 96), rel=1e-14)
    assert test.t == pytest.approx(math.sqrt(6), rel=1e-14)
    assert (test.p, test.exact, test.problems, test.differing) == (0.25, True, 4, 3)


def test_exact_p_is_the_count_over_all_signs() -> None:
    values = np.random.default_rng(0).normal(0.4, 1, size=9).round(2)
    signs = itertools.product((1, -1), repeat=9)
    hits = sum(
        abs(sum(s * v for s, v in zip(choice, values, strict=True))) >= abs(sum(values)) - 1e-12 for choice in signs
    )
    assert sign_flip_exact(values) == hits / 2**9
    assert sign_flip_exact(np.full(10, 0.1)) == 2 / 2**10  # ties by rounding count
    assert sign_flip_exact(np.array([])) == 1.0 and sign_flip_exact(np.array([0.3])) == 1.0


def test_drawn_p_estimates_the_exact_one_and_is_never_zero() -> None:
    values = np.random.default_rng(1).normal(0.35, 1, size=16)
    exact, drawn = sign_flip_exact(values), sign_flip_random(values, 20_000, seed=0)
    assert abs(drawn - exact) < 4 * math.sqrt(exact * (1 - exact) / 20_000)
    assert sign_flip_random(np.ones(60), 999, seed=0) == 1 / 1000


def test_alike_policies_have_no_difference() -> None:
    test = paired_test(np.ones(5), np.ones(5))
    assert test.difference.mean == 0 and math.isnan(test.t) and test.p == 1 and test.differing == 0


def test_holm_by_hand() -> None:
    """0.01 x 4, 0.02 x 3, then 0.03 x 2 and 0.04 x 1, which may not fall below 0.06."""
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []


@pytest.mark.parametrize("problems", [12, 40])
def test_coverage_and_level_over_problems(problems: int) -> None:
    """Two alike policies on problems of very different difficulty: 95 % intervals cover, 5 % tests reject in 5 %.

    Per-problem differences are correlated within problems (each policy has its own luck with a problem), so counting samples
    as independent would reject far more often.
    """
    generator, rounds = np.random.default_rng(3), 800
    covered = rejected = naive = 0
    quantile = {12: 2.201, 40: 2.023}[problems]  # of Student's t, 97.5 %
    for _ in range(rounds):
        easy = generator.uniform(0.2, 0.8, size=(problems, 1))
        chances = [np.clip(easy + generator.normal(0, 0.15, size=(problems, 1)), 0, 1) for _ in range(2)]
        first, second = (generator.binomial(16, chance)[:, 0] / 16 for chance in chances)
        test = paired_test(first, second, draws=199)
        covered += abs(test.difference.mean) <= quantile * test.difference.se
        rejected += test.p <= 0.05
        pooled = math.sqrt(sum(rate.mean() * (1 - rate.mean()) / (16 * problems) for rate in (first, second)))
        naive += abs(test.difference.mean) > 1.96 * pooled
    error = 3 * math.sqrt(0.05 * 0.95 / rounds)
    assert abs(covered / rounds - 0.95) < error + 0.005
    assert rejected / rounds < 0.05 + error
    assert naive / rounds > 0.1


def test_reward_at_a_level_by_hand() -> None:
    rewards, kls = np.array([[0.1, 0.3], [0.5, 0.7], [0.6, 0.6]]), np.array([[0.0, 0.0], [1.0, 3.0], [1.0, 0.0]])
    found = at_level(rewards, kls, 1.0)
    assert found is not None and found.mean() == pytest.approx(0.4)  # half way: mean KL goes 0, 2, 0.5
    assert found == pytest.approx([0.3 - 0.2 * (0.5 - 1.0), 0.5 - 0.2 * (1.5 - 1.0)])
    assert at_level(rewards, kls, 2.5) is None
    assert at_level(rewards, kls, 2.0) == pytest.approx([0.5 - 0.2 * (1 - 2), 0.7 - 0.2 * (3 - 2)])


def test_error_at_a_level_includes_that_of_the_kl() -> None:
    """Drawn again and again, the interpolated reward spreads as its standard error says; without the KL's part it would not."""
    generator, found, errors, without = np.random.default_rng(5), [], [], []
    for _ in range(600):
        kl = np.stack([np.zeros(40), generator.normal(2, 1.5, size=40)])
        reward = np.stack([generator.normal(0.2, 0.05, size=40), generator.normal(0.8, 0.05, size=40)])
        values = at_level(reward, kl, 1.0)
        assert values is not None
        found.append(values.mean())
        errors.append(clustered(values).se)
        share = 1.0 / kl[1].mean()
        without.append(clustered((1 - share) * reward[0] + share * reward[1]).se)
    assert np.mean(found) == pytest.approx(0.5, abs=0.01)
    assert np.mean(errors) == pytest.approx(np.std(found, ddof=1), rel=0.1)
    assert np.mean(without) < 0.5 * np.std(found, ddof=1)
