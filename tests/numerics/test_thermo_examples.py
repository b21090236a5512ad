"""The worked examples of the free-energy mathematics, its identities, and the bias of the floor estimators by enumeration."""

import json
from math import comb
from pathlib import Path

import numpy as np
import pytest

from grpo_lab.thermo import binary, candidates, floor, gap, statistics

EXAMPLES = json.loads((Path(__file__).parent / "worked_examples.json").read_text())


@pytest.mark.parametrize("p, beta, f_star, reward, kl, heat, log_z", EXAMPLES["E7_binary_floor"]["rows"])
def test_binary_rows(p: float, beta: float, f_star: float, reward: float, kl: float, heat: float, log_z: float) -> None:
    assert binary.floor(p, beta) == pytest.approx(f_star, rel=1e-12)
    assert binary.gibbs_success(p, beta) == pytest.approx(reward, rel=1e-12)
    assert binary.gibbs_kl(p, beta) == pytest.approx(kl, rel=1e-10)
    assert binary.heat_capacity(p, beta) == pytest.approx(heat, rel=1e-6)  # the table's own digits end there near 1e-40
    assert binary.log_partition(p, beta) == pytest.approx(log_z, rel=1e-12)


def test_binary_edges() -> None:
    p = np.array([0.0, 1.0])
    assert binary.floor(p, 0.01).tolist() == [0, -1]
    assert binary.gibbs_success(p, 0.01).tolist() == [0, 1]
    assert binary.gibbs_kl(p, 0.01).tolist() == [0, 0]
    assert binary.floor(0.348, 0.001) == pytest.approx(
        EXAMPLES["E7_binary_floor"]["edge"]["p=0.348,beta=0.001 (no overflow)"]
    )


@pytest.mark.parametrize("p", [0.01, 0.35, 0.9])
@pytest.mark.parametrize("beta", [0.1, 0.3, 1.0])
def test_thermodynamic_identities(p: float, beta: float) -> None:
    """dF*/dbeta = KL*, -dE*/dbeta = heat capacity, F* = -E* + beta KL*, KL* = d(q* || p)."""
    step = 1e-5
    derivative = lambda f: (f(p, beta + step) - f(p, beta - step)) / (2 * step)  # noqa: E731
    assert derivative(binary.floor) == pytest.approx(binary.gibbs_kl(p, beta), rel=1e-6)
    assert -derivative(binary.gibbs_success) == pytest.approx(binary.heat_capacity(p, beta), rel=1e-5)
    assert binary.floor(p, beta) == pytest.approx(
        beta * binary.gibbs_kl(p, beta) - binary.gibbs_success(p, beta), rel=1e-12
    )
    assert binary.gibbs_kl(p, beta) == pytest.approx(binary.bernoulli_kl(binary.gibbs_success(p, beta), p), rel=1e-9)


def test_discrete_identity() -> None:
    """F = F* + beta KL(pi || pi*) for any policy."""
    e = EXAMPLES["E8_identity12"]
    ref, pi, r = np.array(e["ref"]), np.array(e["pi"]), np.array(e["r"])
    gibbs, f_star = gap.discrete_gibbs(ref, r, e["beta"])
    assert gibbs.tolist() == pytest.approx(e["gibbs"], abs=1e-12)
    assert f_star == pytest.approx(e["F_star"], abs=1e-12)
    assert gap.free_energy(pi, ref, r, e["beta"]) == pytest.approx(e["F"], abs=1e-12)
    assert f_star + e["beta"] * gap.categorical_kl(pi, gibbs) == pytest.approx(e["rhs"], abs=1e-12)


@pytest.mark.parametrize("weighting", ["full_sequence", "length_normalised"])
def test_candidate_sets(weighting: str) -> None:
    e = EXAMPLES[f"E9_candidates {weighting} beta=0.1"]
    weights = candidates.candidate_weights(np.array(e["logp"]), np.array(e["lengths"]), weighting)  # type: ignore[arg-type]
    result = candidates.candidate_floor(weights, np.array(e["r"], dtype=float), 0.1)
    assert result.weights.tolist() == pytest.approx(e["weights"], abs=1e-12)
    assert result.gibbs.tolist() == pytest.approx(e["gibbs"], abs=1e-12)
    got = (
        result.reference_reward,
        result.ess,
        result.floor,
        result.gibbs_reward,
        result.gibbs_kl,
        result.heat_capacity,
    )
    assert got == pytest.approx((e["E_ref"], e["ess"], e["F_star"], e["E"], e["KL"], e["heat"]), rel=1e-9)


