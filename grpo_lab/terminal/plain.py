"""A run as plain lines: one a step; or, quietly, only warnings and the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_lab.terminal.clock import Phase, duration
from grpo_lab.terminal.view import Closing, Opening

if TYPE_CHECKING:
    from grpo_lab.evaluation.evaluate import Evaluation


class PlainView:
    """See View. `say` writes a line."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._opening: Opening | None = None
        self._begun = time.monotonic()

    def line(self, text: str) -> None:
        self._say(text)

    def warning(self, text: str) -> None:
        self._say(f"warning    {text}")

    def started(self, opening: Opening) -> None:
        self._opening, self._begun = opening, time.monotonic()
        self.line(opening_line(opening))

    def phase(self, phase: Phase, text: str) -> None:
        """Its text."""
        if text:
            self.line(text)

    def step(self, metrics: Mapping[str, float]) -> None:
        assert self._opening is not None, "a run starts before its steps"
        done, steps = int(metrics["step"]), self._opening.steps
        rate = (time.monotonic() - self._begun) / max(done - self._opening.step, 1)
        self.line(step_line(metrics, steps) + f"  left {duration(rate * (steps - done))}")

    def evaluation(self, evaluation: Evaluation) -> None:
        self.line(evaluation_line(evaluation))

    def checkpoint(self, folder: Path, rollouts: int) -> None:
        """The end names the newest."""

    def finished(self, closing: Closing) -> None:
        for line in closing_lines(closing):
            self._say(line)

    def interrupted(self, text: str, is_last: bool) -> bool:
        return False

    def close(self) -> None:
        """There is nothing to give back."""


class QuietView(PlainView):
    """Warnings, and at the end the evaluations and where everything is."""

    def line(self, text: str) -> None:
        if text.startswith("ALARM"):
            self._say(text)


def opening_line(opening: Opening) -> str:
    """Where the run is."""
    return f"run        {opening.run.path}" + (f" (resumed after step {opening.step})" if opening.step else "")


def step_line(metrics: Mapping[str, float], steps: int) -> str:
    """A finished step in one line."""
    stale = metrics["rollout/staleness_max"]
    behind = f"stale {stale:.0f}  overlap {metrics['perf/overlap']:.0%}  " if stale else ""
    return (
        f"step {int(metrics['step']):>4}/{steps}  rollouts {int(metrics['rollouts/total']):>7,}  "
        f"reward {metrics['reward/mean']:.3f}  KL {metrics['policy/kl_ref']:7.3f}  F {metrics['policy/free_energy']:+.3f}  "
        f"gate open {metrics['gate/open_fraction']:.3f}  grad {metrics['policy/grad_norm']:.2f}  "
        f"mismatch {mismatch(metrics):.1e}  {behind}{metrics['perf/tokens_per_second']:.0f} tok/s"
    )


def mismatch(metrics: Mapping[str, float]) -> float:
    """Mean |learner - sampler| in nats a token: of the batch, or of the proof of a push where the batch is stale."""
    return metrics.get("rollout/mismatch_mean", metrics.get("rollout/canary_mean", 0.0))


def evaluation_line(evaluation: Evaluation) -> str:
    """A finished evaluation in one line."""
    e = evaluation
    return (
        f"eval at {e.rollouts:>9,} rollouts  reward {e.reward}  KL {e.kl}  F {e.free_energy}  "
        f"floor [{e.floor.lower.mean:+.3f}, {e.floor.upper.mean:+.3f}]"
    )


def closing_lines(closing: Closing) -> list[str]:
    """The evaluations as a table, where everything is, and last what to run next."""
    run = closing.run
    lines = [*closing.table, f"run          {run.path}", f"metrics      {run.metrics_file}"]
    lines += [f"checkpoint   {closing.checkpoint}"] if closing.checkpoint else []
    lines += [f"figure       {figure}" for figure in closing.figures if figure.suffix == ".png"]
    lines += [f"logs         {closing.log} (what libraries printed)"] if closing.log else []
    if closing.stopped:
        saved = f"stopped by {closing.stopped}; every whole step is saved in {run.path}."
        return [*lines, f"{saved} Continue with: {closing.next}"]
    return [*lines, f"next         {closing.next}"]
