"""The learner on a real (tiny) model: log-probs and gradients against plain transformers, whatever the batching."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from learner_cases import make_groups, make_learner
from transformers import AutoModelForCausalLM

from grpo_lab.learner import logprobs
from grpo_lab.learner.collate import collate, select
from grpo_lab.learner.gradient import NonFiniteError
from grpo_lab.learner.logprobs import completion_logprobs
from grpo_lab.learner.packing import plan_microbatches
from grpo_lab.objective.advantages import batch_advantages
from grpo_lab.types import Completion, RolloutGroup, TrainBatch


def plain_logprobs(model: torch.nn.Module, group: RolloutGroup, completion: Completion) -> torch.Tensor:
    """Straight from the definition: one unpadded sequence, full log-softmax."""
    ids = torch.tensor([[*group.prompt_ids, *completion.token_ids]])
    logits = model(ids).logits[0, len(group.prompt_ids) - 1 : -1]
    return torch.log_softmax(logits.float(), dim=-1).gather(1, torch.tensor(completion.token_ids).unsqueeze(1))[:, 0]


@pytest.mark.parametrize("share_prompt", [True, False])
def test_logprobs_equal_plain_transformers(tiny_model: Path, share_prompt: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    groups = make_groups()
    tokens = collate(groups)
    completions = [(group, completion) for group in groups for completion in group.completions]
    for rows in plan_microbatches(tokens, torch.arange(tokens.num_sequences), 60, share_prompt):
        got = completion_logprobs(model, select(tokens, rows), share_prompt)
        for row, index in zip(got, rows.tolist(), strict=True):
            wanted = plain_logprobs(model, *completions[index])
            assert torch.allclose(row[: len(wanted)], wanted, atol=1e-4)
            assert row[len(wanted) :].abs().max() == 0 if len(row) > len(wanted) else True


def gradients(
    model: Path, groups: list[RolloutGroup], rows: torch.Tensor | None = None, **learner: object
) -> dict[str, torch.Tensor]:
    """The gradient by parameter; `rows` says which advantage each sequence has, when the groups come in another order."""
    built = make_learner(model, **learner)  # type: ignore[arg-type]
    batch = built.annotate(collate(groups))
    batch = replace(batch, old_logprobs=batch.old_logprobs - 0.1 * batch.tokens.completion_mask)
    everything = torch.arange(batch.tokens.num_sequences)
    advantages = torch.linspace(-1, 1, len(everything))[everything if rows is None else rows]
    built.gradient.of(batch, advantages, everything, batch.old_logprobs.clone(), 0)
    return {name: parameter.grad.clone() for name, parameter in built.policy.trainable().items()}  # type: ignore[union-attr]


@pytest.mark.parametrize("learner", [
    {"microbatch_tokens": 20},
    {"microbatch_tokens": 10_000, "share_prompt": False},
    {"microbatch_tokens": 40, "share_prompt": False},
    {"microbatch_tokens": 40, "gradient_checkpointing": True},
])  # fmt: skip
def test_gradient_does_not_depend_on_batching(tiny_model: Path, learner: dict[str, object]) -> None:
    wanted, got = (
        gradients(tiny_model, make_groups(), microbatch_tokens=10_000),
        gradients(tiny_model, make_groups(), **learner),
    )
    size = torch.cat([g.flatten() for g in wanted.values()]).norm()
    assert size > 0
    for name in wanted:
        assert (wanted[name] - got[name]).norm() / size < 1e-5, name


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_head_and_its_gradient(monkeypatch: pytest.MonkeyPatch, temperature: float, with_bias: bool) -> None:
    """Log-probs from hidden states against torch's own log-softmax and autograd, in chunks of two tokens."""
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", 2 * 11)
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((7, 5), (11, 5), (11,)))
    targets, pull = torch.randint(11, (7,), generator=generator), torch.randn(7, generator=generator)
    leaves = [t.requires_grad_() for t in ((hidden, weight, bias) if with_bias else (hidden, weight))]
    got = logprobs._HeadLogprobs.apply(hidden, weight, bias if with_bias else None, targets, temperature)
    logits = torch.nn.functional.linear(hidden, weight, bias if with_bias else None) / temperature
    wanted = torch.log_softmax(logits, dim=1).gather(1, targets.unsqueeze(1)).squeeze(1)
    assert torch.allclose(got, wanted, atol=1e-6)
    for one, other in zip(
        torch.autograd.grad(got @ pull, leaves), torch.autograd.grad(wanted @ pull, leaves), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-5)


