"""The worked examples of gates, advantages, aggregation, KL and corrections; gradients by autograd and by enumeration."""

import json
import math
from pathlib import Path

import pytest
import torch

from grpo_lab.methods import METHODS
from grpo_lab.objective.advantages import advantages, overlong_penalty
from grpo_lab.objective.aggregate import BatchTotals, token_weights
from grpo_lab.objective.axes import CORRECTION_OPTIONS, Objective
from grpo_lab.objective.gates import build_gate
from grpo_lab.objective.kl import kl_penalty
from grpo_lab.objective.loss import LossInputs, policy_loss
from grpo_lab.objective.ratio import correction_weights, log_ratio
from grpo_lab.objective.record import gate_record

EXAMPLES = json.loads((Path(__file__).parent / "worked_examples.json").read_text())


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("method, advantage, ratio, f, gate, signal", EXAMPLES["E1_gates"]["rows"])
def test_gate_rows(method: str, advantage: float, ratio: float, f: float, gate: float, signal: float) -> None:
    row = METHODS[method]
    built = build_gate(row.gate, row.gate_options)
    rho, a = tensor([ratio]).requires_grad_(), tensor([advantage])
    value = built.f(rho, a, tensor([0.5]))
    (slope,) = torch.autograd.grad(value.sum(), rho)
    assert value.item() == pytest.approx(f, abs=1e-12)
    assert built.df(rho, a, tensor([0.5])).item() == pytest.approx(gate, abs=1e-12)
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
    ones = torch.ones_like(old)
    inputs = LossInputs(old, torch.zeros_like(old), mask, weights, ones, tensor([1.0, -1.0]))
    loss = policy_loss(new, inputs, objective, gate)
    (gradient,) = torch.autograd.grad(loss, new)
    log_rho = log_ratio(new, old, mask, "sequence")
    assert -loss.item() == pytest.approx(example["J"], abs=1e-14)
    for row, sequence in enumerate(example["sequences"]):
        assert log_rho[row, 0].exp().item() == pytest.approx(sequence["rho_s"], abs=1e-12)
        assert -gradient[row, 0].item() == pytest.approx(sequence["dJmean_dlogp_each_token"], abs=1e-12)
        product = ((new - old) * mask)[row].sum().exp().item()
        assert product == pytest.approx(example["sequence_product_ratio"][row], abs=1e-12)
    assert (new - old)[0, 0].exp().item() == pytest.approx(example["token_level_ppo_ratio_first"], abs=1e-12)


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


@pytest.mark.parametrize("name", ["leave_one_out", "center", "zscore", "batch_zscore"])
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
    assert total("sequence_sum") == pytest.approx(example["seq_mean_token_sum"])


def test_kl_values_and_expected_gradients() -> None:
    example = EXAMPLES["E6_kl"]
    pi, ref, mu = tensor(example["pi"]), tensor(example["ref"]), tensor(example["offpolicy_mu"])
    logits = pi.log().requires_grad_()
    log_pi = torch.log_softmax(logits, dim=0)
    one = torch.ones(3, 1, dtype=torch.float64)
    ratio_is_one = (log_pi - log_pi.detach()).unsqueeze(1)
    k = {n: kl_penalty(n, log_pi.unsqueeze(1), ref.log().unsqueeze(1), ratio_is_one, one)[:, 0] for n in
         ("loss_k1", "loss_k2", "loss_k3", "loss_k3_is", "loss_k2_sequence")}  # type: ignore[arg-type] # fmt: skip
    per_token = torch.stack([k["loss_k1"], k["loss_k2"], k["loss_k3"]], dim=1)
    assert per_token.tolist() == [pytest.approx(row, abs=1e-12) for row in example["per_token_k1_k2_k3"]]
    for name in ("k1", "k2", "k3"):
        assert (pi * k[f"loss_{name}"]).sum().item() == pytest.approx(example[f"E_{name}"], abs=1e-12)
    for name, expected in {
        "loss_k1": example["E_grad_k1_loss"],
        "loss_k2": example["grad_logits_KL"],
        "loss_k3": example["E_grad_k3_loss"],
        "loss_k3_is": example["grad_logits_KL"],
        "loss_k2_sequence": example["grad_logits_KL"],
    }.items():
        (gradient,) = torch.autograd.grad((pi * k[name]).sum(), logits, retain_graph=True)
        assert gradient.tolist() == pytest.approx(expected, abs=1e-12), name
    off_policy = lambda n: kl_penalty(  # noqa: E731
        n, log_pi.unsqueeze(1), ref.log().unsqueeze(1), (log_pi - mu.log()).unsqueeze(1), one
    )[:, 0]
    assert (mu * off_policy("loss_k3_is")).sum().item() == pytest.approx(example["E_mu_rho_k3"], abs=1e-12)
    assert (mu * off_policy("loss_k3")).sum().item() == pytest.approx(example["E_mu_k3_noIS"], abs=1e-12)
    assert (pi * (pi / ref).log()).sum().item() == pytest.approx(example["KL"], abs=1e-12)
    for name in ("k1", "k3"):
        values = k[f"loss_{name}"]
        variance = (pi * values.square()).sum() - (pi * values).sum().square()
        assert variance.item() == pytest.approx(example[f"var_{name}"], abs=1e-12)
    score = (pi * k["loss_k3"].detach() * log_pi).sum()  # k3 as a detached reward
    (gradient,) = torch.autograd.grad(score, logits)
    assert gradient.tolist() == pytest.approx(example["E_grad_k3_in_reward"], abs=1e-12)


