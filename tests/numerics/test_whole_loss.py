"""The whole loss against a second implementation in plain Python floats, written from the papers' formulas, token by token."""

import itertools
import math
import random
from dataclasses import dataclass, fields

import pytest
import torch

from grpo_lab.methods import METHODS
from grpo_lab.objective.advantages import batch_advantages
from grpo_lab.objective.aggregate import BatchTotals
from grpo_lab.objective.axes import CORRECTION_OPTIONS, Objective
from grpo_lab.objective.gates import build_gate
from grpo_lab.objective.loss import loss_inputs, policy_loss, trained_mask
from grpo_lab.types import TokenBatch, TrainBatch

GROUP, BETA, LIMIT = 4, 0.3, 6
LENGTHS = [1, 3, 6, 2, 4, 6, 5, 3]
TRUNCATED = [n == LIMIT for n in LENGTHS]
Rows = list[list[float]]


@dataclass
class Case:
    """Log-probs of every token under the four policies, and the rewards."""

    new: Rows
    old: Rows
    ref: Rows
    rollout: Rows
    rewards: list[float]


def make_case(seed: int, spread: float) -> Case:
    rng = random.Random(seed)
    near = lambda rows, width: [[min(v + rng.gauss(0, width), -1e-3) for v in row] for row in rows]  # noqa: E731
    old = [[-rng.expovariate(0.7) - 0.01 for _ in range(n)] for n in LENGTHS]
    return Case(near(old, spread), old, near(old, 0.5), near(old, 0.3), [float(rng.random() < 0.5) for _ in LENGTHS])


def plain_loss(case: Case, new: Rows, o: Objective, gate: dict[str, float]) -> float:
    """`new` may differ from `case.new` in one token: where a formula stops the gradient, `case.new` is used."""
    advantages = plain_advantages(case, o)
    old = case.rollout if o.old == "rollout" else case.old
    kept = [not (o.mask_truncated and cut) for cut in TRUNCATED]
    tokens = sum(n for n, keep in zip(LENGTHS, kept, strict=True) if keep)
    weights = plain_correction(case, o)
    total = 0.0
    for i, n in enumerate(LENGTHS):
        if not kept[i]:
            continue
        divisor = {
            "token_mean": tokens, "sequence_mean": len(LENGTHS) * n, "sequence_sum": len(LENGTHS),
            "constant_length": len(LENGTHS) * LIMIT,
        }[o.aggregate]  # fmt: skip
        sequence = math.exp(sum(a - b for a, b in zip(new[i], old[i], strict=True)) / n)
        frozen = math.exp(sum(a - b for a, b in zip(case.new[i], old[i], strict=True)) / n)
        log_f = [math.log(plain_f(o.gate, gate, math.exp(new[i][t] - old[i][t]), advantages[i], math.exp(old[i][t])))
                 for t in range(n)] if o.level == "geometric_mean" else []  # fmt: skip
        ell = sum(a - b for a, b in zip(new[i], case.ref[i], strict=True))
        for t in range(n):
            ratio = math.exp(new[i][t] - old[i][t])
            if o.level == "geometric_mean":
                j = math.exp(sum(log_f) / n) * advantages[i]
            else:
                rho = {
                    "token": ratio,
                    "sequence": sequence,
                    "sequence_token": frozen * math.exp(new[i][t] - case.new[i][t]),
                }[o.level]
                j = plain_f(o.gate, gate, rho, advantages[i], math.exp(old[i][t])) * advantages[i]
            total -= (weights[i][t] * j - o.beta * plain_kl(o.kl, new[i][t] - case.ref[i][t], ratio, ell, n)) / divisor
    return total


