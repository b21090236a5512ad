"""Properties of batches: whatever the lengths, budgets and ranks, each token is in one place, once, and back in its order."""

from dataclasses import dataclass, fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab.learner.collate import collate, select
from grpo_lab.learner.packing import count_tokens, plan_microbatches, plan_units
from grpo_lab.learner.ranks import Ranks
from grpo_lab.types import Completion, Grade, Problem, RolloutGroup, TokenBatch

properties = settings(derandomize=True, deadline=None, max_examples=200, database=None)


@dataclass(frozen=True)
class Case:
    """Groups of equal size; no two tokens have the same id, but for the prompt that siblings share."""

    groups: tuple[RolloutGroup, ...]
    tokens: TokenBatch

    @property
    def rows(self) -> list[tuple[tuple[int, ...], Completion]]:
        return [(group.prompt_ids, completion) for group in self.groups for completion in group.completions]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(1, 5))
    length = st.one_of(st.integers(1, 4), st.integers(1, 60))
    shapes = draw(
        st.lists(st.tuples(st.integers(1, 40), st.lists(length, min_size=size, max_size=size)), min_size=1, max_size=6)
    )
    fresh = iter(range(1, 10**6))
    take = lambda n: tuple(next(fresh) for _ in range(n))  # noqa: E731
    groups = []
    for number, (prompt, lengths) in enumerate(shapes):
        ids = [take(n) for n in lengths]
        completions = tuple(
            Completion(i, tuple(-float(t) for t in i), "", "length" if i[0] % 3 else "stop", i[0] % 5) for i in ids
        )
        grades = tuple(Grade(float(i[0]), "wrong") for i in ids)
        groups.append(RolloutGroup(Problem(str(number), (), ""), take(prompt), completions, grades))
    return Case(tuple(groups), collate(groups))


def some_rows(draw: st.DrawFn | st.DataObject, tokens: TokenBatch) -> torch.Tensor:
    """Rows of some whole groups, as mini-batches have them."""
    chooser = draw.draw if isinstance(draw, st.DataObject) else draw
    numbers = tokens.group_ids.unique().tolist()
    chosen = chooser(st.lists(st.sampled_from(numbers), min_size=1, unique=True))
    return torch.isin(tokens.group_ids, torch.tensor(chosen)).nonzero().flatten()


def assert_is(tokens: TokenBatch, row: int, prompt: tuple[int, ...], completion: Completion) -> None:
    """Row `row` of a batch holds this completion of this prompt, and nothing else."""
    ids, n = completion.token_ids, len(completion.token_ids)
    mask, seen = tokens.completion_mask[row].bool(), tokens.attention_mask[row].bool()
    assert mask.tolist() == [t < n for t in range(len(mask))]
    assert tokens.input_ids[row][seen].tolist() == [*prompt, *ids[:-1]]
    assert seen.tolist() == [t < len(prompt) + n - 1 for t in range(len(seen))]
    assert tokens.completion_ids[row][mask].tolist() == list(ids)
    assert [(*prompt, *ids)[place + 1] for place in tokens.predict_from[row][mask].tolist()] == list(ids)
    assert tokens.rollout_logprobs[row][mask].tolist() == list(completion.logprobs)
    for padded in (tokens.rollout_logprobs, tokens.completion_ids, tokens.predict_from):
        assert padded[row][~mask].abs().sum() == 0
    assert tokens.rewards[row] == ids[0] and tokens.truncated[row] == completion.truncated
    assert tokens.weight_versions[row] == completion.weight_version and tokens.prompt_lengths[row] == len(prompt)


@given(cases())
@properties
def test_a_batch_holds_every_token_once_and_predicts_each_from_the_one_before(case: Case) -> None:
    tokens = case.tokens
    assert tokens.num_sequences == len(case.rows) and tokens.group_size == len(case.groups[0].completions)
    assert {len(getattr(tokens, field.name)) for field in fields(tokens)} == {len(case.rows)}
    for row, (prompt, completion) in enumerate(case.rows):
        assert_is(tokens, row, prompt, completion)
    assert int(tokens.completion_mask.sum()) == sum(len(completion.token_ids) for _, completion in case.rows)


