"""What a run says on the terminal: one line a step, a bar with the time left on a tty, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from grpo_lab.config import Config
from grpo_lab.methods import METHODS
from grpo_lab.objective.advice import effective_beta_line, warnings
from grpo_lab.objective.axes import Objective

if TYPE_CHECKING:
    from grpo_lab.evaluation.evaluate import Evaluation
    from grpo_lab.run_dir import RunDir


class Console:
    """Writes to standard output. Paths are never wrapped or coloured, so they can be copied."""

    def __init__(self) -> None:
        self._out = RichConsole(highlight=False, soft_wrap=True, emoji=False)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._steps = 0
        self._started = time.monotonic()
        self._first_step = 0
        self._seen_step = False
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """One plain line."""
        self._out.print(text, markup=False)
        sys.stdout.flush()

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        """A bar with the time left on a terminal, nothing elsewhere; call what it yields once for every piece done."""
        columns = (TextColumn(what), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn())
        with Progress(*columns, console=self._out, transient=True, disable=not self._out.is_terminal) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)

    def describe(self, config: Config, objective: Objective) -> None:
        """The batch algebra, the objective in one line, and what is questionable about it."""
        for line in describe_config(config, objective):
            self.say(line)

    def started(self, run: RunDir, config: Config, progress: Any) -> None:
        """The opening lines of a run."""
        self._steps = config.total_rollouts // config.rollouts_per_step
        self._first_step = progress.step
        self._started = time.monotonic()
        self.say(f"run        {run.path}" + (f" (resumed after step {progress.step})" if progress.step else ""))
        if self._out.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
            self._bar = Progress(
                *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._out, transient=True
            )
            self._task = self._bar.add_task("steps", total=self._steps, completed=progress.step)
            self._bar.start()

    def step(self, metrics: Mapping[str, float]) -> None:
        """One line about a finished step."""
        done = int(metrics["step"])
        rate = (time.monotonic() - self._started) / max(done - self._first_step, 1)
        left = "" if self._bar else f"  left {_clock(rate * (self._steps - done))}"
        mismatch = metrics.get("rollout/mismatch_mean", metrics.get("rollout/canary_mean", 0.0))
        stale = metrics["rollout/staleness_max"]
        behind = f"stale {stale:.0f}  overlap {metrics['perf/overlap']:.0%}  " if stale else ""
        self.say(
            f"step {done:>4}/{self._steps}  rollouts {int(metrics['rollouts/total']):>7,}  "
            f"reward {metrics['reward/mean']:.3f}  KL {metrics['policy/kl_ref']:7.3f}  F {metrics['policy/free_energy']:+.3f}  "
            f"gate open {metrics['gate/open_fraction']:.3f}  grad {metrics['policy/grad_norm']:.2f}  "
            f"mismatch {mismatch:.1e}  {behind}{metrics['perf/tokens_per_second']:.0f} tok/s{left}"
        )
        self._seen_step = True
        for text in batch_warnings(metrics):
            if text not in self._said:
                self._said.add(text)
                self.say(f"warning    {text}")
        if self._bar:
            self._bar.update(self._task, completed=done)

    def evaluation(self, evaluation: Evaluation) -> None:
        """One line about a finished evaluation."""
        e = evaluation
        self.say(
            f"eval at {e.rollouts:>9,} rollouts  reward {e.reward}  KL {e.kl}  F {e.free_energy}  "
            f"floor [{e.floor.lower.mean:+.3f}, {e.floor.upper.mean:+.3f}]"
        )

    def phase(self, text: str) -> None:
        """What is being done now: beside the bar on a terminal; elsewhere a line, in the first step only."""
        if self._bar:
            self._bar.update(self._task, description=text)
        elif not self._seen_step:
            self.say(f"           {text}")

    def finished(self, run: RunDir, table: Sequence[str], figures: Sequence[Path], stopped: str = "") -> None:
        """The closing lines: the evaluations as a table, where everything is, what to run next. `stopped`: a signal's name."""
        for line in table:
            self.say(line)
        self.say(f"run          {run.path}")
        self.say(f"metrics      {run.metrics_file}")
        for folder in sorted(run.checkpoints.glob("rollouts_*"))[-1:]:
            self.say(f"checkpoint   {folder}")
            self.say(f"next         grpo-lab eval checkpoint {folder}")
        for figure in figures:
            if figure.suffix == ".png":
                self.say(f"figure       {figure}")
        if stopped:
            self.say(
                f"stopped by {stopped}; every whole step is saved. Continue with: grpo-lab train --resume {run.path}"
            )

    def close(self) -> None:
        """Give the terminal back."""
        if self._bar:
            self._bar.stop()
            self._bar = None


