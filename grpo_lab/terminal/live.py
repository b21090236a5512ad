"""The panel on a real terminal: the run's newest numbers, redrawn a few times a second below the lines that are said."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console as RichConsole
from rich.console import ConsoleDimensions, ConsoleRenderable, RenderableType
from rich.live import Live

from grpo_lab.errors import shown
from grpo_lab.terminal import panel
from grpo_lab.terminal.clock import Clock, Phase
from grpo_lab.terminal.glyphs import ASCII, UNICODE, speaks_unicode
from grpo_lab.terminal.panel import CURVES, HISTORY, Evaluated, Picture
from grpo_lab.terminal.plain import closing_lines, evaluation_line, opening_line
from grpo_lab.terminal.view import Closing, Opening

if TYPE_CHECKING:
    from grpo_lab.evaluation.evaluate import Evaluation

_PER_SECOND = 4
_SHOW_CURSOR = b"\033[?25h\n"


class TerminalConsole(RichConsole):
    """A rich console as wide as the terminal its own file is, whatever the standard streams are."""

    @property  # type: ignore[misc]  # rich's can also be set
    def size(self) -> ConsoleDimensions:
        try:
            columns, rows = os.get_terminal_size(self.file.fileno())
        except (OSError, ValueError):
            return super().size
        return ConsoleDimensions(columns or 80, rows or 25)


def can_draw(file: IO[str]) -> bool:
    """Whether a panel can be drawn on `file`: a terminal that moves its cursor."""
    return file.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")


class _ResizableLive(Live):
    """A Live that, where the terminal got narrower and so wrapped the lines of the last drawing, clears all of them."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        drawn, width = self._live_render._shape, self.console.size.width
        if drawn and drawn[0] > width > 0:
            rows = drawn[1] * -(-drawn[0] // width)
            self._live_render._shape = (width, min(rows, self.console.size.height))
        return super().process_renderables(renderables)


class PanelView:
    """See View. `say` writes a line above the panel. The panel stays as it was last when the run ends."""

    def __init__(self, console: RichConsole, say: Callable[[str], None], redirect: bool) -> None:
        self._console, self._redirect = console, redirect
        self._glyphs = UNICODE if speaks_unicode(console.encoding, os.environ) else ASCII
        self._say = lambda text: say(text.replace(UNICODE.plus_minus, self._glyphs.plus_minus))
        self._clock = Clock(time.monotonic())
        self._picture = Picture()
        self._curves = {label: deque[float](maxlen=HISTORY) for label in CURVES}
        self._every, self._due = 1, 0.0
        self._warning = self._notice = ""  # these come from any thread, and from signal handlers
        self._live: Live | None = None

    def line(self, text: str) -> None:
        self._say(text)

    def warning(self, text: str) -> None:
        self._say(f"warning    {text}")
        self._warning = text

    def phase(self, phase: Phase, text: str) -> None:
        """The first one also begins the drawing."""
        self._clock.enter(phase, time.monotonic())
        self._picture = replace(self._picture, phase=phase)
        if self._live is None:
            self._live = _ResizableLive(
                console=self._console,
                get_renderable=self._draw,
                refresh_per_second=_PER_SECOND,
                redirect_stdout=self._redirect,
                redirect_stderr=self._redirect,
                vertical_overflow="crop",
            )
            self._live.start(refresh=True)

    def started(self, opening: Opening) -> None:
        self._say(opening_line(opening))
        config, run = opening.config, opening.run
        for metrics in run.read_metrics():
            self._remember(metrics)
        kept = [json.loads(path.read_text()) for path in sorted(run.evaluations.glob("rollouts_*.json"))]
        self._every = config.checkpoint_every
        method = f"{config.method}, {config.recipe}, beta {config.beta:g}"
        self._picture = replace(
            self._picture,
            title=shown(f" {self._glyphs.dot} ".join(("grpo_lab", method, Path(config.model.place).name))),
            place=shown(str(run.path)),
            step=opening.step,
            steps=opening.steps,
            rollouts=opening.step * config.rollouts_per_step,
            total_rollouts=config.total_rollouts,
            evaluated=_evaluated(kept[-1]) if kept else None,
        )

    def step(self, metrics: Mapping[str, float]) -> None:
        self._clock.finish_step(time.monotonic())
        self._remember(metrics)
        step, rollouts = int(metrics["step"]), int(metrics["rollouts/total"])
        self._picture = replace(self._picture, step=step, rollouts=rollouts)
        self._foresee()

    def evaluation(self, evaluation: Evaluation) -> None:
        self._clock.finish_evaluation(time.monotonic())
        self._say(evaluation_line(evaluation))
        self._picture = replace(self._picture, evaluated=_evaluated(evaluation.to_json()))
        self._foresee()

    def checkpoint(self, folder: Path, rollouts: int) -> None:
        self._clock.finish_save(time.monotonic())
        self._foresee()

    def finished(self, closing: Closing) -> None:
        for line in closing_lines(closing):
            self._say(line)

    def interrupted(self, text: str, is_last: bool) -> bool:
        """The next drawing shows it; a last word comes with the cursor, past all locks."""
        if self._live is None:
            return False
        self._notice = text
        if is_last:
            os.write(self._console.file.fileno(), _SHOW_CURSOR)
        return not is_last

    def close(self) -> None:
        if self._live is not None:
            self._picture = replace(self._picture, phase=None)
            live, self._live = self._live, None
            live.transient = not self._picture.steps  # what was drawn while loading says nothing afterwards
            live.stop()

    def _remember(self, metrics: Mapping[str, float]) -> None:
        for label, name in CURVES.items():
            self._curves[label].append(metrics[name])
        curves = {label: tuple(values) for label, values in self._curves.items()}
        self._picture = replace(self._picture, metrics=metrics, curves=curves)

    def _foresee(self) -> None:
        """The time that is left, from the phases so far. A milestone that has just been reached is still to be evaluated."""
        p = self._picture
        ahead = -(-p.total_rollouts // self._every) - p.rollouts // self._every if p.rollouts < p.total_rollouts else 0
        left = self._clock.left(p.steps - p.step, ahead)
        self._due = time.monotonic() + (left.total if left else 0.0)
        self._picture = replace(p, left=left)

    def _draw(self) -> RenderableType:
        now, clock = time.monotonic(), self._clock
        left = self._picture.left and replace(self._picture.left, total=max(self._due - now, 0.0))
        picture = replace(
            self._picture,
            elapsed=now - clock.started,
            phase_s=now - clock.since,
            left=left,
            warning=self._warning,
            notice=self._notice,
        )
        return panel.draw(picture, *self._console.size, self._glyphs)


def _evaluated(kept: Mapping[str, Any]) -> Evaluated:
    floor, reference = kept["floor"], kept["reference_reward"]["mean"]
    return Evaluated(
        rollouts=kept["rollouts"],
        free_energy=kept["free_energy"]["mean"],
        error=kept["free_energy"]["se"],
        reference=-reference,
        lower=floor["lower"]["mean"],
        upper=floor["upper"]["mean"],
    )
