"""The model and the data: on this machine, to be had from the hub, or missing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from grpo_lab.config import Config, ModelConfig, expand_path
from grpo_lab.environment.facts import Fact, reason
from grpo_lab.environment.model_files import Size, lost_files, measure
from grpo_lab.errors import ConfigError
from grpo_lab.hub import TOKENIZERS, check_local_model

HUB_LIMIT_S = 5.0
_HUB_DATASETS = {"gsm8k": ("openai/gsm8k", "main")}  # of tasks that load from the hub without data.path
_FROM_FILES = ("gsm8k", "jsonl")  # tasks that read data.path and nothing else


class Inputs:
    """The model and the data of `config`. A question to the hub is asked only about what is not on this machine."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._hub: dict[str, Future[Any]] = {}
        self._deadline = time.monotonic() + HUB_LIMIT_S

    def ask(self) -> Iterator[Fact]:
        """Ask the hub about what is missing here, unless it is switched off; the answers come with the facts below."""
        self._deadline = time.monotonic() + HUB_LIMIT_S
        if self._model_missing and not _offline():
            self._hub["model"] = ask_hub(self._ask_model)
        if self._data_missing and not _offline():
            self._hub["data"] = ask_hub(self._ask_data)
        return iter(())

    def _answer(self, what: str) -> Any:
        return self._hub[what].result(max(0.0, self._deadline - time.monotonic()))

    @cached_property
    def folder(self) -> Path | None:
        """The model's folder on this machine, a hub model's in the cache; None when there is none."""
        model = self._config.model
        try:
            return check_local_model(model) or _cached_model(model)
        except ConfigError:
            return None

    @cached_property
    def size(self) -> Size | None:
        """The model's size from its files, else from the hub's answer; None when neither tells."""
        rank = self._config.model.lora_rank
        try:
            if self.folder is not None:
                return measure(self.folder, rank)
            total = self._answer("model").safetensors.total
        except Exception:  # every reason is said where the model itself is judged
            return None
        return Size(total, total) if not rank else None

    @property
    def learner_bytes(self) -> int | None:
        """See Size.learner."""
        return self.size.learner(self._config.model.dtype) if self.size else None

    def model_fact(self) -> Iterator[Fact]:
        """The model where it is, or what keeps it away."""
        model = self._config.model
        try:
            local = check_local_model(model)
        except ConfigError as error:
            yield Fact("model", "FAIL", f"{error}: prevents training")
            return
        if self.folder is not None:
            yield judge_model_folder(self.folder, f"{model.place}{'' if local else ', in the cache'}", self.size)
        else:
            yield self._judge_hub("model", f"model.name={model.name!r}", "--set model.name=FOLDER")

    def data_fact(self) -> Iterator[Fact]:
        """The task's data where it is, or what keeps it away."""
        data = self._config.data
        if data.task in _FROM_FILES and (data.path or data.task not in _HUB_DATASETS):
            yield self._judge_files()
        elif data.task == "reasoning_gym":
            yield judge_reasoning_gym()
        elif data.task not in _HUB_DATASETS:
            there = not data.path or Path(expand_path(data.path)).exists()
            text = f"task {data.task} brings its own; it is not looked into here"
            yield Fact(
                "data", "pass" if there else "FAIL", text if there else f"data.path={data.path!r} does not exist"
            )
        elif not self._data_missing:
            yield Fact("data", "pass", f"{_HUB_DATASETS[data.task][0]}, in the cache")
        else:
            yield self._judge_hub(
                "data", f"data set {_HUB_DATASETS[data.task][0]!r}", "--set data.path=FOLDER (with train.jsonl)"
            )

    def _judge_files(self) -> Fact:
        from grpo_lab.tasks import load_task

        try:
            task = load_task(self._config.data)
        except ConfigError as error:
            return Fact("data", "FAIL", f"{error}: prevents training")
        return Fact(
            "data",
            "pass",
            f"{self._config.data.path}: {len(task.train)} problems to train on, {len(task.heldout)} held out",
        )

    def _judge_hub(self, what: str, name: str, local: str) -> Fact:
        if what not in self._hub:
            return judge_hub(what, name, local, offline=True, error=None)
        try:
            self._answer(what)
        except Exception as error:
            return judge_hub(what, name, local, offline=False, error=error)
        return judge_hub(what, name, local, offline=False, error=None)

    @property
    def _model_missing(self) -> bool:
        if self.folder is not None:
            return False
        try:
            return check_local_model(self._config.model) is None
        except ConfigError:
            return False

    @property
    def _data_missing(self) -> bool:
        data = self._config.data
        if data.path is not None or data.task not in _HUB_DATASETS:
            return False
        from huggingface_hub.constants import HF_HOME

        name, part = _HUB_DATASETS[data.task]
        parent = Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets")
        return not (parent / name.replace("/", "___") / part).is_dir()

    def _ask_model(self) -> Any:
        from huggingface_hub import HfApi

        model = self._config.model
        return HfApi().model_info(model.place, revision=model.revision, timeout=HUB_LIMIT_S)

    def _ask_data(self) -> Any:
        from huggingface_hub import HfApi

        return HfApi().dataset_info(_HUB_DATASETS[self._config.data.task][0], timeout=HUB_LIMIT_S)


