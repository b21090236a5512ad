"""What happens in a run, as its views are told it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from grpo_lab.terminal.clock import Phase

if TYPE_CHECKING:
    from grpo_lab.config import Config
    from grpo_lab.evaluation.evaluate import Evaluation
    from grpo_lab.run_dir import RunDir


@dataclass(frozen=True)
class Opening:
    """A run that begins, or goes on after `step`."""

    run: RunDir
    config: Config
    step: int

    @property
    def steps(self) -> int:
        return self.config.total_rollouts // self.config.rollouts_per_step


@dataclass(frozen=True)
class Closing:
    """A run that ended as it should: its evaluations as a `table`, and the signal that `stopped` it, or ""."""

    run: RunDir
    table: Sequence[str]
    figures: Sequence[Path]
    stopped: str
    log: Path | None

    @property
    def checkpoint(self) -> Path | None:
        """The newest one."""
        return max(self.run.checkpoints.glob("rollouts_*"), default=None)

    @property
    def next(self) -> str:
        """What to do now, as commands."""
        if self.stopped:
            return f"grpo-lab train --resume {self.run.path}"
        measure = f"grpo-lab eval checkpoint {self.checkpoint}  or  " if self.checkpoint else ""
        return f"{measure}grpo-lab report {self.run.path}"


class View(Protocol):
    """One way to show a run. Everything is called from the main thread, but `line` and `warning` from any."""

    def line(self, text: str) -> None:
        """Something worth a line."""

    def warning(self, text: str) -> None:
        """Something to look at."""

    def started(self, opening: Opening) -> None: ...

    def phase(self, phase: Phase, text: str) -> None:
        """What is being done from now on; `text` is a line for views without a panel, "" where it is not worth one."""

    def step(self, metrics: Mapping[str, float]) -> None: ...

    def evaluation(self, evaluation: Evaluation) -> None: ...

    def checkpoint(self, folder: Path, rollouts: int) -> None: ...

    def finished(self, closing: Closing) -> None: ...

    def interrupted(self, text: str, is_last: bool) -> bool:
        """Called in a signal's handler, so nothing may be printed; whether the view shows it. `is_last`: the process ends."""

    def close(self) -> None:
        """Give the terminal back."""
