"""Which rows run together: micro-batches within a token budget, with as little padding as their lengths allow."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from grpo_lab.types import TokenBatch

_FIXED_COST = 1 / 32  # of a micro-batch, as a share of the token budget: gathering gradients, launching kernels


@dataclass(frozen=True)
class Packing:
    """Tokens of a plan: `real` are in it, `run` with padding, `apart` would be real if every row had its own prompt."""

    real: int
    run: int
    apart: int


def plan_microbatches(tokens: TokenBatch, rows: Tensor, budget: int, share_prompt: bool) -> list[Tensor]:
    """Split `rows` (indices [n]) into micro-batches of at most `budget` tokens, padding and a shared prompt included.

    Rows of similar length run together, the longest first, such that the tokens run, plus a fixed cost of each micro-batch,
    are the fewest. With `share_prompt` a micro-batch holds siblings of one prompt, and groups stay in order. A single row
    may exceed the budget.
    """
    batches = []
    for members in _groups(tokens, rows) if share_prompt else [rows]:
        prompts, completions = _lengths(tokens, members)
        lengths = completions if share_prompt else prompts + completions
        order = lengths.argsort(descending=True, stable=True)
        sizes = _split(lengths[order].tolist(), int(prompts[0]) if share_prompt else 0, budget)
        batches += members[order].split(sizes)
    return batches


def count_tokens(tokens: TokenBatch, rows: Tensor, share_prompt: bool) -> Packing:
    """The tokens of one micro-batch."""
    prompts, completions = _lengths(tokens, rows)
    apart = int((prompts + completions).sum())
    if share_prompt:
        prompt = int(prompts[0])
        return Packing(prompt + int(completions.sum()), prompt + len(rows) * int(completions.max()), apart)
    return Packing(apart, len(rows) * int((prompts + completions).max()), apart)


def _groups(tokens: TokenBatch, rows: Tensor) -> Sequence[Tensor]:
    return [rows[tokens.group_ids[rows] == group] for group in tokens.group_ids[rows].unique()]


def _lengths(tokens: TokenBatch, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Prompt and completion tokens that a forward runs over, [n] each: nothing is predicted from a completion's last token."""
    return tokens.prompt_lengths[rows], tokens.completion_mask[rows].sum(dim=1).long() - 1


def _split(lengths: Sequence[int], prompt: int, budget: int) -> list[int]:
    """Sizes of neighbouring parts of `lengths` (longest first) that cost the least in sum, each within the budget."""
    best, starts = [0.0], [0]
    for end in range(1, len(lengths) + 1):
        options = []
        for start in reversed(range(end)):
            run = prompt + (end - start) * lengths[start]
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
