"""Where objectives lead on the enumerated model, against the Gibbs policy and against published fixed points."""

import math

import pytest
import torch

from grpo_lab import plugins
from grpo_lab.lab.equilibrium import find_equilibrium
from grpo_lab.lab.sampled import train_sampled
from grpo_lab.lab.survey import AXES, BETAS, axes_rows, gate_rows, method_rows
from grpo_lab.lab.toy import (
    MASK,
    PREFIXES,
    REFERENCE,
    REWARDS,
    SEQUENCES,
    gibbs_logits,
    measure,
    occupancy,
    token_logprobs,
)
from grpo_lab.methods import METHODS
from grpo_lab.objective.gates import PACKAGE
from grpo_lab.thermo.binary import floor
from grpo_lab.thermo.normalisation import std_gain

FLOORS = dict(zip(BETAS, [-0.8698712, -0.6866033, -0.5037542, -0.3836467], strict=True))
# F - F* at the fixed points of beta 0.1, 0.25, 0.5, 1, found by brute force on a model of 15 sequences with p = 0.272.
PUBLISHED = {
    "leave-one-out, token-local KL (k2, IS-k3)": [1.85e-2, 2.88e-2, 9.3e-3, 1.9e-3],
    "leave-one-out, k3 in the loss": [5.10e-2, 4.16e-2, 1.14e-2, 1.8e-3],
    "z-score, sequence k2 in the loss": [1.2e-5, 1.20e-2, 0.154, 0.685],
    "z-score, token-local KL (TRL's default)": [1.86e-2, 5.83e-2, 0.247, 0.871],
    "z-score, k3, sequence mean (GRPO's paper)": [3.9e-3, 4.1e-3, 3.25e-2, 7.9e-2],
}
EXACT = ["leave-one-out, KL in the reward", "z-score, KL in the reward", "leave-one-out, sequence k2 in the loss"]


def test_the_toy_is_a_distribution_and_its_gibbs_policy_is_the_floor() -> None:
    log_ref = token_logprobs(REFERENCE).sum(dim=1)
    assert len(SEQUENCES) == 15 and float(log_ref.exp().sum()) == pytest.approx(1, abs=1e-14)
    assert float((log_ref.exp() * REWARDS).sum()) == pytest.approx(0.2721, abs=1e-4)
    assert torch.allclose(occupancy(log_ref.exp())[0], torch.softmax(REFERENCE[0], dim=0))
    for beta in BETAS:
        wanted = torch.softmax(log_ref + REWARDS / beta, dim=0)
        assert torch.allclose(token_logprobs(gibbs_logits(beta)).sum(dim=1).exp(), wanted, atol=1e-14)
        state = measure(gibbs_logits(beta), beta)
        assert state.gap == pytest.approx(0, abs=1e-14) and state.beta_eff == pytest.approx(beta, abs=1e-10)
        assert state.floor == pytest.approx(floor(float((log_ref.exp() * REWARDS).sum()), beta), abs=1e-12)
        assert state.floor == pytest.approx(FLOORS[beta], abs=2e-5)


def test_every_gate_reaches_the_floor_under_the_default_recipe() -> None:
    rows = gate_rows(BETAS)
    assert {name for name, _, _ in rows} == set(plugins.names(PACKAGE))
    for name, _, objective in rows:
        assert abs(find_equilibrium(objective).state.gap) <= 1e-10, (name, objective.beta)


def test_every_method_reaches_the_floor_under_the_default_recipe() -> None:
    for name, _, objective in method_rows(sorted(METHODS), ["free_energy"], [0.25]):
        assert abs(find_equilibrium(objective).state.gap) <= 1e-10, name


@pytest.mark.parametrize("name", [name for name in AXES if name in PUBLISHED])
def test_published_recipes_land_where_brute_force_says(name: str) -> None:
    wanted = PUBLISHED[name]
    for objective, gap in zip([o for n, _, o in axes_rows(BETAS) if n == name], wanted, strict=True):
        got = find_equilibrium(objective).state.gap
        unit = 10 ** (math.floor(math.log10(gap)) - 1)  # of the second significant digit
        assert abs(got - gap) <= unit / 2 + 1e-12, (objective.beta, got)


@pytest.mark.parametrize("name", EXACT)
def test_exact_estimators_reach_the_floor(name: str) -> None:
    for objective in [o for n, _, o in axes_rows(BETAS) if n == name]:
        assert abs(find_equilibrium(objective).state.gap) <= 1e-10, objective.beta


@pytest.mark.parametrize("beta", BETAS)
def test_k3_has_its_closed_form_fixed_point(beta: float) -> None:
    """q = beta p / (lambda - 1) for one step with a binary reward: the last token after (0, 1), which only 1 makes wrong."""
    objective = next(o for name, _, o in axes_rows([beta]) if name == "leave-one-out, k3 in the loss")
    row = PREFIXES.index((0, 1))
    p, q = (1 - float(torch.softmax(logits[row], 0)[1]) for logits in (REFERENCE, find_equilibrium(objective).logits))
    root = ((1 + beta) + math.sqrt((1 + beta) ** 2 - 4 * beta * (1 - p))) / 2
    assert q == pytest.approx(beta * p / (root - 1), abs=1e-9)


def test_sampled_training_has_the_same_ranking() -> None:
    """Groups of 8: the default recipe and z-scores of R close the gap, the published ones keep theirs."""
    names = [EXACT[0], EXACT[1], "z-score, k3, sequence mean (GRPO's paper)", "z-score, token-local KL (TRL's default)"]
    objectives = {n: o for n, _, o in axes_rows([0.25]) if n in names}
    gaps = [train_sampled(objectives[name], steps=1200).gap for name in names]
    assert max(gaps[:2]) < 1e-4 < 5e-3 < gaps[2] < gaps[3]


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("success", [0.02, 0.3, 0.9])
def test_std_gain_is_the_enumerated_group_update(success: float, ddof: int) -> None:
    """E[(1/G) sum_i A_i dlog pi(r_i)/dq] over all 2^G groups, with dlog pi/dq = 1/q or -1/(1 - q)."""
    group_size, total = 6, 0.0
    for bits in range(2**group_size):
        rewards = [(bits >> i) & 1 for i in range(group_size)]
        k, mean = sum(rewards), sum(rewards) / group_size
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (group_size - ddof))
        score = (
            sum((r - mean) / (std + 1e-4) * (1 / success if r else -1 / (1 - success)) for r in rewards) / group_size
        )
        total += success**k * (1 - success) ** (group_size - k) * score
    assert std_gain(success, group_size, ddof) == pytest.approx(total, rel=1e-12)


def test_std_gain_has_its_limits() -> None:
    assert std_gain(1e-12, 32, eps=0.0) == pytest.approx(5.480077554, abs=1e-8)
    assert std_gain(0.3, 100_000, eps=0.0) == pytest.approx(1 / math.sqrt(0.21), rel=1e-4)


def test_masks_are_whole() -> None:
    assert MASK.sum(dim=1).tolist() == [len(sequence) for sequence in SEQUENCES]
