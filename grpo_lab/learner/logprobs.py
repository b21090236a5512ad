"""Log-probabilities of sampled tokens under a model, [n, C], without the vocabulary-wide log-softmax of a whole batch.

Two layouts of the forward give the same numbers: padded rows, or the prompt once per group with its cache repeated over
the siblings (gradients flow through the cache). The output head then runs over chunks of tokens, recomputed in backward.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
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

    `tokens` must be siblings of one prompt when `share_prompt`. Logits are divided by `temperature` first.
    """
    device = next(model.parameters()).device
    mask = tokens.completion_mask.to(device).bool()
    hidden = completion_hidden(model, tokens, share_prompt)[mask]
    targets = tokens.completion_ids.to(device)[mask]
    head = model.get_output_embeddings()  # type: ignore[operator]
    size = _chunk_tokens(head)
    pieces = [
        checkpoint(_chunk_logprobs, head, h, t, temperature, use_reentrant=False)
        for h, t in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    return torch.zeros(mask.shape, device=device).masked_scatter(mask, torch.cat(pieces))


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
    size = _chunk_tokens(heads[0])
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
        return _hidden_shared_prompt(model, tokens, device)
    decoder = model.get_decoder()  # type: ignore[operator]
    attention_mask = tokens.attention_mask.to(device)
    hidden = decoder(tokens.input_ids.to(device), attention_mask=attention_mask, use_cache=False).last_hidden_state
    index = tokens.predict_from.to(device).unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
    return hidden.gather(1, index)


def _hidden_shared_prompt(model: nn.Module, tokens: TokenBatch, device: torch.device) -> Tensor:
    assert (tokens.group_ids == tokens.group_ids[0]).all(), "a shared prompt needs siblings of one group"
    decoder = model.get_decoder()  # type: ignore[operator]
    siblings, prompt_length = tokens.num_sequences, int(tokens.prompt_lengths[0])
    prompt = decoder(tokens.input_ids[:1, :prompt_length].to(device), past_key_values=DynamicCache(), use_cache=True)
    first = prompt.last_hidden_state[:, -1:].expand(siblings, -1, -1)
    if tokens.completion_ids.shape[1] == 1:
        return first
    cache = prompt.past_key_values
    cache.batch_repeat_interleave(siblings)
    continued = tokens.completion_mask[:, 1:].long().to(device)
    rest = decoder(
        tokens.completion_ids[:, :-1].to(device),
        attention_mask=torch.cat([continued.new_ones(siblings, prompt_length), continued], dim=1),
        position_ids=torch.arange(prompt_length, prompt_length + continued.shape[1], device=device).unsqueeze(0),
        past_key_values=cache,
        use_cache=True,
    )
    return torch.cat([first, rest.last_hidden_state], dim=1)


def _chunk_tokens(head: nn.Module) -> int:
    weight: Tensor = head.weight  # type: ignore[assignment]
    return max(1, CHUNK_LOGITS // weight.shape[0])


def _chunk_logprobs(head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
    logits = head(hidden).float() / temperature
    return logits.gather(1, targets.unsqueeze(1)).squeeze(1) - torch.logsumexp(logits, dim=1)
