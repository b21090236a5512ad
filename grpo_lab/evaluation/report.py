"""Evaluations of a run: made at each milestone, kept as JSON beside the bank, read back as a table and as figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_lab.config import Config
from grpo_lab.errors import RunError
from grpo_lab.evaluation.bank import PURPOSE, ReferenceBank, run_bank
from grpo_lab.evaluation.evaluate import Evaluation, measure
from grpo_lab.evaluation.figures import draw_curves
from grpo_lab.evaluation.kept import read_evaluations
from grpo_lab.learner.checkpoint import load_checkpoint
from grpo_lab.run_dir import RunDir
from grpo_lab.storage.scratch import write_whole
from grpo_lab.thermo.statistics import Estimate
from grpo_lab.types import RolloutGroup

if TYPE_CHECKING:
    from grpo_lab.assemble import Parts
    from grpo_lab.console import Console


def evaluate_run(
    parts: Parts, run: RunDir, bank: ReferenceBank, groups: Sequence[RolloutGroup], rollouts: int
) -> Evaluation:
    """Measure the policy the learner holds now on the `groups` it sampled, and keep the result in the run."""
    evaluation = measure(parts.learner, groups, bank, parts.config.beta, rollouts, parts.largest_reward)
    write_whole(run.evaluation_file(rollouts), json.dumps(evaluation.to_json(), indent=1), run.advice)
    return evaluation


def is_evaluated(run: RunDir, rollouts: int) -> bool:
    """Whether the evaluation at `rollouts` is kept already (a resumed run does not repeat it)."""
    return run.evaluation_file(rollouts).is_file()


def sample(parts: Parts) -> Sequence[RolloutGroup]:
    """Groups of the engine's current policy on the held-out problems, with the seeds every evaluation shares."""
    config = parts.config.evaluation
    problems = parts.task.heldout[: config.problems]
    return parts.collector.collect(problems, config.samples, parts.evaluation_sampling, PURPOSE)


def evaluate_checkpoint(path: Path, config: Config, console: Console, json_file: Path | None) -> Evaluation:
    """`grpo-lab eval checkpoint`: load, sample, measure, print. The run's bank is used where it fits, else a new one drawn.

    Raises RunError for a missing or damaged checkpoint before any model loads.
    """
    from grpo_lab.assemble import assemble

    checkpoint = load_checkpoint(path)
    parts = assemble(config, checkpoint, training=False, say=console.say)
    try:
        bank = _bank_of(path, parts, console)
        parts.push_weights(1)
        console.say(f"evaluating {path}: {config.evaluation.problems} problems x {config.evaluation.samples} samples")
        groups = sample(parts)
        evaluation = measure(
            parts.learner, groups, bank, config.beta, checkpoint.progress.rollouts, parts.largest_reward
        )
    finally:
        parts.close()
    for line in evaluation_lines(evaluation):
        console.say(line)
    if json_file:
        write_whole(json_file, json.dumps(evaluation.to_json(), indent=1))
        console.say(f"numbers    {json_file}")
    return evaluation


def _bank_of(path: Path, parts: Parts, console: Console) -> ReferenceBank:
    folder = path.resolve().parent.parent / "evaluations"
    if folder.is_dir():
        try:
            return run_bank(parts, folder)
        except RunError as error:
            console.say(f"note       {str(error).partition(';')[0]}; drawing a new bank for this evaluation")
    return run_bank(parts, None)