def test_chunks_of_the_vocabulary_change_nothing(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = gradients(tiny_model, make_groups())
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", 3 * 49152)  # three tokens a chunk
    got = gradients(tiny_model, make_groups())
    size = torch.cat([g.flatten() for g in wanted.values()]).norm()
    assert max(float((wanted[name] - got[name]).norm() / size) for name in wanted) < 1e-5


@pytest.mark.parametrize("method, objective", [
    ("gspo", {}),
    ("gmpo", {"aggregate": "sequence_mean"}),
    ("gspo_token", {"kl": "loss_k2_sequence", "aggregate": "token_mean"}),
    ("luspo", {"correction": "mis_sequence", "correction_options": {"low": 1e-3, "high": 1e3}}),
    ("cispo", {"correction": "m2po", "correction_options": {"limit": 0.02}, "mask_truncated": True}),
    ("dppo_tv", {"advantage": "batch_zscore", "kl": "loss_k3_is", "aggregate": "sequence_sum"}),
])  # fmt: skip
def test_no_objective_depends_on_splits_or_order(tiny_model: Path, method: str, objective: dict[str, object]) -> None:
    """Micro-batches of other sizes and the groups in another order leave the gradient of every level and correction."""
    groups = make_groups()
    wanted = gradients(tiny_model, groups, method=method, objective=objective, microbatch_tokens=10_000)
    size = torch.cat([g.flatten() for g in wanted.values()]).norm()
    assert size > 0
    order = [2, 0, 1]
    rows = torch.arange(12).view(3, 4)[order].flatten()
    for got in (
        gradients(tiny_model, groups, method=method, objective=objective, microbatch_tokens=40),
        gradients(tiny_model, [groups[i] for i in order], rows, method=method, objective=objective, share_prompt=False),
    ):
        assert max(float((wanted[name] - got[name]).norm() / size) for name in wanted) < 1e-5


@pytest.mark.parametrize("method, objective, learner", [
    ("dapo", {}, {}),
    ("dapo", {}, {"share_prompt": False}),
    ("dapo", {}, {"microbatch_tokens": 30}),  # groups that do not fit run twice
    ("sao", {}, {"microbatch_tokens": 40}),
    ("gspo", {"kl": "loss_k3", "correction": "tis"}, {"microbatch_tokens": 20}),
    ("grpo", {"advantage": "zscore", "aggregate": "token_mean", "mask_truncated": True}, {"lora_rank": 4}),
    ("grpo", {"advantage": "batch_zscore"}, {}),  # looks at the whole batch: two forwards
])  # fmt: skip
def test_one_forward_gives_logprobs_and_gradient(
    tiny_model: Path, method: str, objective: dict[str, object], learner: dict[str, object]
) -> None:
    """Of one update a batch, `prepare` leaves the gradient that `update` would compute, and the same log-probs."""
    tokens = collate(make_groups())
    twice, once = (make_learner(tiny_model, method, dict(objective), **learner) for _ in range(2))
    wanted, got = twice.annotate(tokens), once.prepare(tokens)
    assert torch.allclose(wanted.old_logprobs, got.old_logprobs, atol=1e-5)
    assert torch.allclose(wanted.ref_logprobs, got.ref_logprobs, atol=1e-5)
    advantages = batch_advantages(wanted, twice.gradient.objective)
    waiting = {name: None if p.grad is None else p.grad.clone() for name, p in once.policy.trainable().items()}
    reports = [built.update(batch, advantages, 0) for built, batch in ((twice, wanted), (once, got))]
    for name, value in reports[0].metrics.items():
        assert reports[1].metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    again = make_learner(tiny_model, method, dict(objective), **learner)
    again.gradient.of(wanted, advantages, torch.arange(12), wanted.old_logprobs.clone())
    expected = {name: p.grad for name, p in again.policy.trainable().items()}
    size = torch.cat([g.flatten() for g in expected.values() if g is not None]).norm()
    assert size > 0 and (objective.get("advantage") == "batch_zscore") == all(g is None for g in waiting.values())
    for name, gradient in waiting.items():
        if gradient is not None:
            assert (gradient - expected[name]).norm() / size < 1e-5, name


def test_a_waiting_gradient_of_other_advantages_is_not_used(tiny_model: Path) -> None:
    tokens = collate(make_groups())
    once, twice = make_learner(tiny_model), make_learner(tiny_model)
    advantages = torch.linspace(-1, 1, 12)
    reports = [once.update(once.prepare(tokens), advantages, 0), twice.update(twice.annotate(tokens), advantages, 0)]
    assert reports[0].metrics == pytest.approx(reports[1].metrics, rel=1e-5)


def test_gradient_equals_plain_torch(tiny_model: Path) -> None:
    """The whole loss written out for DAPO's clip on unpadded sequences: -1/(N L) sum min(rho A, clip(rho) A)."""
    groups = make_groups()
    got = gradients(tiny_model, groups)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    loss = torch.zeros(())
    rows = [(group, completion) for group in groups for completion in group.completions]
    for advantage, (group, completion) in zip(torch.linspace(-1, 1, len(rows)), rows, strict=True):
        logprobs = plain_logprobs(model, group, completion)
        ratio = torch.exp(logprobs - (logprobs.detach() - 0.1))
        clipped = ratio.clamp(1 - 0.2, 1 + 0.2)
        loss = loss - torch.minimum(ratio * advantage, clipped * advantage).sum() / (len(rows) * 16)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(got[name], parameter.grad, atol=1e-6, rtol=1e-4), name  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_masters_cast_to_the_model_and_carry_small_steps(tiny_model: Path, dtype: str) -> None:
    """The model is the masters' cast, before and after steps far below its rounding, and most of a step arrives in it."""
    built = make_learner(tiny_model, dtype=dtype)
    for name, parameter in built.policy.trainable().items():
        assert torch.equal(built.masters.masters[name].to(parameter.dtype), parameter)
    batch = built.annotate(collate(make_groups()))
    report = built.update(batch, torch.linspace(-1, 1, 12), 0)
    for name, parameter in built.policy.trainable().items():
        assert torch.equal(built.masters.masters[name].to(parameter.dtype), parameter)
    assert abs(report.metrics["rollout/update_absorbed"]) < 0.5


def test_non_finite_advantages_stop_before_the_step(tiny_model: Path) -> None:
    built = make_learner(tiny_model)
    before = {name: p.detach().clone() for name, p in built.policy.trainable().items()}
    batch: TrainBatch = built.annotate(collate(make_groups()))
    advantages = torch.zeros(12)
    advantages[3] = float("nan")
    with pytest.raises(NonFiniteError, match="step 8: the loss is not finite"):
        built.update(batch, advantages, 7)
    assert all(torch.equal(before[name], p) for name, p in built.policy.trainable().items())


def test_policy_starts_at_the_reference(tiny_model: Path) -> None:
    built = make_learner(tiny_model, dtype="bfloat16")
    batch = built.annotate(collate(make_groups()))
    assert torch.equal(batch.old_logprobs, batch.ref_logprobs)
    statistics = built.statistics(batch.tokens)
    assert statistics.full_kl.abs().max() < 1e-6
    assert (statistics.entropy[batch.tokens.completion_mask.bool()] > 0).all()
