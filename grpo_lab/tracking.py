"""The optional tracker: Weights & Biases, online or offline. metrics.jsonl is written whether or not one is on."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from grpo_lab.config import Config
from grpo_lab.errors import ConfigError
from grpo_lab.run_dir import RunDir


class Tracker:
    """A context that mirrors numbers to wandb under the run's own id, so that a resumed run continues its curves."""

    def __init__(self, config: Config, run: RunDir) -> None:
        self._run: Any = None
        settings = config.tracking
        if settings.wandb == "disabled":
            return
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                f"tracking.wandb={settings.wandb}, but wandb is not installed: pip install wandb, or set it to disabled"
            ) from None
        self._run = wandb.init(
            project=settings.wandb_project,
            id=run.path.name,
            name=run.path.name,
            dir=str(run.path),
            mode=settings.wandb,
            resume="allow",
            config=config.model_dump(mode="json"),
        )

    def log(self, numbers: Mapping[str, Any], rollouts: int) -> None:
        """Send a row of numbers at `rollouts`."""
        if self._run is not None:
            self._run.log({**numbers, "rollouts/total": rollouts})

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if kind is None else 1)