def plain_f(name: str, p: dict[str, float], rho: float, a: float, old: float) -> float:
    if name == "clip":
        return min(rho, 1 + p["clip_high"]) if a >= 0 else max(rho, 1 - p["clip_low"])
    if name == "dual_clip":
        return min(rho, 1 + p["clip_high"]) if a >= 0 else min(max(rho, 1 - p["clip_low"]), p["cap"])
    if name == "double_sided":
        return rho if 1 - p["window_low"] < rho < 1 + p["window_high"] else 0.0
    if name == "sigmoid":
        tau = p["tau_positive"] if a >= 0 else p["tau_negative"]
        return 4 / tau / (1 + math.exp(-tau * (rho - 1)))
    if name == "probability_window":
        return rho if abs(rho * old - old) <= p["limit"] else 0.0
    if name == "total_variation":
        rho = min(rho, 1 + p["limit"] / old) if a >= 0 else max(rho, 1 - p["limit"] / old)
    if name in ("total_variation", "truncated"):
        return rho if rho <= p["cap"] else p["cap"] + p["cap"] * math.log(rho / p["cap"])
    x = p.get("tau", 1.0) * (rho - 1)
    return {
        "none": rho,
        "erf": 1 + math.sqrt(math.pi) / 2 * math.erf(x),
        "arctan": 1 + math.atan(x),
        "softsign": 1 + x / (1 + abs(x)),
    }[name]


def plain_kl(name: str, u: float, ratio: float, ell: float, n: int) -> float:
    k3 = math.exp(-u) + u - 1
    return {"loss_k1": u, "loss_k2": u * u / 2, "loss_k3": k3, "loss_k3_is": ratio * k3,
            "loss_k2_sequence": ell * ell / 2 / n}.get(name, 0.0)  # fmt: skip


def plain_advantages(case: Case, o: Objective) -> list[float]:
    shaped = []
    for i, n in enumerate(LENGTHS):
        r = case.rewards[i]
        if o.overlong_cache:
            r += max(-1.0, min(0.0, (LIMIT - o.overlong_cache - n) / o.overlong_cache))
        if o.kl == "reward":
            r -= o.beta * sum(a - b for a, b in zip(case.old[i], case.ref[i], strict=True))
        shaped.append(r)
    spread = lambda v: math.sqrt(sum((x - sum(v) / len(v)) ** 2 for x in v) / (len(v) - o.zscore_ddof))  # noqa: E731
    result = []
    for start in range(0, len(shaped), GROUP):
        group = shaped[start : start + GROUP]
        for i, r in enumerate(group):
            others = [x for j, x in enumerate(group) if j != i]
            centered = r - sum(group) / GROUP
            result.append({
                "leave_one_out": r - sum(others) / len(others), "center": centered,
                "zscore": centered / (spread(group) + 1e-4), "batch_zscore": centered / (spread(shaped) + 1e-4),
            }[o.advantage])  # fmt: skip
    return result


def plain_correction(case: Case, o: Objective) -> Rows:
    logs = [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(case.old, case.rollout, strict=True)]
    p = o.correction_options
    if o.correction == "none":
        return [[1.0] * len(row) for row in logs]
    if o.correction == "m2po":
        flat = sorted(x * x for row in logs for x in row)
        keep = max((k for k in range(len(flat) + 1) if sum(flat[:k]) <= p["limit"] * k), default=0)
        edge = flat[keep - 1] if keep else -1.0
        return [[math.exp(x) if x * x <= edge else 0.0 for x in row] for row in logs]
    if o.correction.endswith("sequence"):
        logs = [[sum(row)] * len(row) for row in logs]
    if o.correction.startswith("tis"):
        return [[min(math.exp(x), p["cap"]) for x in row] for row in logs]
    return [[math.exp(x) if p["low"] <= math.exp(x) <= p["high"] else 0.0 for x in row] for row in logs]


def as_batch(case: Case) -> tuple[TrainBatch, torch.Tensor]:
    pad = lambda rows: torch.nn.utils.rnn.pad_sequence([torch.tensor(r, dtype=torch.float64) for r in rows], True)  # noqa: E731
    mask = pad([[1.0] * n for n in LENGTHS])
    ids = torch.zeros(mask.shape, dtype=torch.long)
    tokens = TokenBatch(
        input_ids=ids, attention_mask=ids, predict_from=ids, completion_ids=ids, completion_mask=mask,
        rollout_logprobs=pad(case.rollout), rewards=torch.tensor(case.rewards, dtype=torch.float64),
        truncated=torch.tensor(TRUNCATED), group_ids=torch.arange(len(LENGTHS)) // GROUP,
        prompt_lengths=torch.ones(len(LENGTHS), dtype=torch.long), weight_versions=torch.zeros(len(LENGTHS)),
    )  # fmt: skip
    return TrainBatch(tokens, pad(case.old), pad(case.ref)), pad(case.new)