def ask_hub(question: Callable[[], Any]) -> Future[Any]:
    """The answer to `question`, asked on a thread that nobody waits for: looking a name up cannot be interrupted."""
    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True, name="hub").start()
    return answer


def judge_hub(what: str, name: str, local: str, offline: bool, error: Exception | None) -> Fact:
    """A hub's `what` that is not on this machine: pass when the hub has it, else what to do; `local` names the way without."""
    prevents = "prevents training" if what == "model" else "prevents this task"
    if offline:
        text = f"{name} is not on this machine and the hub is switched off: {prevents}"
        return Fact(what, "FAIL", f"{text}; `unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE` to download it, or {local}")
    if error is None:
        return Fact(what, "pass", f"{name} is not here yet; the hub has it, and the first run downloads it")
    if "NotFound" in type(error).__name__ or "Gated" in type(error).__name__:
        text = f"{name}: the hub has none that this machine may read ({type(error).__name__}): {prevents}"
        return Fact(what, "FAIL", f"{text}; check the name, `hf auth login` for a private or gated one, or {local}")
    why = f"no answer in {HUB_LIMIT_S:.0f} s" if isinstance(error, TimeoutError) else reason(error)
    text = f"{name} is not on this machine and the hub cannot be reached ({why}): {prevents}"
    return Fact(what, "FAIL", f"{text}; check network and proxy (HF_ENDPOINT names a mirror), or {local}")


def judge_model_folder(folder: Path, name: str, measured: Size | None) -> Fact:
    """A model folder's completeness; `measured` is None where it has no safetensors."""
    if lost := lost_files(folder):
        text = f"{name}: missing or damaged: {', '.join(lost[:3])}{' and more' if lost[3:] else ''}"
        return Fact("model", "FAIL", f"{text}: prevents training; copy or download it again")
    if not any((folder / file).is_file() for file in TOKENIZERS):
        return Fact(
            "model", "FAIL", f"{name}: no tokenizer ({TOKENIZERS[0]}): prevents training; copy it beside the weights"
        )
    if measured is None:
        return Fact("model", "warn", f"{name}: no *.safetensors, so its size is unknown; save_pretrained writes them")
    return Fact("model", "pass", f"{name}: {measured.parameters / 1e6:,.0f} million parameters")


def judge_reasoning_gym() -> Fact:
    """The package that makes the problems."""
    try:
        return Fact("data", "pass", f"made by reasoning-gym {metadata.version('reasoning-gym')}, nothing to download")
    except metadata.PackageNotFoundError:
        return Fact(
            "data",
            "FAIL",
            "reasoning-gym is not installed: prevents data.task=reasoning_gym; `pip install reasoning-gym`",
        )


def _cached_model(model: ModelConfig) -> Path | None:
    """The hub's snapshot in the cache, if it has all its weights."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(model.place, revision=model.revision, local_files_only=True))
    except Exception:  # not there, or no valid name: the hub's own answer says which
        return None
    return folder if (folder / "config.json").is_file() and measure(folder, 0) else None


def _offline() -> bool:
    from huggingface_hub.constants import HF_HUB_OFFLINE

    return bool(HF_HUB_OFFLINE)