def evaluation_lines(e: Evaluation) -> list[str]:
    """The report of one evaluation. +- is one standard error, clustered by problem."""
    bound = f"[{e.floor.lower.mean:+.4f}, {e.floor.upper.mean:+.4f}]"
    gap = f"[{e.free_energy.mean - e.floor.upper.mean:.4f}, {e.free_energy.mean - e.floor.lower.mean:.4f}]"
    lines = [
        f"E[r]       {e.reward}   reference {e.reference_reward}",
        f"KL         {e.kl} nats per sequence (k1);  {e.kl_rao_blackwell} (Rao-Blackwell)",
        f"F          {e.free_energy}   at beta {e.beta:g}, 95 % bootstrap [{e.free_energy_interval[0]:+.3f}, "
        f"{e.free_energy_interval[1]:+.3f}];  F - F_ref {e.against_reference} (paired)",
        f"floor F*   {bound}   {e.samples} reference samples a problem, {e.floor.no_success:.0%} unsolved",
        f"           {e.policy_floor.floor}   from the policy's samples (ESS {e.policy_floor.ess:.1f} of {e.samples})",
        f"gap F-F*   {gap};  Var(R)/2beta {e.gap_from_returns:.4f} (the gap only near the floor)",
    ]  # fmt: skip
    if e.gap_split:
        lines.append(
            f"           = wasted KL {e.gap_split.wasted:.4f} + wrong tilt {e.gap_split.tilt:.4f}, the gap at rates "
            "smoothed to (k + 1/2) / (K + 1), by the Rao-Blackwell KL"
        )
    else:
        lines.append("           not split into wasted KL and wrong tilt, which are defined for rewards of 0 and 1")
    if e.identity:
        lines.append(
            f"identity   beta l = {e.identity.slope:.3f} r + const within problems (1 at the Gibbs policy), "
            f"R^2 {e.identity.r_squared:.3f}"
        )
    lines += _alarms(e)
    passes = ", ".join(f"pass@{k} {value:.3f}" for k, value in e.pass_at.items())
    lines.append(
        f"samples    {passes}; truncated {e.truncated:.1%}, unparsable {e.unparsable:.1%}, {e.length:.1f} tokens, "
        f"entropy {e.entropy:.3f} nats/token"
    )
    return lines


def _alarms(e: Evaluation) -> list[str]:
    """Results that cannot be: shown, never clipped away."""
    alarms = []
    error = 3 * (e.free_energy.se**2 + e.floor.lower.se**2) ** 0.5
    if e.free_energy.mean < e.floor.lower.mean - error:
        alarms.append(
            "ALARM      F lies below the floor by more than three errors, which no policy can: sampler and learner may differ "
            "(rollout/mismatch_mean), or the bank may be of another task or sampling"
        )
    if e.kl_rao_blackwell.mean > 0.01 and abs(e.kl.mean - e.kl_rao_blackwell.mean) > 4 * e.kl.se + 0.01:
        alarms.append(
            f"ALARM      the two KL estimates differ by {e.kl.mean - e.kl_rao_blackwell.mean:+.3f} nats: the samples are not "
            "the learner's (bf16 rounding of the sampler is the usual cause); trust Rao-Blackwell"
        )
    return alarms


def evaluation_table(run: RunDir) -> list[str]:
    """One row an evaluation: reward, KL, F and the floor."""
    rows = read_evaluations(run)
    if not rows:
        return []
    lines = [f"{'rollouts':>9}  {'E[r]':>15}  {'KL (k1)':>15}  {'F':>16}  {'F - F_ref':>16}  floor F*"]
    for row in rows:
        cells = [str(Estimate(**row[key])) for key in ("reward", "kl", "free_energy", "against_reference")]
        floor = f"[{row['floor']['lower']['mean']:+.3f}, {row['floor']['upper']['mean']:+.3f}]"
        lines.append(f"{row['rollouts']:>9,}  {cells[0]:>15}  {cells[1]:>15}  {cells[2]:>16}  {cells[3]:>16}  {floor}")
    return lines


def draw_run(run: RunDir, say: Callable[[str], None]) -> list[Path]:
    """The figures of a run; none before its first evaluation. They can be drawn again, so a full disk is only said."""
    rows = read_evaluations(run)
    try:
        return draw_curves(rows, run.figures) if rows else []
    except RunError as error:
        say(
            f"warning    no figures: {error}; everything else of the run is saved, `grpo-lab report {run.path}` draws them"
        )
        return []
