"""Log-probabilities of sampled tokens under a model, [n, C], without the vocabulary-wide log-softmax of a whole batch.

Two layouts of the forward give the same numbers: padded rows, or the prompt once per group with its cache repeated over
the siblings (gradients flow through the cache). The output head then runs over chunks of tokens, again in backward.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from grpo_lab.types import TokenBatch

CHUNK_LOGITS = 2**26  # of one chunk, tokens x vocabulary: peak memory is the same for every vocabulary
_CACHED_LOGITS = 2**19  # of the rows that a CPU works on at a time, so that they stay in its cache


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
            for logits, labels in _in_cache(torch.nn.functional.linear(h, weight, bias), y):
                scaled = _scaled(logits, temperature)
                picked.append(scaled.gather(1, labels.unsqueeze(1)).squeeze(1))
                largest = scaled.amax(dim=1, keepdim=True)
                norms.append(scaled.sub_(largest).exp_().sum(dim=1).log_().add_(largest.squeeze(1)))
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
            h = hidden[rows]
            to_logits = torch.nn.functional.linear(h, weight, bias)
            scale = gradient[rows].unsqueeze(1) / ctx.temperature
            for logits, y, z, g in _in_cache(to_logits, targets[rows].unsqueeze(1), norm[rows].unsqueeze(1), scale):
                probs = _scaled(logits, ctx.temperature).sub_(z).exp_()
                logits.copy_(probs.mul_(-g).scatter_add_(1, y, g))
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
    rows = []
    size = _chunk_tokens(heads[0].weight)  # type: ignore[arg-type]
    chunks = zip(*(x.split(size) for x in (policy_hidden[mask], ref_hidden[mask], targets)), strict=True)
    for hidden, reference, target in chunks:
        rows += [_compare(*block) for block in _in_cache(heads[0](hidden), heads[1](reference), target.unsqueeze(1))]
    found = torch.cat(rows, dim=1)
    blank = torch.zeros(mask.shape, device=mask.device)
    return TokenStatistics(*(blank.masked_scatter(mask, column).cpu() for column in found))


def _compare(logits: Tensor, ref_logits: Tensor, targets: Tensor) -> Tensor:
    """The four rows of TokenStatistics, [4, n], from logits [n, V], which are used up, and targets [n, 1].

    With a, b the logits below their largest and Z the sums of their exponentials: log p = a - log Z_a, the entropy is
    log Z_a - E_p[a], and the KL is E_p[a - b] - (log Z_a - log Z_b).
    """
    policy, reference = (_scaled(x, 1.0) for x in (logits, ref_logits))
    for below in (policy, reference):
        below.sub_(below.amax(dim=1, keepdim=True))
    picked = policy.gather(1, targets).squeeze(1), reference.gather(1, targets).squeeze(1)
    probs = policy.exp()
    total = probs.sum(dim=1)
    norm = total.log()
    mean = torch.linalg.vecdot(probs, policy) / total
    shift = torch.linalg.vecdot(probs, policy.sub_(reference)) / total
    ref_norm = reference.exp_().sum(dim=1).log_()
    return torch.stack([picked[0] - norm, picked[1] - ref_norm, shift - (norm - ref_norm), norm - mean])


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


def _in_cache(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of neighbouring rows of all: few enough on a CPU for pass after pass to find them in its cache."""
    rows = max(1, _CACHED_LOGITS // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(logits))
    return zip(*(x.split(rows) for x in (logits, *others)), strict=True)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """In fp32, over the temperature; in place where they are fp32 already."""
    logits = logits.float()
    return logits if temperature == 1 else logits.div_(temperature)
