"""The worked examples of gates, advantages, aggregation, KL and corrections; gradients by autograd and by enumeration."""

import json
import math
from pathlib import Path

import pytest
import torch

from grpo_lab.methods import METHODS, Objective
from grpo_lab.objective.advantages import advantages
from grpo_lab.objective.aggregate import BatchTotals, token_weights
from grpo_lab.objective.gates import build_gate
from grpo_lab.objective.kl import kl_penalty
from grpo_lab.objective.loss import LossInputs, gate_metrics, policy_loss
from grpo_lab.objective.ratio import correction_weights

EXAMPLES = json.loads((Path(__file__).parent / "worked_examples.json").read_text())


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("method, advantage, ratio, f, gate, signal", EXAMPLES["E1_gates"]["rows"])
def test_gate_rows(method: str, advantage: float, ratio: float, f: float, gate: float, signal: float) -> None:
    row = METHODS[method]
    built = build_gate(row.gate, row.gate_options)
    rho, a = tensor([ratio]).requires_grad_(), tensor([advantage])
    value = built.f(rho, a)
    (slope,) = torch.autograd.grad(value.sum(), rho)
    assert value.item() == pytest.approx(f, abs=1e-12)
    assert built.df(rho, a).item() == pytest.approx(gate, abs=1e-12)
    assert slope.item() == pytest.approx(gate, abs=1e-12)
    assert slope.item() * ratio * advantage == pytest.approx(signal, abs=1e-12)


def test_gspo_sequences() -> None:
    example = EXAMPLES["E3_gspo A=(+1,-1)"]
    pad = lambda rows: torch.nn.utils.rnn.pad_sequence([tensor(row) for row in rows], batch_first=True)  # noqa: E731
    new, old = pad(example["logp_new"]).requires_grad_(), pad(example["logp_old"])
    mask = tensor([[1, 1, 0], [1, 1, 1]])
    objective = Objective(beta=0.05, gate="clip", level="sequence", kl="none", aggregate="sequence_mean")
    gate = build_gate("clip", METHODS["gspo"].gate_options)
    weights = token_weights("sequence_mean", mask, BatchTotals(2, 5), 8)
    inputs = LossInputs(old, torch.zeros_like(old), old, mask, weights, tensor([1.0, -1.0]))
    loss, log_rho = policy_loss(new, inputs, objective, gate)
    (gradient,) = torch.autograd.grad(loss, new)
    assert -loss.item() == pytest.approx(example["J"], abs=1e-14)
    for row, sequence in enumerate(example["sequences"]):
        assert log_rho[row, 0].exp().item() == pytest.approx(sequence["rho_s"], abs=1e-12)
        assert -gradient[row, 0].item() == pytest.approx(sequence["dJmean_dlogp_each_token"], abs=1e-12)


def test_group_advantages() -> None:
    example = EXAMPLES["E4_group_advantages"]
    r, ell = tensor(example["r"]).unsqueeze(0), tensor(example["ell"]).unsqueeze(0)
    values = example["values_for_success_then_failure"]
    for name, got in {
        "std ddof=1 eps=1e-4 (TRL)": advantages(r, "zscore"),
        "std ddof=1 eps=1e-6 (verl)": advantages(r, "zscore", eps=1e-6),
        "std ddof=0 eps=0 (paper)": advantages(r, "zscore", ddof=0, eps=0.0),
        "none (Dr.GRPO)": advantages(r, "center"),
        "rloo (=none*G/(G-1))": advantages(r, "leave_one_out"),
    }.items():
        assert got[0, :2].tolist() == pytest.approx(values[name], abs=1e-12), name
    shaped = r - 0.1 * ell
    assert shaped[0].tolist() == pytest.approx(values["shaped R=r-0.1*ell"], abs=1e-12)
    assert advantages(shaped, "leave_one_out")[0].tolist() == pytest.approx(values["shaped rloo advantage"], abs=1e-12)


@pytest.mark.parametrize("name", ["leave_one_out", "center", "zscore"])
def test_equal_rewards_give_no_advantage(name: str) -> None:
    assert advantages(torch.ones(3, 8), name).abs().max() == 0  # type: ignore[arg-type]


