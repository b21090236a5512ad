"""A run for programs: one JSON object a line and an event, nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lab.terminal.clock import Phase
from grpo_lab.terminal.view import Closing, Opening

if TYPE_CHECKING:
    from grpo_lab.evaluation.evaluate import Evaluation


class JsonView:
    """See View. Events: started, step, evaluation, warning, checkpoint, finished. `write` takes a line."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def _tell(self, event: str, **fields: Any) -> None:
        numbers = json.loads(json.dumps(fields, default=str), parse_constant=lambda _: None)  # JSON has no NaN
        self._write(json.dumps({"event": event, **numbers}, allow_nan=False))

    def line(self, text: str) -> None:
        """For people."""

    def warning(self, text: str) -> None:
        self._tell("warning", text=text)

    def started(self, opening: Opening) -> None:
        config = opening.config.model_dump(mode="json")
        self._tell("started", run=opening.run.path, step=opening.step, steps=opening.steps, config=config)

    def phase(self, phase: Phase, text: str) -> None:
        """For people."""

    def step(self, metrics: Mapping[str, float]) -> None:
        self._tell("step", **metrics)

    def evaluation(self, evaluation: Evaluation) -> None:
        self._tell("evaluation", **evaluation.to_json())

    def checkpoint(self, folder: Path, rollouts: int) -> None:
        self._tell("checkpoint", path=folder, rollouts=rollouts)

    def finished(self, closing: Closing) -> None:
        self._tell(
            "finished",
            run=closing.run.path,
            metrics=closing.run.metrics_file,
            checkpoint=closing.checkpoint,
            figures=closing.figures,
            log=closing.log,
            stopped=closing.stopped,
            next=closing.next,
        )

    def interrupted(self, text: str, is_last: bool) -> bool:
        return False

    def close(self) -> None:
        """There is nothing to give back."""
