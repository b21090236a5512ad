"""`grpo-lab eval floor`: the floor from sampled candidates under every weighting, beside the consistent estimator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from grpo_lab.config import Config
from grpo_lab.drawing import BLUE, GREEN, GREY, ORANGE, legend_below, save
from grpo_lab.evaluation.bank import ReferenceBank, reference_bank
from grpo_lab.evaluation.evaluate import refuse_above
from grpo_lab.evaluation.figures import draw_landscape
from grpo_lab.evaluation.landscape import BETAS, landscape
from grpo_lab.learner.collate import collate
from grpo_lab.storage.scratch import write_whole
from grpo_lab.thermo.candidates import CandidateFloor, Weighting, candidate_floor, candidate_weights, merge_duplicates
from grpo_lab.thermo.floor import FloorBracket, bracket
from grpo_lab.types import RolloutGroup

if TYPE_CHECKING:
    from grpo_lab.assemble import Parts
    from grpo_lab.console import Console

Array = NDArray[np.float64]
WEIGHTINGS: dict[Weighting, str] = {
    "full_sequence": "candidates, full-sequence weights",
    "length_normalised": "candidates, length-normalised weights",
    "mc": "candidates, equal weights",
}
COLORS = (BLUE, GREEN, GREY)


@dataclass(frozen=True)
class Protocol:
    """How candidates are drawn: the published one by default."""

    prompts: int = 64
    candidates: int = 24
    temperature: float = 0.8
    top_p: float = 0.95


@dataclass(frozen=True)
class WeightingResult:
    """One weighting of the candidates, averaged over prompts: by temperature [M] the floor, Gibbs reward and KL (nats)."""

    name: Weighting
    ess: float
    reference_reward: float
    floor: list[float]
    reward: list[float]
    kl: list[float]
    heat_capacity: list[float]


@dataclass(frozen=True)
class Consistent:
    """Rewards of samples at T 1, top-p 1, [N, K], none above `largest`: what estimates the reference's own floor."""

    rewards: Array
    largest: float

    def bracket(self, beta: float) -> FloorBracket:
        return bracket(self.rewards, beta, largest=self.largest)


def floor_study(config: Config, protocol: Protocol, betas: Sequence[float], output: Path, console: Console) -> None:
    """Draw both banks (or reuse them from `output`), print the table, write floor_study.json and two figures."""
    from grpo_lab.assemble import assemble

    wanted = config.model_copy(
        update={"evaluation": config.evaluation.model_copy(update={"problems": protocol.prompts})}
    )
    parts = assemble(wanted, training=False, say=console.say)
    try:
        plain = parts.evaluation_sampling
        tempered = replace(plain, temperature=protocol.temperature, top_p=protocol.top_p)
        size = f"{protocol.prompts} problems x {protocol.candidates}"
        console.say(f"candidates {size}, T {tempered.temperature:g}, top-p {tempered.top_p:g}")
        candidates = reference_bank(parts, output, protocol.prompts, protocol.candidates, tempered, shared=True)
        logprobs = _reference_logprobs(parts, candidates)
        console.say(f"reference  {size}, T 1, top-p 1")
        consistent = reference_bank(parts, output, protocol.prompts, protocol.candidates, plain, shared=True)
    finally:
        parts.close()
    grid = np.unique(np.concatenate([BETAS, np.asarray(betas)]))
    results = [weigh(candidates, logprobs, name, grid) for name in WEIGHTINGS]
    samples = Consistent(np.asarray(consistent.rewards, dtype=np.float64), parts.largest_reward)
    refuse_above(samples.largest, samples.rewards)
    for line in table(results, samples, grid, betas):
        console.say(line)
    numbers = output / "floor_study.json"
    write_whole(numbers, json.dumps(_to_json(results, samples, grid, betas, protocol), indent=1))
    console.say(f"numbers    {numbers}")
    for path in draw(results, samples, grid, output):
        console.say(f"figure     {path}")


def weigh(bank: ReferenceBank, logprobs: Array, weighting: Weighting, betas: Array) -> WeightingResult:
    """The candidates [N][K] under one weighting, equal sequences merged; `logprobs` [N, K] are the reference's at T = 1."""
    floors = [_prompt(group, row, weighting, betas) for group, row in zip(bank.groups, logprobs, strict=True)]
    mean = lambda name: np.mean([[getattr(f, name) for f in prompt] for prompt in floors], axis=0).tolist()  # noqa: E731
    first = [prompt[0] for prompt in floors]
    return WeightingResult(
        name=weighting,
        ess=float(np.mean([f.ess for f in first])),
        reference_reward=float(np.mean([f.reference_reward for f in first])),
        floor=mean("floor"),
        reward=mean("gibbs_reward"),
        kl=mean("gibbs_kl"),
        heat_capacity=mean("heat_capacity"),
    )


