"""Log-probabilities of sampled tokens under a model, [n, C], without the vocabulary-wide log-softmax of a whole batch.

Two layouts of the forward give the same numbers: padded rows, or the prompt once per group with its cache repeated over
the siblings (gradients flow through the cache). The output head then runs over chunks of tokens, again in backward.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from grpo_lab.types import TokenBatch

CHUNK_LOGITS = 2**26  # of one chunk, tokens x vocabulary: peak memory is the same for every vocabulary


@dataclass(frozen=True)
class TokenStatistics:
    """Per-token quantities of two models on the same tokens, [n, C], 0 off the mask; nats. `full_kl` sums the vocabulary."""

    logprobs: Tensor
    ref_logprobs: Tensor
    full_kl: Tensor
    entropy: Tensor

    def stack(self) -> Tensor:
        """The four in their order, [4, n, C]."""
        return torch.stack([self.logprobs, self.ref_logprobs, self.full_kl, self.entropy])


def completion_logprobs(model: nn.Module, tokens: TokenBatch, share_prompt: bool, temperature: float = 1.0) -> Tensor:
    """log pi(y_t | x, y_<t) of every completion token, [n, C] in fp32, 0 off the mask; differentiable.

    Siblings must be neighbours when `share_prompt`. Logits are divided by `temperature` first.
    """
    device = next(model.parameters()).device
    mask = tokens.completion_mask.to(device).bool()
    hidden = completion_hidden(model, tokens, share_prompt)[mask]
    head = model.get_output_embeddings()  # type: ignore[operator]
    bias = getattr(head, "bias", None)
    logprobs = _HeadLogprobs.apply(hidden, head.weight, bias, tokens.completion_ids.to(device)[mask], temperature)
    return torch.zeros(mask.shape, device=device).masked_scatter(mask, logprobs)


class _HeadLogprobs(torch.autograd.Function):
    """log softmax(h W^T / T)[y] of every token, [n] in fp32, from hidden states [n, H], weight [V, H] and targets y [n].

    The logits of a chunk of tokens exist once, forward and again backward, where d log p_y / d logit_v = (1[v = y] - p_v) / T.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
    ) -> Tensor:
        norms, picked = [], []
        size = _chunk_tokens(weight)
        for h, y in zip(hidden.split(size), targets.split(size), strict=True):
            logits = _logits(h, weight, bias, temperature)
            picked.append(logits.gather(1, y.unsqueeze(1)).squeeze(1))
            largest = logits.amax(dim=1, keepdim=True)
            norms.append(logits.sub_(largest).exp_().sum(dim=1).log_().add_(largest.squeeze(1)))
        norm = torch.cat(norms)
        ctx.save_for_backward(hidden, weight, bias, targets, norm)
        ctx.temperature = temperature
        return torch.cat(picked) - norm

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, targets, norm = ctx.saved_tensors
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        to_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        for rows in torch.arange(len(hidden), device=hidden.device).split(_chunk_tokens(weight)):
            h, y, scale = hidden[rows], targets[rows], gradient[rows].unsqueeze(1) / ctx.temperature
            probs = _logits(h, weight, bias, ctx.temperature).sub_(norm[rows].unsqueeze(1)).exp_()
            to_logits = probs.mul_(-scale).scatter_add_(1, y.unsqueeze(1), scale).to(h.dtype)
            if to_hidden is not None:
                to_hidden[rows] = to_logits @ weight
            if to_weight is not None:
                to_weight.addmm_(to_logits.t(), h)
            if to_bias is not None:
                to_bias += to_logits.sum(dim=0)
        return to_hidden, to_weight, to_bias, None, None