def batch_warnings(metrics: Mapping[str, float]) -> list[str]:
    """What a batch shows to be wrong with the task rather than with the training."""
    checks = [
        (
            metrics["completion/unparsable"] > 0.9,
            "more than 90 % of the completions declare no answer, so their reward is 0: ask for the form the grading wants "
            "(`#### 18` or \\boxed{18}), or take the last number with data.options.grading=flexible",
        ),
        (
            metrics["completion/truncated"] > 0.9,
            "more than 90 % of the completions meet the length limit, so their reward is 0: raise rollout.max_new_tokens",
        ),
        (
            metrics["reward/zero_std_groups"] == 1,
            "in every group all rewards are equal: this batch says nothing about the reward; the task may be too hard or too "
            "easy for this model",
        ),
    ]  # fmt: skip
    return [text for applies, text in checks if applies]


def describe_config(config: Config, objective: Objective) -> list[str]:
    """The batch algebra and the objective, as lines."""
    groups = config.total_rollouts // config.group_size
    steps = config.total_rollouts // config.rollouts_per_step
    train = config.data.train_problems
    epochs = (
        f"{groups / train:.4f} epochs of {train:,} problems"
        if train
        else "training problems: all that are not held out"
    )
    updates = config.learner.passes * config.learner.mini_batches
    options = ", ".join(f"{name} {value:g}" for name, value in objective.gate_options.items())
    checkpoints = -(-config.total_rollouts // config.checkpoint_every)
    lines = [
        f"method     {config.method} ({METHODS[config.method].source}), recipe {config.recipe}, beta {config.beta:g}",
        f"axes       gate {objective.gate} ({options}), level {objective.level}, advantage {objective.advantage}, "
        f"kl {objective.kl}, aggregate {objective.aggregate}, old {objective.old}, correction {objective.correction}",
        f"objective  {effective_beta_line(objective, config.group_size)}",
        f"batches    {config.total_rollouts:,} rollouts = {groups:,} groups of {config.group_size} = {steps:,} steps of "
        f"{config.prompts_per_step} prompts; {epochs}",
        f"updates    {updates} per step ({config.learner.passes} passes x {config.learner.mini_batches} mini-batches), "
        f"{steps * updates:,} in all",
        f"saves      {checkpoints} checkpoints, one every {config.checkpoint_every:,} rollouts"
        + (f"; {checkpoints + 1} evaluations of {config.evaluation.problems} problems x {config.evaluation.samples} samples"
           if config.evaluation.enabled else "; no evaluation"),
        f"model      {config.model.place}, {config.model.dtype}, "
        + (f"LoRA rank {config.model.lora_rank}" if config.model.lora_rank else "full fine-tuning")
        + f"; task {config.data.task}",
        f"rollouts   {_engine_line(config)}",
    ]  # fmt: skip
    return lines + [f"warning    {text}" for text in warnings(config, objective)]


def _engine_line(config: Config) -> str:
    rollout = config.rollout
    if not rollout.has_workers:
        return f"engine {rollout.engine} in the learner's process, with the newest weights"
    counts = [(rollout.started_workers, "started here"), (len(rollout.urls), "attached")]
    workers = " and ".join(f"{count} {where}" for count, where in counts if count)
    if rollout.max_staleness == 0:
        return f"vLLM workers: {workers}; with the newest weights (max_staleness 0)"
    return (
        f"vLLM workers: {workers}; sampled while the learner trains, at most {rollout.max_staleness} "
        f"push{'es' if rollout.max_staleness > 1 else ''} behind; "
        f"in flight at a push: {rollout.in_flight}"
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
