"""Which rows run together: micro-batches within a token budget, with as little padding as their lengths allow."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lab.types import TokenBatch

_FIXED_COST = 1 / 32  # of a micro-batch, as a share of the token budget: gathering gradients, launching kernels
_FULL = 3 / 4  # of the budget: as many tokens as groups that share micro-batches may have, padding left out


@dataclass(frozen=True)
class Packing:
    """Tokens of a plan: `real` are in it, `run` with padding, `apart` would be real if every row had its own prompt."""

    real: int
    run: int
    apart: int


def plan_microbatches(tokens: TokenBatch, rows: Tensor, budget: int, share_prompt: bool) -> list[Tensor]:
    """Split `rows` (indices [n]) into micro-batches of at most `budget` tokens, padding and shared prompts included.

    Rows of similar length run together, the longest first, such that the tokens run, plus a fixed cost of each micro-batch,
    are the fewest. With `share_prompt` a micro-batch runs each of its prompts once, and only groups that are small beside
    the budget share one. A single row may exceed the budget.
    """
    if not share_prompt:
        return _cheapest_parts(tokens, rows, budget, share_prompt)
    return [part for unit in plan_units(tokens, rows, budget, share_prompt) for part in unit]


def plan_units(tokens: TokenBatch, rows: Tensor, budget: int, share_prompt: bool) -> list[list[Tensor]]:
    """The same in units of whole groups: small groups that fit one micro-batch together, or the micro-batches of one group."""
    return [_cheapest_parts(tokens, members, budget, share_prompt) for members in _sets_of_groups(tokens, rows, budget)]


def _sets_of_groups(tokens: TokenBatch, rows: Tensor, budget: int) -> list[Tensor]:
    sets: list[Tensor] = []
    size = 0
    for group in tokens.group_ids[rows].unique():
        members = rows[tokens.group_ids[rows] == group]
        real = count_tokens(tokens, members, share_prompt=True).real
        if sets and size + real <= _FULL * budget:
            sets[-1] = torch.cat([sets[-1], members])
            size += real
        else:
            sets.append(members)
            size = real
    return sets


def _cheapest_parts(tokens: TokenBatch, rows: Tensor, budget: int, share_prompt: bool) -> list[Tensor]:
    """The cheapest split of `rows`, sorted by length, into neighbours; those of a group stand together in their part."""
    prompts, completions = _lengths(tokens, rows)
    lengths = completions if share_prompt else prompts + completions
    order = lengths.argsort(descending=True, stable=True)
    groups = tokens.group_ids[rows][order]
    owners = list(zip(groups.tolist(), prompts[order].tolist(), strict=True)) if share_prompt else []
    parts = rows[order].split(_cheapest_sizes(lengths[order].tolist(), owners, budget))
    return [part[tokens.group_ids[part].argsort(stable=True)] for part in parts] if share_prompt else list(parts)


def count_tokens(tokens: TokenBatch, rows: Tensor, share_prompt: bool) -> Packing:
    """The tokens of one micro-batch."""
    prompts, completions = _lengths(tokens, rows)
    apart = int((prompts + completions).sum())
    if share_prompt:
        own = dict(zip(tokens.group_ids[rows].tolist(), prompts.tolist(), strict=True)).values()
        run = len(own) * max(own) + len(rows) * int(completions.max())
        return Packing(sum(own) + int(completions.sum()), run, apart)
    return Packing(apart, len(rows) * int((prompts + completions).max()), apart)


def _lengths(tokens: TokenBatch, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Prompt and completion tokens that a forward runs over, [n] each: nothing is predicted from a completion's last token."""
    return tokens.prompt_lengths[rows], tokens.completion_mask[rows].sum(dim=1).long() - 1


def _cheapest_sizes(lengths: Sequence[int], owners: Sequence[tuple[int, int]], budget: int) -> list[int]:
    """Sizes of neighbouring parts of `lengths` (longest first) that cost the least in sum, each within the budget.

    `owners` are each row's group and its prompt's length, which a part pays once a group; empty where rows carry their own.
    """
    best, starts = [0.0], [0]
    for end in range(1, len(lengths) + 1):
        options = []
        prompts: dict[int, int] = {}
        for start in reversed(range(end)):
            if owners:
                prompts[owners[start][0]] = owners[start][1]
            run = len(prompts) * max(prompts.values(), default=0) + (end - start) * lengths[start]
            if run > budget and start < end - 1:
                break
            options.append((best[start] + run + _FIXED_COST * budget, start))
        cost, start = min(options)
        best.append(cost)
        starts.append(start)
    sizes, end = [], len(lengths)
    while end:
        sizes.append(end - starts[end])
        end = starts[end]
    return sizes[::-1]
