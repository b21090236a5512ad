"""Rewards of a group -> advantages. The KL joins here when it belongs to the reward, and so does the overlong penalty."""

import torch
from torch import Tensor

from grpo_lab.config import AdvantageName
from grpo_lab.objective.axes import Objective
from grpo_lab.types import TrainBatch

ZSCORE_EPS = 1e-4


def batch_advantages(batch: TrainBatch, objective: Objective) -> Tensor:
    """The advantage of every sequence of a batch of whole groups, [N], detached."""
    return advantages(shaped_returns(batch, objective), objective.advantage, objective.zscore_ddof).flatten()


def shaped_returns(batch: TrainBatch, objective: Objective) -> Tensor:
    """R_i = r_i - beta * l_i with l_i = sum_t log pi_old - log pi_ref when the KL is in the reward, else r_i. [groups, G].

    Source: Ahmadian et al. 2402.14740 (shaped RLOO). -mean(R) is an unbiased estimate of F_beta. The overlong penalty, if
    any, is added.
    """
    returns = batch.tokens.rewards
    if objective.overlong_cache:
        lengths = batch.tokens.completion_mask.sum(dim=1)
        returns = returns + overlong_penalty(lengths, objective.max_tokens, objective.overlong_cache)
    if objective.kl == "reward":
        returns = returns - objective.beta * sequence_log_ratio(batch)
    return returns.view(-1, batch.tokens.group_size)


def sequence_log_ratio(batch: TrainBatch) -> Tensor:
    """l = log pi_old(y) - log pi_ref(y), summed over the completion with its stop token, [N] in nats."""
    return ((batch.old_logprobs - batch.ref_logprobs) * batch.tokens.completion_mask).sum(dim=1)


def overlong_penalty(lengths: Tensor, limit: int, cache: int) -> Tensor:
    """0 up to `limit - cache` tokens, then linearly down to -1 at `limit` and beyond; same shape as `lengths`.

    Source: DAPO's soft overlong punishment (Yu et al. 2503.14476 eq. 13).
    """
    return ((limit - cache - lengths) / cache).clamp(-1.0, 0.0)


def advantages(returns: Tensor, name: AdvantageName, ddof: int = 1, eps: float = ZSCORE_EPS) -> Tensor:
    """Advantages of returns [groups, G], same shape, detached.

    leave_one_out: R_i - mean of the others (Kool et al. 2019). center: R_i - mean (Liu et al. 2503.20783).
    zscore: (R_i - mean) / (std + eps) (Shao et al. 2402.03300; ddof and eps as in TRL). batch_zscore: the same with the std
    of all returns of the batch, one number for every prompt. Equal returns, and one alone, have advantage 0 exactly.
    """
    group_size = returns.shape[1]
    if group_size == 1:
        return torch.zeros_like(returns)
    apart = returns - returns[:, :1]  # exactly 0 where all are equal, while their mean is rounded
    centered = (apart - apart.mean(dim=1, keepdim=True)).detach()
    if name == "leave_one_out":
        return centered * (group_size / (group_size - 1))
    if name == "zscore":
        return centered / (torch.std(returns, dim=1, keepdim=True, correction=ddof) + eps)
    if name == "batch_zscore":
        return centered / (torch.std(returns, correction=ddof) + eps)
    return centered