def _prompt(group: RolloutGroup, logprobs: Array, weighting: Weighting, betas: Array) -> list[CandidateFloor]:
    """With equal weights every draw counts; else a sequence that was drawn twice is one candidate (THEORY C.5)."""
    rewards = np.asarray(group.rewards, dtype=np.float64)
    lengths = np.array([len(completion.token_ids) for completion in group.completions], dtype=np.float64)
    sequences = [completion.token_ids for completion in group.completions]
    if weighting != "mc":
        kept = [sequences.index(sequence) for sequence in dict.fromkeys(sequences)]
        rewards, lengths, logprobs = rewards[kept], lengths[kept], logprobs[kept]
        sequences = [sequences[i] for i in kept]
    weights, merged = merge_duplicates(candidate_weights(logprobs, lengths, weighting), rewards, sequences)
    return [candidate_floor(weights, merged, float(beta)) for beta in betas]


def table(results: Sequence[WeightingResult], samples: Consistent, grid: Array, betas: Sequence[float]) -> list[str]:
    """One line a weighting: its effective number of candidates, the reference's reward it implies, the floor by beta."""
    columns = [int(np.argmin(np.abs(grid - beta))) for beta in betas]
    lines = [f"{'':40}  {'ESS':>5}  {'E[r]':>6}  " + "  ".join(f"{f'F* {beta:g}':>16}" for beta in betas)]
    for result in results:
        cells = "  ".join(f"{result.floor[c]:>16.4f}" for c in columns)
        lines.append(f"{WEIGHTINGS[result.name]:40}  {result.ess:>5.1f}  {result.reference_reward:>6.3f}  {cells}")
    brackets, rewards = [samples.bracket(beta) for beta in betas], samples.rewards
    cells = "  ".join(f"{f'[{b.lower.mean:.3f}, {b.upper.mean:.3f}]':>16}" for b in brackets)
    lines.append(
        f"{'T 1, top-p 1: consistent, as a bracket':40}  {rewards.shape[1]:>5.1f}  {rewards.mean():>6.3f}  {cells}"
    )
    lines.append(f"unsolved in {rewards.shape[1]} samples at T 1: {brackets[0].no_success:.1%} of the problems")
    return lines


def draw(results: Sequence[WeightingResult], samples: Consistent, grid: Array, folder: Path) -> list[Path]:
    """The reward-KL frontier of every weighting, and the landscape over beta of the consistent estimator."""
    mc = landscape(samples.rewards, largest=samples.largest)
    frontier = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = frontier.add_subplot()
    for result, color in zip(results, COLORS, strict=True):
        axes.plot(result.kl, result.reward, color=color, lw=1.5, label=WEIGHTINGS[result.name])
    axes.plot(mc.kl, mc.reward, color=ORANGE, lw=1.8, label="T 1, top-p 1 (consistent)")
    axes.set(
        xlabel="KL to the reference (nats per sequence)",
        ylabel="reward E[r]",
        title="Reward–KL frontier by weighting",
        ylim=(min(0.0, *mc.reward) - 0.03, max(1.0, *mc.reward) + 0.03),
    )
    legend_below(frontier, columns=2)
    over = Figure(figsize=(6.4, 5.6), layout="constrained")
    top, bottom = over.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    draw_landscape(top, bottom, asdict(mc), float(samples.rewards.mean()), None)
    for result, color in zip(results, COLORS, strict=True):
        top.plot(grid, result.floor, color=color, lw=1.2, label=WEIGHTINGS[result.name])
    legend_below(over, columns=2)
    return [*save(frontier, folder / "floor_frontier"), *save(over, folder / "floor_landscape")]


def _reference_logprobs(parts: Parts, bank: ReferenceBank) -> Array:
    """log pi_ref of every candidate at T = 1, [N, K] nats, by the learner."""
    tokens = collate(bank.groups)
    total = parts.learner.statistics(tokens).ref_logprobs.double().sum(dim=1)
    return total.numpy().reshape(len(bank.groups), tokens.group_size)


def _to_json(
    results: Sequence[WeightingResult], samples: Consistent, grid: Array, betas: Sequence[float], protocol: Protocol
) -> dict[str, Any]:
    consistent = {f"{beta:g}": asdict(samples.bracket(beta)) for beta in betas}
    return {
        "protocol": asdict(protocol),
        "beta": grid.tolist(),
        "weightings": [asdict(result) for result in results],
        "consistent": {"reward": float(samples.rewards.mean()), "floor": consistent},
    }
