"""Micro-batches: every row once, within the budget, and no other split of the sorted rows costs less."""

import itertools
import random

import pytest
import torch

from grpo_lab.learner.collate import collate
from grpo_lab.learner.packing import count_tokens, plan_microbatches
from grpo_lab.types import Completion, Grade, Problem, RolloutGroup, TokenBatch


def batch(lengths: list[list[int]], prompts: list[int]) -> TokenBatch:
    return collate(
        [
            RolloutGroup(
                Problem("", (), ""),
                tuple(range(prompt)),
                tuple(Completion((1,) * n, (0.0,) * n, "", "stop", 0) for n in group),
                (Grade(0.0, "wrong"),) * len(group),
            )
            for group, prompt in zip(lengths, prompts, strict=True)
        ]
    )


def cost(lengths: list[int], sizes: tuple[int, ...], prompt: int, budget: int) -> float:
    """Of neighbouring parts, by the definition; infinite over the budget."""
    total, start = 0.0, 0
    for size in sizes:
        run = prompt + size * lengths[start]
        total += run + budget / 32 if run <= budget or size == 1 else float("inf")
        start += size
    return total


@pytest.mark.parametrize("seed", range(5))
def test_the_cheapest_split(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 60) for _ in range(8)]
    prompt, budget = rng.randint(1, 20), rng.randint(40, 250)
    plan = plan_microbatches(batch([lengths], [prompt]), torch.arange(8), budget, share_prompt=True)
    ordered = sorted((length - 1 for length in lengths), reverse=True)
    splits = (split for n in range(1, 9) for split in itertools.product(range(1, 9), repeat=n) if sum(split) == 8)
    chosen = cost(ordered, tuple(len(rows) for rows in plan), prompt, budget)
    assert chosen == pytest.approx(min(cost(ordered, split, prompt, budget) for split in splits))


@pytest.mark.parametrize("share_prompt", [True, False])
def test_every_row_once_within_the_budget(share_prompt: bool) -> None:
    rng = random.Random(0)
    tokens = batch([[rng.randint(1, 90) for _ in range(6)] for _ in range(5)], [rng.randint(2, 40) for _ in range(5)])
    rows = torch.tensor([i for i in range(30) if i % 7])
    plan = plan_microbatches(tokens, rows, 200, share_prompt)
    assert sorted(torch.cat(plan).tolist()) == rows.tolist()
    for part in plan:
        assert count_tokens(tokens, part, share_prompt).run <= 200 or len(part) == 1
        groups = tokens.group_ids[part]
        assert not share_prompt or len(groups.unique_consecutive()) == len(groups.unique()), "siblings are neighbours"
    assert plan_microbatches(tokens, rows[:0], 200, share_prompt) == []


def test_small_groups_share_a_micro_batch_and_large_ones_do_not() -> None:
    tokens = batch([[9, 5], [8, 6], [9, 4]], [10, 12, 11])
    everything = torch.arange(6)
    assert len(plan_microbatches(tokens, everything, 1000, share_prompt=True)) == 1
    packing = count_tokens(tokens, everything, share_prompt=True)
    assert (packing.real, packing.run) == (10 + 12 + 11 + 41 - 6, 3 * 12 + 6 * 8)
    apart = plan_microbatches(tokens, everything, 30, share_prompt=True)
    assert all(len(set(tokens.group_ids[part].tolist())) == 1 for part in apart)


def test_counts() -> None:
    tokens = batch([[3, 5]], [10])
    shared, apart = (count_tokens(tokens, torch.arange(2), share) for share in (True, False))
    assert (shared.real, shared.run, shared.apart) == (10 + 2 + 4, 10 + 2 * 4, 2 * 10 + 2 + 4)
    assert (apart.real, apart.run, apart.apart) == (26, 2 * 14, 26)
