"""How long the phases of a run take, and from that how long the rest will."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Literal

Phase = Literal["loading", "reference", "sampling", "annotate", "update", "sync", "record", "save", "evaluate"]
OF_A_STEP: tuple[Phase, ...] = ("sampling", "annotate", "update", "sync", "record")
_RECENT = 8  # steps that the next ones are expected to resemble


@dataclass(frozen=True)
class Left:
    """Seconds until the end; `evaluations` of them."""

    total: float
    evaluations: float


class Clock:
    """Times are of time.monotonic(), given by the caller."""

    def __init__(self, now: float) -> None:
        self.phase: Phase = "loading"
        self.since = self.started = now
        self._spent: defaultdict[Phase, float] = defaultdict(float)
        self._steps: deque[float] = deque(maxlen=_RECENT)
        self._save = 0.0
        self._evaluation: float | None = None

    def enter(self, phase: Phase, now: float) -> None:
        """The phase from now on."""
        self._spent[self.phase] += now - self.since
        self.phase, self.since = phase, now

    def finish_step(self, now: float) -> None:
        """A step is over."""
        self.enter("record", now)
        self._steps.append(self._take(*OF_A_STEP))

    def finish_save(self, now: float) -> None:
        """A checkpoint is written."""
        self.enter("record", now)
        self._save = self._take("save")

    def finish_evaluation(self, now: float) -> None:
        """An evaluation is over. The first one needs no sampling, but the reference's samples before it took as long."""
        self.enter("record", now)
        self._evaluation = self._take("evaluate", "reference")

    def left(self, steps: int, milestones: int) -> Left | None:
        """For `steps` more, and as many saves and evaluations as there are `milestones`; None before the first step."""
        if not self._steps:
            return None
        evaluations = (self._evaluation or 0.0) * milestones
        return Left(steps * sum(self._steps) / len(self._steps) + evaluations + self._save * milestones, evaluations)

    def _take(self, *phases: Phase) -> float:
        return sum(self._spent.pop(phase, 0.0) for phase in phases)


def duration(seconds: float) -> str:
    """As 0:07, 12:34 or 5:06:07."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