@given(cases(), st.data(), st.integers(1, 400), st.booleans())
@properties
def test_micro_batches_hold_every_row_once_and_come_back_in_order(
    case: Case, data: st.DataObject, budget: int, share_prompt: bool
) -> None:
    tokens = case.tokens
    rows = some_rows(data, tokens)
    plan = plan_microbatches(tokens, rows, budget, share_prompt)
    assert sorted(torch.cat(plan).tolist()) == rows.tolist()
    back = torch.zeros_like(tokens.completion_ids)
    for members in plan:
        part = select(tokens, members)
        for place, row in enumerate(members.tolist()):
            assert_is(part, place, *case.rows[row])
        assert part.completion_ids.shape[1] <= max(2, int(part.completion_mask.sum(dim=1).max()))
        back[members, : part.completion_ids.shape[1]] = part.completion_ids
        assert len(members) == 1 or count_tokens(tokens, members, share_prompt).run <= budget
        groups = tokens.group_ids[members]
        assert not share_prompt or len(groups.unique_consecutive()) == len(groups.unique()), "siblings are neighbours"
    assert torch.equal(back[rows], tokens.completion_ids[rows])


@given(cases(), st.integers(1, 400))
@properties
def test_a_shared_prompt_runs_the_tokens_of_the_padded_rows(case: Case, budget: int) -> None:
    """The same rows, and so the same tokens, whichever way; a prompt counts once in each micro-batch that shares it."""
    tokens, everything = case.tokens, torch.arange(case.tokens.num_sequences)
    plans = {share: plan_microbatches(tokens, everything, budget, share) for share in (True, False)}
    sets = {
        share: sorted(
            token
            for members in plan
            for part in [select(tokens, members)]
            for row in range(len(members))
            for token in part.input_ids[row][part.attention_mask[row]].tolist()
        )
        for share, plan in plans.items()
    }
    assert sets[True] == sets[False]
    counts = {share: [count_tokens(tokens, members, share) for members in plan] for share, plan in plans.items()}
    apart = sum(len(prompt) + len(completion.token_ids) - 1 for prompt, completion in case.rows)
    assert {sum(count.apart for count in counted) for counted in counts.values()} == {apart}
    assert sum(count.real for count in counts[False]) == apart
    for members, count in zip(plans[True], counts[True], strict=True):
        prompts = {case.rows[row][0] for row in members.tolist()}
        continued = sum(len(case.rows[row][1].token_ids) - 1 for row in members.tolist())
        assert count.real == sum(map(len, prompts)) + continued <= count.run


@given(cases(), st.integers(1, 400), st.booleans())
@properties
def test_units_are_whole_groups(case: Case, budget: int, share_prompt: bool) -> None:
    tokens = case.tokens
    units = plan_units(tokens, torch.arange(tokens.num_sequences), budget, share_prompt)
    owners = [set(tokens.group_ids[torch.cat(unit)].tolist()) for unit in units]
    assert sum(map(len, owners)) == len(case.groups) == len(set.union(*owners))
    assert sorted(torch.cat([torch.cat(unit) for unit in units]).tolist()) == list(range(tokens.num_sequences))


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return Ranks()


@given(case=cases(), data=st.data(), count=st.integers(1, 7))
@properties
def test_ranks_share_whole_groups_evenly(ranks: Ranks, case: Case, data: st.DataObject, count: int) -> None:
    """Whoever has most has at most one group more than whoever has least; the answer is the same on every rank."""
    tokens, ranks.count = case.tokens, count
    rows = some_rows(data, tokens)
    try:
        shares = ranks.split(tokens, rows)
        again = ranks.split(tokens, rows.clone())
    finally:
        ranks.count = 1
    assert len(shares) == count and all(map(torch.equal, shares, again))
    assert sorted(torch.cat(shares).tolist()) == rows.tolist()
    assert all(share.tolist() == sorted(share.tolist()) for share in shares)
    owners = [set(tokens.group_ids[share].tolist()) for share in shares]
    assert sum(map(len, owners)) == len(set.union(*owners)), "no group is on two ranks"
    loads = [float(tokens.completion_mask[share].sum()) for share in shares]
    largest = max(
        float(tokens.completion_mask[rows][tokens.group_ids[rows] == g].sum()) for g in tokens.group_ids[rows]
    )
    assert max(loads) - min(loads) <= largest