def weight(name: str, *ratios: float, **options: float) -> list[float]:
    """The correction weights of one sequence whose tokens have these ratios pi_old / pi_rollout."""
    old = tensor([ratios]).log()
    every = {**CORRECTION_OPTIONS[name], **options}  # type: ignore[index]
    return correction_weights(old, torch.zeros_like(old), torch.ones_like(old), name, every)[0].tolist()  # type: ignore[arg-type]


def test_mismatch_corrections() -> None:
    example = EXAMPLES["E17_mismatch"]
    assert weight("tis", 2.7, 0.4) == pytest.approx([*example["TIS"].values()])
    wanted = example["IcePop"]
    assert weight("icepop", 0.45, 3.0) == pytest.approx([wanted["ratio 0.45 in [0.5,5]"], wanted["ratio 3 in [0.5,5]"]])
    assert weight("icepop", 2.5, high=2.0) == [wanted["GLM-5 pop ratio 2.5 in [1/2,2]"]]
    assert weight("mis", 0.1, 1.9, 2.1) == pytest.approx([0.1, 1.9, 0])
    assert weight("tis_sequence", 1.5, 1.2) == pytest.approx([1.8, 1.8])
    assert weight("tis_sequence", 1.5, 1.6) == pytest.approx([2.0, 2.0])
    assert weight("mis_sequence", 1.5, 1.2) == pytest.approx([1.8, 1.8])
    assert weight("mis_sequence", 1.5, 1.6) == [0.0, 0.0]


def test_second_moment_mask() -> None:
    """mean square of (0.5, -0.1, 0.3, 0.05) is 0.088; without the largest it is 0.0342 <= 0.04."""
    log_ratios = [0.5, -0.1, 0.3, 0.05]
    assert "0.088125 -> drop 0.5 -> mean of rest 0.0341667" in next(iter(EXAMPLES["E17_mismatch"]["M2PO"].values()))
    kept = weight("m2po", *map(math.exp, log_ratios))
    assert kept == pytest.approx([0, *map(math.exp, log_ratios[1:])])


@pytest.mark.parametrize("method, advantage, new, old, wanted", [
    ("ipo", 1.0, 0.9, 0.55, "IPO|pi=0.9,mu=0.55,eps=0.3"),
    ("ipo", -1.0, 0.02, 0.0002, "IPO|pi=0.02,mu=0.0002,eps=0.3"),
    ("dppo_tv", 1.0, 0.6, 0.4, "DPPO_TV|A>0,pi=0.6,old=0.4,delta=0.15"),
    ("dppo_tv", -1.0, 0.6, 0.4, "DPPO_TV|A<0,pi=0.6,old=0.4,delta=0.15"),
])  # fmt: skip
def test_probability_gates(method: str, advantage: float, new: float, old: float, wanted: str) -> None:
    section, _, case = wanted.partition("|")
    gate = build_gate(METHODS[method].gate, METHODS[method].gate_options)
    opened = gate.df(tensor([new / old]), tensor([advantage]), tensor([old])).item()
    answer = EXAMPLES["E17_mismatch"][section][case]
    assert (opened == 0) == (answer == "masked") and (opened == 1) == answer.startswith("kept")
    if "weight 100" in answer:
        assert opened * new / old == pytest.approx(100)


def test_soft_overlong_penalty() -> None:
    example = EXAMPLES["E15_soft_overlong"]
    for values, limit, cache in ((example["values"], 20480, 4096), (example["gsm8k_512_128"], 512, 128)):
        got = overlong_penalty(tensor([float(n) for n in values]), limit, cache)
        assert got.tolist() == pytest.approx([*values.values()], abs=1e-12)


def test_gate_record_counts_by_hand() -> None:
    """Two of four tokens are beyond the clip for their sign; ess = (1 + 1.1)^2 / (4 (1 + 1.1^2)) of signals 1, 1.1, 0, 0."""
    ratio, ones = tensor([[1.0, 1.1], [0.5, 0.7]]), torch.ones(2, 2, dtype=torch.float64)
    inputs = LossInputs(0 * ones, 0 * ones, ones, ones / 4, ones, tensor([1.0, -1.0]))
    record = gate_record(ratio.log(), inputs, Objective(beta=0.1, gate="clip"), build_gate("clip", {}))
    assert record["gate/open_fraction"] == pytest.approx(0.5)
    assert (record["gate/open_fraction_positive"], record["gate/open_fraction_negative"]) == (1.0, 0.0)
    assert record["gate/ess"] == pytest.approx(2.1**2 / (4 * (1 + 1.21)))
    assert record["gate/signal_beyond_0.1"] == 0  # log 1.1 = 0.095; the two beyond are closed
    assert (record["ratio/min"], record["ratio/max"]) == (pytest.approx(0.5), pytest.approx(1.1))