@pytest.mark.parametrize("k, samples, beta, plug_in, u_statistic, _", EXAMPLES["E10_floor_estimators"]["rows"])
def test_floor_estimators(k: int, samples: int, beta: float, plug_in: float, u_statistic: float, _: float) -> None:
    rewards = np.array([[1.0] * k + [0.0] * (samples - k)])
    assert floor.plug_in(rewards, beta)[0] == pytest.approx(plug_in, abs=1e-12)
    assert floor.u_statistic(rewards, beta, 1.0)[0] == pytest.approx(u_statistic, abs=1e-12)


def test_until_first_success() -> None:
    example = EXAMPLES["E10_floor_estimators"]["ibs"]
    assert floor.until_first_success(4, 0.1) == pytest.approx(example["N=4,beta=0.1: F"], abs=1e-12)
    assert floor.until_first_success(1, 0.1) == example["N=1,beta=0.1: F"]


@pytest.mark.parametrize("p, beta, plug_in_bias, u_bias", [
    (0.02, 0.01, 0.588, -0.006), (0.02, 0.2, 0.112, -0.081), (0.05, 0.01, 0.282, -0.0014), (0.348, 0.2, 0.008, -4e-7),
])  # fmt: skip
def test_bracket_holds_in_mean(p: float, beta: float, plug_in_bias: float, u_bias: float) -> None:
    """E[U-statistic] <= F* <= E[plug-in], by the exact binomial expectation over 24 samples."""
    counts = np.arange(25)
    rewards = np.array([[1.0] * k + [0.0] * (24 - k) for k in counts])
    chance = np.array([comb(24, k) * p**k * (1 - p) ** (24 - k) for k in range(25)])
    f_star = float(binary.floor(p, beta))
    assert chance @ floor.plug_in(rewards, beta) - f_star == pytest.approx(plug_in_bias, rel=0.06)
    assert chance @ floor.u_statistic(rewards, beta, 1.0) - f_star == pytest.approx(u_bias, rel=0.12)


def test_policy_side_floor_is_exact_at_the_gibbs_policy() -> None:
    """Every sample of the Gibbs policy has R = beta log Z, whatever it is."""
    p, beta = 0.3, 0.25
    q = float(binary.gibbs_success(p, beta))
    rewards = np.array([[1.0, 0.0, 0.0, 1.0]])
    log_ratios = np.where(rewards == 1, np.log(q / p), np.log((1 - q) / (1 - p)))
    side = floor.policy_side(rewards, log_ratios, beta)
    assert side.floor.mean == pytest.approx(float(binary.floor(p, beta)), abs=1e-12)
    assert side.ess == pytest.approx(4)
    assert gap.gap_from_returns(rewards, log_ratios, beta) == pytest.approx(0, abs=1e-12)


def test_gap_decomposition() -> None:
    e = EXAMPLES["E13_gap_decomposition"]
    split = gap.split_gap(np.array([e["q"]]), np.array([e["p"]]), np.array([e["KL"]]), e["beta"])
    assert split.wasted == pytest.approx(e["beta_times_wasted"], abs=1e-12)
    assert split.tilt == pytest.approx(e["beta_times_klbern_q_qstar"], abs=1e-12)
    assert split.gap == pytest.approx(e["gap"], abs=1e-12)


def test_clustered_errors() -> None:
    e = EXAMPLES["E14_cluster_se"]
    phi = np.array(e["phi"])
    assert statistics.clustered(phi).mean == pytest.approx(e["mean"])
    assert statistics.clustered(phi).se == pytest.approx(e["se_cluster"])
    assert statistics.fixed_prompts_se(phi) == pytest.approx(e["se_fixed_prompts"])


def test_clustered_interval_covers() -> None:
    """Nominal 95 % of 500 prompts x 4 samples with p ~ Beta: at least 93 %."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(600):
        p = rng.beta(0.6, 1.12, size=(500, 1))
        estimate = statistics.clustered((rng.random((500, 4)) < p).astype(float))
        hits += abs(estimate.mean - 0.6 / 1.72) < 1.96 * estimate.se
    assert hits / 600 >= 0.93


def test_pass_at_k_by_counting() -> None:
    assert statistics.pass_at(np.array([1, 0, 4]), 4, 1) == pytest.approx((0.25 + 0 + 1) / 3)
    assert statistics.pass_at(np.array([1]), 4, 2) == pytest.approx(1 - 3 / 6)