def moved(rows: Rows, i: int, t: int, distance: float) -> Rows:
    return [[v + distance * (a == i and b == t) for b, v in enumerate(row)] for a, row in enumerate(rows)]


def check(case: Case, o: Objective) -> None:
    gate = build_gate(o.gate, o.gate_options, o.level)
    batch, new = as_batch(case)
    new.requires_grad_()
    totals = BatchTotals(len(LENGTHS), float(trained_mask(batch.tokens, o).sum()))
    inputs = loss_inputs(batch, batch_advantages(batch, o), o, totals)
    loss = policy_loss(new, inputs, o, gate)
    (gradient,) = torch.autograd.grad(loss, new)
    options = {name: float(getattr(gate, name)) for name in (field.name for field in fields(gate))}
    assert loss.item() == pytest.approx(plain_loss(case, case.new, o, options), abs=1e-12)
    h = 1e-6
    for i, n in enumerate(LENGTHS):
        assert gradient[i, n:].abs().sum() == 0
        for t in range(n):
            up, down = (plain_loss(case, moved(case.new, i, t, d), o, options) for d in (h, -h))
            slope = (up - down) / (2 * h)
            assert gradient[i, t].item() == pytest.approx(slope, abs=1e-8), (i, t)


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("spread", [0.05, 0.8])
def test_every_paper_row(method: str, spread: float) -> None:
    row = METHODS[method]
    check(
        make_case(3, spread),
        Objective(
            beta=BETA, gate=row.gate, gate_options=row.gate_options, level=row.level, advantage=row.advantage, kl=row.kl,
            aggregate=row.aggregate, old=row.old, overlong_cache=2 if row.overlong_share else 0, max_tokens=LIMIT,
        ),
    )  # fmt: skip


KL = ["reward", "loss_k1", "loss_k2", "loss_k3", "loss_k3_is", "loss_k2_sequence", "none"]
AGGREGATE = ["token_mean", "sequence_mean", "sequence_sum", "constant_length"]
ADVANTAGE = ["leave_one_out", "center", "zscore", "batch_zscore"]
GATES = ["clip", "dual_clip", "sigmoid", "truncated", "erf", "arctan", "softsign", "none"]


@pytest.mark.parametrize("kl, aggregate", itertools.product(KL, AGGREGATE))
def test_every_kl_with_every_aggregate(kl: str, aggregate: str) -> None:
    o = Objective(beta=BETA, gate="clip", kl=kl, aggregate=aggregate, max_tokens=LIMIT)  # type: ignore[arg-type]
    check(make_case(5, 0.3), o)


@pytest.mark.parametrize("advantage, ddof, masked", itertools.product(ADVANTAGE, [0, 1], [False, True]))
def test_every_advantage(advantage: str, ddof: int, masked: bool) -> None:
    o = Objective(
        beta=BETA, gate="dual_clip", advantage=advantage, zscore_ddof=ddof, mask_truncated=masked, max_tokens=LIMIT
    )  # type: ignore[arg-type]
    check(make_case(7, 0.3), o)


@pytest.mark.parametrize("correction", sorted(CORRECTION_OPTIONS))
def test_every_correction(correction: str) -> None:
    options = CORRECTION_OPTIONS[correction]  # type: ignore[index]
    o = Objective(beta=BETA, gate="clip", correction=correction, correction_options=options, max_tokens=LIMIT)  # type: ignore[arg-type]
    check(make_case(11, 0.3), o)


@pytest.mark.parametrize("level, gate", itertools.product(["sequence", "sequence_token", "geometric_mean"], GATES))
def test_every_level_with_every_gate(level: str, gate: str) -> None:
    check(make_case(13, 0.4), Objective(beta=BETA, gate=gate, level=level, max_tokens=LIMIT))  # type: ignore[arg-type]