@torch.no_grad()
def token_statistics(
    policy_hidden: Tensor, ref_hidden: Tensor, heads: tuple[nn.Module, nn.Module], tokens: TokenBatch
) -> TokenStatistics:
    """Log-probs under both models, the full-vocabulary KL(pi || pi_ref) and the entropy at each token.

    Source of the Rao-Blackwellised KL, sum_t full_kl: Amini et al. 2504.10637. Hidden states are [n, C, H].
    """
    mask = tokens.completion_mask.to(policy_hidden.device).bool()
    targets = tokens.completion_ids.to(policy_hidden.device)[mask]
    columns: list[list[Tensor]] = [[], [], [], []]
    size = _chunk_tokens(heads[0].weight)  # type: ignore[arg-type]
    chunks = zip(*(x.split(size) for x in (policy_hidden[mask], ref_hidden[mask], targets)), strict=True)
    for hidden, reference, target in chunks:
        log_pi = torch.log_softmax(heads[0](hidden).float(), dim=-1)
        log_ref = torch.log_softmax(heads[1](reference).float(), dim=-1)
        pi = log_pi.exp()
        columns[0].append(log_pi.gather(1, target.unsqueeze(1)).squeeze(1))
        columns[1].append(log_ref.gather(1, target.unsqueeze(1)).squeeze(1))
        columns[2].append((pi * (log_pi - log_ref)).sum(dim=1))
        columns[3].append(-(pi * log_pi).sum(dim=1))
    blank = torch.zeros(mask.shape, device=mask.device)
    return TokenStatistics(*(blank.masked_scatter(mask, torch.cat(column)).cpu() for column in columns))


def completion_hidden(model: nn.Module, tokens: TokenBatch, share_prompt: bool) -> Tensor:
    """Last hidden states that predict each completion token, [n, C, H]."""
    device = next(model.parameters()).device
    if share_prompt:
        return _hidden_shared_prompts(model, tokens, device)
    decoder = model.get_decoder()  # type: ignore[operator]
    attention_mask = tokens.attention_mask.to(device)
    hidden = decoder(tokens.input_ids.to(device), attention_mask=attention_mask, use_cache=False).last_hidden_state
    index = tokens.predict_from.to(device).unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
    return hidden.gather(1, index)


def _hidden_shared_prompts(model: nn.Module, tokens: TokenBatch, device: torch.device) -> Tensor:
    """Each group's prompt runs once; its cache, repeated over the group's rows, is continued by their completions."""
    decoder = model.get_decoder()  # type: ignore[operator]
    _, place, counts = tokens.group_ids.unique_consecutive(return_inverse=True, return_counts=True)
    leaders = counts.cumsum(dim=0) - counts
    lengths = tokens.prompt_lengths[leaders]
    # right of a shorter prompt stand tokens that nothing before them sees, and that are masked from here on
    prompt = decoder(
        tokens.input_ids[leaders, : int(lengths.max())].to(device), past_key_values=DynamicCache(), use_cache=True
    )
    place = place.to(device)
    first = prompt.last_hidden_state[torch.arange(len(lengths), device=device), lengths.to(device) - 1]
    if tokens.completion_ids.shape[1] == 1:
        return first[place].unsqueeze(1)
    cache = prompt.past_key_values
    if len(set(counts.tolist())) == 1:
        cache.batch_repeat_interleave(int(counts[0]))
    else:
        cache.batch_select_indices(place)
    continued = tokens.completion_mask[:, 1:].long()
    starts = tokens.prompt_lengths.unsqueeze(1)
    seen = torch.arange(int(lengths.max())) < starts
    rest = decoder(
        tokens.completion_ids[:, :-1].to(device),
        attention_mask=torch.cat([seen.long(), continued], dim=1).to(device),
        position_ids=(starts + torch.arange(continued.shape[1])).to(device),
        past_key_values=cache,
        use_cache=True,
    )
    return torch.cat([first[place].unsqueeze(1), rest.last_hidden_state], dim=1)


def _chunk_tokens(weight: Tensor) -> int:
    return max(1, CHUNK_LOGITS // weight.shape[0])


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return logits if temperature == 1 else logits.div_(temperature)
