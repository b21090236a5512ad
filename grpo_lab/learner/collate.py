"""Groups -> TokenBatch on CPU, and rows of it -> smaller ones. The shift by one happens in `collate` and nowhere else."""

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_lab.types import RolloutGroup, TokenBatch


def collate(groups: Sequence[RolloutGroup], group_ids: Sequence[int] | None = None) -> TokenBatch:
    """Right-padded tensors of groups of equal size; the token ids are the sampled ones, never re-tokenised text.

    `group_ids` number the groups within the whole step; 0, 1, 2, ... when absent.
    """
    assert groups and len({len(group.completions) for group in groups}) == 1, "groups must be non-empty and of one size"
    numbers = list(group_ids) if group_ids is not None else list(range(len(groups)))
    rows = [
        (number, group.prompt_ids, completion)
        for number, group in zip(numbers, groups, strict=True)
        for completion in group.completions
    ]
    assert all(completion.token_ids for _, _, completion in rows), "every completion has at least one sampled token"
    prompt_lengths = torch.tensor([len(prompt) for _, prompt, _ in rows])
    lengths = torch.tensor([len(completion.token_ids) for _, _, completion in rows])
    columns = torch.arange(int(lengths.max()))
    mask = columns < lengths.unsqueeze(1)
    inputs = _pad([[*prompt, *completion.token_ids[:-1]] for _, prompt, completion in rows])
    return TokenBatch(
        input_ids=inputs,
        attention_mask=torch.arange(inputs.shape[1]) < (prompt_lengths + lengths - 1).unsqueeze(1),
        predict_from=(prompt_lengths.unsqueeze(1) - 1 + columns) * mask,
        completion_ids=_pad([completion.token_ids for _, _, completion in rows]),
        completion_mask=mask.float(),
        rollout_logprobs=_pad([completion.logprobs for _, _, completion in rows], torch.float32),
        rewards=torch.tensor([reward for group in groups for reward in group.rewards], dtype=torch.float32),
        truncated=torch.tensor([completion.truncated for _, _, completion in rows]),
        group_ids=torch.tensor([number for number, _, _ in rows]),
        prompt_lengths=prompt_lengths,
        weight_versions=torch.tensor([completion.weight_version for _, _, completion in rows]),
    )


def select(tokens: TokenBatch, rows: Tensor) -> TokenBatch:
    """The rows (indices [n]) of a batch as a batch of their own, trimmed to their longest.

    Two columns stay where the batch has them: every micro-batch takes the same number of forwards, on every rank.
    """
    completions = tokens.completion_mask[rows].sum(dim=1)
    length = int(max(tokens.prompt_lengths[rows] + completions, default=1)) - 1
    completion_length = max(2, int(max(completions, default=0)))
    return TokenBatch(
        input_ids=tokens.input_ids[rows, :length],
        attention_mask=tokens.attention_mask[rows, :length],
        predict_from=tokens.predict_from[rows, :completion_length],
        completion_ids=tokens.completion_ids[rows, :completion_length],
        completion_mask=tokens.completion_mask[rows, :completion_length],
        rollout_logprobs=tokens.rollout_logprobs[rows, :completion_length],
        rewards=tokens.rewards[rows],
        truncated=tokens.truncated[rows],
        group_ids=tokens.group_ids[rows],
        prompt_lengths=tokens.prompt_lengths[rows],
        weight_versions=tokens.weight_versions[rows],
    )


def _pad(rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.long) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)
