"""The default loss on an enumerated toy language model: its exact expected gradient is -grad F, for every gate.

The model: 3 tokens, sequences end at token 2 or after 3 tokens. Everything is enumerated in float64 and F is differentiated
by autograd on its own definition, independent of the code under test.
"""

import itertools

import pytest
import torch
from torch import Tensor

from grpo_lab.config import KLName
from grpo_lab.methods import METHODS
from grpo_lab.objective.aggregate import BatchTotals, token_weights
from grpo_lab.objective.axes import Objective
from grpo_lab.objective.gates import build_gate
from grpo_lab.objective.loss import LossInputs, policy_loss

BETA, LENGTH = 0.25, 3
PREFIXES = [p for n in range(LENGTH) for p in itertools.product((0, 1), repeat=n)]
SEQUENCES = [(*p, 2) for p in PREFIXES] + list(itertools.product((0, 1), repeat=LENGTH))
REWARDS = torch.tensor([float(sum(s) % 2 == 1 and len(s) > 1) for s in SEQUENCES], dtype=torch.float64)


def token_logprobs(table: Tensor) -> tuple[Tensor, Tensor]:
    """[S, C] log-probs of every sequence's tokens under logits [prefixes, 3], and the mask."""
    rows = torch.log_softmax(table, dim=1)
    logprobs = torch.zeros(len(SEQUENCES), LENGTH, dtype=torch.float64)
    mask = torch.zeros_like(logprobs)
    entries = []
    for s, sequence in enumerate(SEQUENCES):
        for t, token in enumerate(sequence):
            entries.append((s, t, rows[PREFIXES.index(sequence[:t]), token]))
            mask[s, t] = 1
    index = torch.tensor([s * LENGTH + t for s, t, _ in entries])
    return logprobs.flatten().scatter(0, index, torch.stack([v for _, _, v in entries])).view_as(logprobs), mask


def free_energy(table: Tensor, reference: Tensor) -> Tensor:
    log_pi = token_logprobs(table)[0].sum(dim=1)
    log_ref = token_logprobs(reference)[0].sum(dim=1)
    return (log_pi.exp() * (BETA * (log_pi - log_ref) - REWARDS)).sum()


def expected_loss_gradient(table: Tensor, reference: Tensor, method: str, kl: KLName = "reward") -> Tensor:
    """Gradient of the loss over all sequences, each weighted by its probability (the expectation over samples).

    The baseline is the exact mean of R, what a leave-one-out baseline is in expectation.
    """
    row = METHODS[method]
    objective = Objective(beta=BETA, gate=row.gate, level=row.level, kl=kl)
    logprobs, mask = token_logprobs(table)
    old, ref = logprobs.detach(), token_logprobs(reference)[0].detach()
    probability = old.sum(dim=1).exp()
    returns = REWARDS - BETA * (old - ref).sum(dim=1) if kl == "reward" else REWARDS
    weights = token_weights("constant_length", mask, BatchTotals(1, int(mask.sum())), 1) * probability.unsqueeze(1)
    inputs = LossInputs(old, ref, mask, weights, torch.ones_like(mask), returns - (probability * returns).sum())
    loss = policy_loss(logprobs, inputs, objective, build_gate(row.gate, row.gate_options))
    return torch.autograd.grad(loss, table)[0]


@pytest.mark.parametrize("method", sorted(METHODS))
def test_expected_gradient_is_the_gradient_of_free_energy(method: str) -> None:
    generator = torch.Generator().manual_seed(1)
    reference = torch.randn(len(PREFIXES), 3, generator=generator, dtype=torch.float64)
    table = (reference + 0.7 * torch.randn(reference.shape, generator=generator, dtype=torch.float64)).requires_grad_()
    (wanted,) = torch.autograd.grad(free_energy(table, reference), table)
    got = expected_loss_gradient(table, reference, method)
    assert (got - wanted).norm() / wanted.norm() < 1e-12


@pytest.mark.parametrize("method", sorted(METHODS))
def test_descent_reaches_the_gibbs_floor(method: str) -> None:
    """Descent along the loss's gradient ends at F* = -beta log Z of the enumeration."""
    reference = torch.randn(len(PREFIXES), 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    log_ref = token_logprobs(reference)[0].sum(dim=1)
    floor = -BETA * torch.logsumexp(log_ref + REWARDS / BETA, dim=0)
    table = reference.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [table], max_iter=400, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        table.grad = expected_loss_gradient(table, reference, method)
        return free_energy(table, reference).detach()

    optimizer.step(closure)  # type: ignore[arg-type]
    assert free_energy(table, reference).item() - floor.item() < 1e-10


@pytest.mark.parametrize(
    "kl, error", [("loss_k2_sequence", 0.0), ("loss_k2", 0.03), ("loss_k3_is", 0.03), ("loss_k3", 0.03)]
)
def test_only_the_sequence_kl_in_the_loss_has_the_gradient_of_free_energy(kl: KLName, error: float) -> None:
    """Token-local penalties miss how a token changes the KL of later ones: 3 to 4 percent of the gradient here."""
    generator = torch.Generator().manual_seed(1)
    reference = torch.randn(len(PREFIXES), 3, generator=generator, dtype=torch.float64)
    table = (reference + 0.7 * torch.randn(reference.shape, generator=generator, dtype=torch.float64)).requires_grad_()
    (wanted,) = torch.autograd.grad(free_energy(table, reference), table)
    got = expected_loss_gradient(table, reference, "grpo", kl)
    relative = float((got - wanted).norm() / wanted.norm())
    assert relative < 1e-12 if error == 0 else relative > error


def test_gibbs_policy_is_a_fixed_point_without_variance() -> None:
    """At the Gibbs policy every R equals beta log Z, so every sampled advantage is zero."""
    reference = torch.randn(len(PREFIXES), 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    log_ref = token_logprobs(reference)[0].sum(dim=1)
    log_gibbs = torch.log_softmax(log_ref + REWARDS / BETA, dim=0)
    returns = REWARDS - BETA * (log_gibbs - log_ref)
    assert (returns - returns[0]).abs().max() < 1e-12
