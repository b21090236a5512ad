"""Groups and batches -> the flat metrics of a step, by their logged names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_lab.objective.advantages import ZSCORE_EPS, overlong_penalty, shaped_returns
from grpo_lab.objective.axes import Objective
from grpo_lab.thermo.normalisation import std_gain
from grpo_lab.types import RolloutGroup, TrainBatch

if TYPE_CHECKING:
    from grpo_lab.rollout.ahead import SamplingTimes

OUTCOMES = ("unparsable", "truncated")


def rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Rewards, lengths and outcomes of the sampled groups."""
    rewards = [reward for group in groups for reward in group.rewards]
    grades = [grade for group in groups for grade in group.grades]
    lengths = [len(completion.token_ids) for group in groups for completion in group.completions]
    mean = sum(rewards) / len(rewards)
    shares = {f"completion/{name}": sum(g.outcome == name for g in grades) / len(grades) for name in OUTCOMES}
    return {
        "reward/mean": mean,
        "reward/std": (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5,
        "reward/zero_std_groups": sum(len(set(group.rewards)) == 1 for group in groups) / len(groups),
        "completion/length_mean": sum(lengths) / len(lengths),
        **shares,
    }


def batch_metrics(batch: TrainBatch, objective: Objective, version: int) -> dict[str, float]:
    """KL to the reference (k1, per sequence, nats), its standard error, F on the training batch, mismatch and staleness.

    `version` is the learner's. KL and F are of the policies that sampled: of older weights' completions the sampler's log-probs
    count, since an average of the current ones' over them is no KL (it can be negative). The error is of fixed prompts: the
    mean within-group variance over N (THEORY C.2), so it holds for few prompts too.
    """
    tokens, mask = batch.tokens, batch.tokens.completion_mask
    staleness = version - tokens.weight_versions
    sampled = torch.where((staleness == 0).unsqueeze(1), batch.old_logprobs, tokens.rollout_logprobs)
    groups = ((sampled - batch.ref_logprobs) * mask).sum(dim=1).double().view(-1, tokens.group_size)
    kl = float(groups.mean())
    metrics = {
        "policy/kl_ref": kl,
        "policy/kl_ref_se": float((groups.var(dim=1).mean() / groups.numel()).sqrt()),
        "policy/free_energy": objective.beta * kl - float(tokens.rewards.double().mean()),
        "rollout/staleness_mean": float(staleness.double().mean()),
        "rollout/staleness_max": float(staleness.max()),
        **_log_prob_differences(batch, staleness),
        **beta_eff_metrics(batch, objective),
    }
    if objective.overlong_cache:
        penalty = overlong_penalty(mask.sum(dim=1), objective.max_tokens, objective.overlong_cache)
        metrics["reward/overlong_penalty"] = float(penalty.mean())
    return metrics


def logprob_gap(one: Tensor, other: Tensor, mask: Tensor) -> tuple[float, float]:
    """Mean and largest |difference| of two [N, C] log-probs over the tokens of `mask`, nats."""
    gap = ((one - other) * mask).abs()
    return float(gap.sum() / mask.sum()), float(gap.max())


def _log_prob_differences(batch: TrainBatch, staleness: Tensor) -> dict[str, float]:
    """Mean and largest |learner - sampler| per token: `mismatch` over samples of the learner's own weights, which is rounding,
    `off_policy` over older ones', which is what training did since; each only where there are such samples."""
    differences: dict[str, float] = {}
    for name, rows in (("mismatch", staleness == 0), ("off_policy", staleness > 0)):
        if rows.any():
            mask = batch.tokens.completion_mask * rows.unsqueeze(1)
            mean, largest = logprob_gap(batch.old_logprobs, batch.tokens.rollout_logprobs, mask)
            differences |= {f"rollout/{name}_mean": mean, f"rollout/{name}_max": largest}
    return differences


def time_metrics(sampling: SamplingTimes, times: Mapping[str, float], tokens: int) -> dict[str, float]:
    """Seconds of a step's parts, who waited for whom, and completion tokens a second.

    Where sampling runs ahead, a step lasts as long as the learner waits for its batch and works on it.
    """
    spent = {"generate": sampling.generate, **times}
    if sampling.ahead:
        spent |= {"wait_rollouts": sampling.wait_rollouts, "wait_learner": sampling.wait_learner}
    speed = {f"time/{name}": round(seconds, 4) for name, seconds in spent.items()}
    speed["perf/overlap"] = round(sampling.overlap, 4)
    speed["perf/tokens_per_second"] = round(tokens / (sampling.wait_rollouts + sum(times.values())), 2)
    return speed


def beta_eff_metrics(batch: TrainBatch, objective: Objective) -> dict[str, float]:
    """Quantiles over groups of the temperature the loss really optimises: beta x std(r) under z-scores with KL in the loss.

    `beta_eff_expected` is its median with the std's sampling taken into account, beta / c_G(q) at each group's share q of
    right answers (binary rewards). Source: the std of a group divides the reward's gradient but not the KL's (Davis & Recht
    2510.13651, sec. 3).
    """
    rewards, group_size = batch.tokens.rewards.view(-1, batch.tokens.group_size), batch.tokens.group_size
    expected = {}
    if objective.kl in ("none", "loss_k1"):
        beta_eff = rewards.new_zeros(len(rewards))
    elif objective.kl_in_loss and objective.advantage == "zscore":
        spread = shaped_returns(batch, objective).std(dim=1, correction=objective.zscore_ddof)
        beta_eff = objective.beta * (spread + ZSCORE_EPS)
        if ((rewards == 0) | (rewards == 1)).all():
            gains = [std_gain(float(q), group_size, objective.zscore_ddof) for q in rewards.mean(dim=1)]
            expected = {"policy/beta_eff_expected": objective.beta / float(rewards.new_tensor(gains).median())}
    elif objective.kl_in_loss and objective.advantage == "batch_zscore":
        spread = shaped_returns(batch, objective).std(correction=objective.zscore_ddof)
        beta_eff = (objective.beta * (spread + ZSCORE_EPS)).expand(len(rewards))
    elif objective.kl_in_loss and objective.advantage == "center":
        beta_eff = rewards.new_full((len(rewards),), objective.beta * group_size / (group_size - 1))
    else:
        beta_eff = rewards.new_full((len(rewards),), objective.beta)
    return {f"policy/beta_eff_p{q}": float(beta_eff.quantile(q / 100)) for q in (10, 50, 90)} | expected
