"""Which checkpoints a run keeps: the newest `keep_last`, multiples of `keep_every`, the final one, those still to evaluate."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from grpo_lab.config import Config
from grpo_lab.errors import RunError
from grpo_lab.storage.scratch import disk_reason, remove_folder

if TYPE_CHECKING:
    from grpo_lab.run_dir import RunDir


def spare(saved: Collection[int], config: Config) -> list[int]:
    """Of checkpoints at these rollouts, those that `keep_last` and `keep_every` let go, oldest first."""
    older = sorted(saved)[: -config.keep_last] if config.keep_last else []
    return [
        rollouts
        for rollouts in older
        if rollouts != config.total_rollouts and not (config.keep_every and rollouts % config.keep_every == 0)
    ]


def most_at_once(config: Config) -> int:
    """How many checkpoints lie on the disk together, at most: a new one is whole before an old one goes."""
    saves = [*range(config.checkpoint_every, config.total_rollouts, config.checkpoint_every), config.total_rollouts]
    if not config.keep_last:
        return len(saves)
    kept, most = set[int](), 0
    for rollouts in saves:
        kept.add(rollouts)
        most = max(most, len(kept))
        kept.difference_update(spare(kept, config))
    return most


def rotate(run: RunDir, config: Config, say: Callable[[str], None]) -> None:
    """Delete the run's spare checkpoints; none unless the newest is found undamaged, and none whose evaluation is still due."""
    from grpo_lab.learner.checkpoint import load_checkpoint

    saved = run.checkpoint_folders()
    going = [rollouts for rollouts in spare(saved, config) if not _is_due(run, config, rollouts)]
    if not going:
        return
    try:
        load_checkpoint(saved[max(saved)])
        for rollouts in going:
            remove_folder(saved[rollouts])
    except RunError as error:
        say(f"warning    {error}; no older one is deleted")
    except OSError as error:
        say(f"warning    old checkpoints in {run.checkpoints} cannot be deleted: {disk_reason(error)}")


def _is_due(run: RunDir, config: Config, rollouts: int) -> bool:
    """Whether the trainer evaluates at these rollouts and has not yet."""
    is_milestone = rollouts % config.checkpoint_every == 0 or rollouts >= config.total_rollouts
    return config.evaluation.enabled and is_milestone and not run.evaluation_file(rollouts).is_file()
