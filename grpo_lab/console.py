"""What a command says on the terminal; of a run, by a view: plain lines, a panel on a tty, only the end, or JSON lines."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from grpo_lab.config import Config
from grpo_lab.errors import counted, shown
from grpo_lab.library_logs import FOLDER, LibraryLogs
from grpo_lab.methods import METHODS, gate_in_words
from grpo_lab.objective.advice import effective_beta_line, warnings
from grpo_lab.objective.axes import Objective
from grpo_lab.terminal.clock import Phase
from grpo_lab.terminal.json_lines import JsonView
from grpo_lab.terminal.last_words import LastWords
from grpo_lab.terminal.live import PanelView, TerminalConsole, can_draw
from grpo_lab.terminal.plain import PlainView, QuietView
from grpo_lab.terminal.view import Closing, Opening, View

if TYPE_CHECKING:
    from grpo_lab.evaluation.evaluate import Evaluation
    from grpo_lab.run_dir import RunDir

Style = Literal["auto", "quiet", "json"]
_WARNING = "warning    "


class Console:
    """Writes to standard output as it was before `logs`, if given, took it. Paths are never wrapped or coloured.

    `style` auto: a panel on a terminal that can draw one, else a line a step; quiet: warnings and the end; json: one object a
    line and an event.
    """

    def __init__(self, style: Style = "auto", logs: LibraryLogs | None = None) -> None:
        self._logs = logs
        self._out = TerminalConsole(file=logs.terminal if logs else None, highlight=False, soft_wrap=True, emoji=False)
        self._view = self._choose_view(style)
        if logs:
            logs.listener = self._interrupted
        self._seen_step = False
        self._said: set[str] = set()
        self._run: RunDir | None = None
        self._last_words: LastWords | None = None

    def _choose_view(self, style: Style) -> View:
        if style == "json":
            return JsonView(self._write)
        if style == "quiet":
            return QuietView(self._write)
        if can_draw(self._out.file):
            return PanelView(self._out, self._write, redirect=self._logs is None)
        return PlainView(self._write)

    def _write(self, text: str) -> None:
        self._out.print(text, markup=False)
        self._out.file.flush()

    def say(self, text: str) -> None:
        """One plain line; one that begins with "warning" is told as a warning."""
        text = shown(text)
        if text.startswith(_WARNING):
            self._view.warning(text.removeprefix(_WARNING))
        else:
            self._view.line(text)

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        """A bar with the time left on a terminal, nothing elsewhere; call what it yields once for every piece done."""
        columns = (TextColumn(what), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn())
        with Progress(*columns, console=self._out, transient=True, disable=not self._out.is_terminal) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)

    # -- a run -------------------------------------------------------------------------------------------------------

    def describe(self, config: Config, objective: Objective) -> None:
        """The batch algebra, the objective in one line, and what is questionable about it."""
        for line in describe_config(config, objective):
            self.say(line)

    def phase(self, phase: Phase, text: str = "", is_news: bool = False) -> None:
        """What is being done from now on; without a panel `text` is a line, in the first step only unless it `is_news`."""
        if self._last_words is None and self._logs is not None:
            self._last_words = LastWords(self._logs.errors, os.isatty(self._logs.errors))
            self._last_words.will_be(self._epitaph())
        in_first_step = f"{'':11}{text}" if text and not self._seen_step else ""
        self._view.phase(phase, text if is_news else in_first_step)

    def started(self, run: RunDir, config: Config, progress: Any) -> None:
        """The opening lines of a run, which from now on has the libraries' log in its folder."""
        self._run = run
        self.keep_log(run.path, "libraries.log")
        if self._last_words:
            self._last_words.will_be(self._epitaph())
        self._view.started(Opening(run, config, progress.step))

    def step(self, metrics: Mapping[str, float]) -> None:
        """A finished step, and once each what its batch shows to be wrong."""
        self._view.step(metrics)
        self._seen_step = True
        for text in batch_warnings(metrics):
            if text not in self._said:
                self._said.add(text)
                self._view.warning(text)

    def evaluation(self, evaluation: Evaluation) -> None:
        """A finished evaluation."""
        self._view.evaluation(evaluation)

    def checkpoint(self, folder: Path, rollouts: int) -> None:
        """A complete checkpoint."""
        self._view.checkpoint(folder, rollouts)

    def finished(self, run: RunDir, table: Sequence[str], figures: Sequence[Path], stopped: str = "") -> None:
        """The closing lines: the evaluations as a table, where everything is, what to run next. `stopped`: a signal's name."""
        log = self._logs.file if self._logs and self._logs.has_content else None
        self._view.finished(Closing(run, table, figures, stopped, log))

    def failure(self, error: str) -> str:
        """The error, then where the log is, if libraries printed anything, and how to go on, if there is a checkpoint."""
        parts = [error, *([self._log_words] if self._logs and self._logs.has_content else [])]
        if self._run and "--resume" not in error and any(self._run.checkpoints.glob("rollouts_*")):
            parts.append(self._next_words)
        return "; ".join(parts)

    @property
    def folder(self) -> Path | None:
        """The run's, once it has started."""
        return self._run.path if self._run else None

    def keep_log(self, run: Path | None, name: str) -> None:
        """Have the libraries' log of this process in the run's folder."""
        if self._logs and run:
            self._logs.move_to(run / FOLDER / name)

    def keep_worker_logs(self, folder: Path | None) -> None:
        """Copy the workers' logs in `folder` to the run's."""
        if self._run and folder and self._logs:
            for log in folder.glob("*.log"):
                with suppress(OSError):
                    (self._run.path / FOLDER).mkdir(exist_ok=True)
                    shutil.copy(log, self._run.path / FOLDER / log.name)

    def close(self) -> None:
        """Give the terminal back."""
        self._view.close()
        if self._last_words:
            self._last_words.cancel()
            self._last_words = None

    def _interrupted(self, text: str, is_last: bool) -> bool:
        if is_last and self._last_words:
            self._last_words.will_be("")  # these are
        return self._view.interrupted(text.strip(), is_last)

    def _epitaph(self) -> str:
        more = [self._next_words] if self._run else []
        return "; ".join(["grpo-lab: the process was ended at once", self._log_words, *more])

    @property
    def _log_words(self) -> str:
        return f"what libraries printed is in {self._logs.file}" if self._logs else ""

    @property
    def _next_words(self) -> str:
        return f"continue with: grpo-lab train --resume {self._run.path}" if self._run else ""


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
    checkpoints = -(-config.total_rollouts // config.checkpoint_every)
    lines = [
        f"method     {config.method} ({METHODS[config.method].source}), recipe {config.recipe}, beta {config.beta:g}",
        f"axes       gate {gate_in_words(objective.gate, objective.gate_options)}, level {objective.level}, "
        f"advantage {objective.advantage}, kl {objective.kl}, aggregate {objective.aggregate}, "
        f"old {objective.old}, correction {objective.correction}",
        f"objective  {effective_beta_line(objective, config.group_size)}",
        f"batches    {config.total_rollouts:,} rollouts = {groups:,} groups of {config.group_size} = {steps:,} steps of "
        f"{config.prompts_per_step} prompts; {epochs}",
        f"updates    {updates} per step ({config.learner.passes} passes x {config.learner.mini_batches} mini-batches), "
        f"{steps * updates:,} in all",
        f"saves      {counted(checkpoints, 'checkpoint')}, one every {config.checkpoint_every:,} rollouts"
        + _kept(config)
        + (f"; {checkpoints + 1} evaluations of {config.evaluation.problems} problems x {config.evaluation.samples} samples"
           if config.evaluation.enabled else "; no evaluation"),
        f"model      {config.model.place}, {config.model.dtype}, "
        + (f"LoRA rank {config.model.lora_rank}" if config.model.lora_rank else "full fine-tuning")
        + f"; task {config.data.task}",
        f"rollouts   {_engine_line(config)}",
    ]  # fmt: skip
    return lines + [f"{_WARNING}{text}" for text in warnings(config, objective)]


def _kept(config: Config) -> str:
    if not config.keep_last:
        return ""
    others = f" and those at multiples of {config.keep_every:,}" if config.keep_every else ""
    return f", of which the newest {config.keep_last}{others} are kept"


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
