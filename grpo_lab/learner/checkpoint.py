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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors.torch import load_file, save_file

from grpo_lab.errors import RunError
from grpo_lab.learner.learner import Learner
from grpo_lab.learner.optimizer import LearnerState
from grpo_lab.learner.weights import save_model
from grpo_lab.storage.scratch import PARTIAL, disk_errors, flush, remove_folder

PREFIX = "rollouts_"
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}  # such files can run code when they are opened


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
    partial = parent / f"{PARTIAL}{final.name}"
    shutil.rmtree(partial, ignore_errors=True)
    with disk_errors(final, f"free some space, then continue with --resume {parent.parent}"):
        try:
            _write(partial, learner, tokenizer, progress)
            if final.exists():
                remove_folder(final)
            os.replace(partial, final)
            flush(parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return Checkpoint(final, progress)


def _write(folder: Path, learner: Learner, tokenizer: Any, progress: Progress) -> None:
    (folder / "training").mkdir(parents=True)
    save_model(learner, folder)
    tokenizer.save_pretrained(folder)
    if learner.policy.lora:
        learner.policy.causal_lm.generation_config.save_pretrained(folder)
    state = learner.state()
    save_file(state.tensors, folder / "training/state.safetensors")
    numbers = {"progress": asdict(progress), "learner": state.numbers}
    (folder / "training/state.json").write_text(json.dumps(numbers, indent=1))
    _seal(folder)


def load_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, its sha256 sums verified. RunError says which file is missing or broken."""
    if not folder.is_dir():
        there = ", ".join(sorted(path.name for path in folder.parent.glob(f"{PREFIX}*")))
        raise RunError(f"no checkpoint at {folder}" + (f"; there are: {there}" if there else ""))
    try:
        return _verified(folder)
    except _DamagedError as damage:
        raise RunError(f"checkpoint {folder}: {damage}; use an older checkpoint") from None


def newest_checkpoint(parent: Path, say: Callable[[str], None] = lambda line: None) -> Checkpoint | None:
    """The newest undamaged checkpoint below `parent`, None where there is none at all; `say` is told of newer, damaged ones.

    RunError when all are damaged: going on without any would start again at step 0.
    """
    damaged = list[str]()
    whole = next(saved_checkpoints(parent, damaged.append), None)
    if whole and damaged:
        say(f"warning    {'; '.join(damaged)}; used instead: {whole.folder}")
    elif damaged:
        raise RunError(
            f"no checkpoint in {parent} is whole: {'; '.join(damaged)}; bring one back from a copy, or move them away to start "
            "again at step 0"
        )
    return whole


def saved_checkpoints(parent: Path, damaged: Callable[[str], None] = lambda text: None) -> Iterator[Checkpoint]:
    """Every undamaged checkpoint below `parent`, newest first; `damaged` is told of the others on the way."""
    folders = [path for path in parent.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdecimal()]
    for folder in sorted(folders, key=lambda path: int(path.name.removeprefix(PREFIX)), reverse=True):
        try:
            yield _verified(folder)
        except _DamagedError as damage:
            if folder.is_dir():  # else it has been deleted in the meantime
                damaged(f"checkpoint {folder.name}: {damage}")


class _DamagedError(Exception):
    """What is wrong with a checkpoint, in words that go after its name."""


def _is_whole(folder: Path) -> bool:
    try:
        _verified(folder)
    except _DamagedError:
        return False
    return True


def _verified(folder: Path) -> Checkpoint:
    """The checkpoint, every file that its manifest names read again."""
    manifest = folder / "manifest.json"
    if not manifest.is_file():
        raise _DamagedError(
            "it has no manifest.json, so it is none, or not whole; they are folders like RUN/checkpoints/rollouts_00032768"
        )
    try:
        listed = json.loads(manifest.read_text())["files"]
        if "training/state.json" not in listed:
            raise _DamagedError("manifest.json is damaged (it does not name training/state.json)")
        for file in folder.rglob("*"):
            if file.suffix in _PICKLES:
                raise _DamagedError(f"{file.name} is a pickle, which no checkpoint of grpo_lab has")
        for name, entry in listed.items():
            _verify(folder, name, entry)
        numbers = json.loads((folder / "training/state.json").read_text())
        return Checkpoint(folder, Progress(**numbers["progress"]))
    except OSError as error:
        name = Path(error.filename).name if error.filename else "a file"
        raise _DamagedError(f"{name} cannot be read ({error.strerror or error})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _DamagedError(f"manifest.json or training/state.json is damaged ({error})") from None


def _verify(folder: Path, name: str, entry: dict[str, Any]) -> None:
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise _DamagedError(f"manifest.json names a file outside of the folder, {name!r}")
    size = (folder / name).stat().st_size
    if size != entry["bytes"]:
        raise _DamagedError(f"{name} is damaged ({size:,} bytes instead of {entry['bytes']:,})")
    if _sha256(folder / name) != entry["sha256"]:
        raise _DamagedError(f"{name} is damaged (its sha256 differs)")


def _seal(folder: Path) -> None:
    """Name every file with its sum in the manifest, and have all of it on the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    listing = {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in files}
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({"files": listing}, indent=1))
    for path in (*folder.rglob("*"), folder):
        flush(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