def test_aggregation() -> None:
    example = EXAMPLES["E5_aggregation"]
    values = torch.nn.utils.rnn.pad_sequence([tensor(row) for row in example["per_token"]], batch_first=True)
    mask = tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    total = lambda name, constant=8: (token_weights(name, mask, BatchTotals(2, 6), constant) * values).sum().item()  # noqa: E731
    assert total("sequence_mean") == pytest.approx(example["seq_mean_token_mean"])
    assert total("token_mean") == pytest.approx(example["token_mean"])
    assert total("constant_length") == pytest.approx(example["const_length_Lmax8"])
    assert total("constant_length", 1) == pytest.approx(example["seq_mean_token_sum"])


def test_kl_values_and_expected_gradients() -> None:
    example = EXAMPLES["E6_kl"]
    pi, ref, mu = tensor(example["pi"]), tensor(example["ref"]), tensor(example["offpolicy_mu"])
    logits = pi.log().requires_grad_()
    log_pi = torch.log_softmax(logits, dim=0)
    ratio_is_one = (log_pi - log_pi.detach()).unsqueeze(1)
    k = {n: kl_penalty(n, log_pi.unsqueeze(1), ref.log().unsqueeze(1), ratio_is_one)[:, 0] for n in
         ("loss_k1", "loss_k2", "loss_k3", "loss_k3_is")}  # type: ignore[arg-type] # fmt: skip
    per_token = torch.stack([k["loss_k1"], k["loss_k2"], k["loss_k3"]], dim=1)
    assert per_token.tolist() == [pytest.approx(row, abs=1e-12) for row in example["per_token_k1_k2_k3"]]
    for name in ("k1", "k2", "k3"):
        assert (pi * k[f"loss_{name}"]).sum().item() == pytest.approx(example[f"E_{name}"], abs=1e-12)
    for name, expected in {
        "loss_k1": example["E_grad_k1_loss"],
        "loss_k2": example["grad_logits_KL"],
        "loss_k3": example["E_grad_k3_loss"],
        "loss_k3_is": example["grad_logits_KL"],
    }.items():
        (gradient,) = torch.autograd.grad((pi * k[name]).sum(), logits, retain_graph=True)
        assert gradient.tolist() == pytest.approx(expected, abs=1e-12), name
    off_policy = kl_penalty("loss_k3_is", log_pi.unsqueeze(1), ref.log().unsqueeze(1), (log_pi - mu.log()).unsqueeze(1))
    assert (mu * off_policy[:, 0]).sum().item() == pytest.approx(example["E_mu_rho_k3"], abs=1e-12)


def test_mismatch_corrections() -> None:
    def weight(name: str, ratio: float, **options: object) -> float:
        log_ratio = tensor([[math.log(ratio)]])
        return correction_weights(log_ratio, tensor([[0.0]]), name, **options).item()  # type: ignore[arg-type]

    assert weight("tis", 2.7) == pytest.approx(2.0)
    assert weight("tis", 0.4) == pytest.approx(0.4)
    assert weight("icepop", 0.45) == 0
    assert weight("icepop", 3.0) == pytest.approx(3.0)
    assert weight("icepop", 2.5, band=(0.5, 2.0)) == 0


def test_gate_record_counts_by_hand() -> None:
    """Two of four tokens are beyond the clip for their sign; ess = (1 + 1.1)^2 / (4 (1 + 1.1^2)) of signals 1, 1.1, 0, 0."""
    ratio = tensor([[1.0, 1.1], [0.5, 0.7]])
    record = gate_metrics(ratio.log(), tensor([1.0, -1.0]), torch.ones(2, 2), build_gate("clip", {}))
    assert record["gate/open_fraction"] == pytest.approx(0.5)
    assert record["gate/ess"] == pytest.approx(2.1**2 / (4 * (1 + 1.21)))
    assert (record["ratio/min"], record["ratio/max"]) == (pytest.approx(0.5), pytest.approx(1.1))
