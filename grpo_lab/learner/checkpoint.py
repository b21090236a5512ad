"""Checkpoints: a model folder transformers can load, plus the training state. Written beside, flushed, renamed whole.

rollouts_00032768/
  config.json model.safetensors tokenizer...   the policy (LoRA: adapter_config.json adapter_model.safetensors)
  training/state.json training/state.safetensors   step, counters, scheduler; moments and masters by parameter name
  manifest.json                                 sha256 of every file; written last, so a folder with it is complete
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from grpo_lab.errors import RunError, UserError
from grpo_lab.learner.learner import Learner
from grpo_lab.learner.optimizer import LearnerState
from grpo_lab.learner.weights import save_model

PREFIX = "rollouts_"


@dataclass(frozen=True)
class Progress:
    """How far a run is: completed steps, and the rollouts and completion tokens trained on."""

    step: int = 0
    rollouts: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    progress: Progress

    @property
    def training_state(self) -> LearnerState:
        """The learner's state. RunError when a file is missing or broken."""
        try:
            numbers = json.loads((self.folder / "training/state.json").read_text())
            return LearnerState(load_file(self.folder / "training/state.safetensors"), numbers["learner"])
        except Exception as error:
            raise RunError(
                f"checkpoint {self.folder} has no readable training state ({error}); resume from an older one"
            ) from None


def save_checkpoint(parent: Path, learner: Learner, tokenizer: Any, progress: Progress) -> Checkpoint:
    """Write `parent`/rollouts_<n> whole or not at all; an existing undamaged one of the same name stays."""
    final = parent / f"{PREFIX}{progress.rollouts:08d}"
    if _is_whole(final):
        return Checkpoint(final, progress)
    partial = parent / f".partial-{final.name}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        (partial / "training").mkdir(parents=True)
        save_model(learner, partial)
        tokenizer.save_pretrained(partial)
        if learner.policy.lora:
            learner.policy.causal_lm.generation_config.save_pretrained(partial)
        state = learner.state()
        save_file(state.tensors, partial / "training/state.safetensors")
        numbers = {"progress": asdict(progress), "learner": state.numbers}
        (partial / "training/state.json").write_text(json.dumps(numbers, indent=1))
        _seal(partial)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        _flush(parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise RunError(
            f"cannot write checkpoint {final}: {error.strerror}; free some space, then continue with --resume"
        ) from None
    return Checkpoint(final, progress)


def _is_whole(folder: Path) -> bool:
    try:
        load_checkpoint(folder)
    except RunError:
        return False
    return True


def load_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, its sha256 sums verified. UserError says which file is missing or broken."""
    manifest_file = folder / "manifest.json"
    if not manifest_file.is_file():
        raise RunError(
            f"{folder} is not a checkpoint: it has no manifest.json; give a folder like RUN/checkpoints/rollouts_00032768"
        )
    try:
        manifest = json.loads(manifest_file.read_text())
        for name, entry in manifest["files"].items():
            if _sha256(folder / name) != entry["sha256"]:
                raise RunError(f"checkpoint {folder}: {name} is damaged (its sha256 differs); use an older checkpoint")
        numbers = json.loads((folder / "training/state.json").read_text())
        return Checkpoint(folder, Progress(**numbers["progress"]))
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"checkpoint {folder} is broken ({error}); use an older checkpoint") from None


def newest_checkpoint(parent: Path) -> Checkpoint | None:
    """The newest complete, undamaged checkpoint below `parent`; damaged ones are skipped."""
    return next(saved_checkpoints(parent), None)


def saved_checkpoints(parent: Path) -> Iterator[Checkpoint]:
    """Every complete, undamaged checkpoint below `parent`, newest first."""
    for folder in sorted(parent.glob(f"{PREFIX}*"), reverse=True):
        try:
            yield load_checkpoint(folder)
        except RunError:
            continue


def _seal(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    listing = {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in files}
    for path in files:
        _flush(path)
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({"files": listing}, indent=1))
    _flush(manifest)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
