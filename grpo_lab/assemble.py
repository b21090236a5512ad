"""Config -> the running parts of a job: task, tokenizer, engine, learner. Used by training and by evaluation alike."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_lab.config import Config, expand_path
from grpo_lab.errors import ConfigError
from grpo_lab.hub import check_local_model, load_tokenizer, resolve_model, stop_token_ids
from grpo_lab.learner.checkpoint import Checkpoint
from grpo_lab.learner.learner import Learner
from grpo_lab.learner.weights import export_weights
from grpo_lab.objective.axes import Objective, resolve
from grpo_lab.objective.gates import build_gate
from grpo_lab.rollout.collect import Collector
from grpo_lab.rollout.engines import Engine, EngineSpec, build_engine, find_engine
from grpo_lab.tasks import TaskProtocol, find_task, load_task
from grpo_lab.types import Sampling

_WEIGHTS_PREFIX = "grpo_lab-weights-"


@dataclass(frozen=True)
class Parts:
    """Everything a job runs on. `weights_dir` is where pushes travel; it is this job's own and goes with it."""

    config: Config
    objective: Objective
    task: TaskProtocol
    tokenizer: Any
    sampling: Sampling
    engine: Engine
    collector: Collector
    learner: Learner
    weights_dir: Path

    @property
    def evaluation_sampling(self) -> Sampling:
        """The policy under evaluation: temperature 1, top-p 1 (THEORY C.1)."""
        return replace(self.sampling, temperature=1.0, top_p=1.0)

    @property
    def largest_reward(self) -> float:
        """The most this task pays for a completion; 1 unless the task says otherwise."""
        return float(getattr(self.task, "largest_reward", 1.0))

    def push_weights(self, version: int) -> None:
        """Send the learner's weights to the engine, stamped `version`."""
        export_weights(self.learner.policy, self.weights_dir)
        self.engine.load_weights(self.weights_dir, version)

    def close(self) -> None:
        """Stop the engine and remove the pushed weights."""
        self.engine.close()
        shutil.rmtree(self.weights_dir, ignore_errors=True)


def check(config: Config) -> Objective:
    """What can be refused before anything loads: axes, gate, the names of engine and task, a local model's folder."""
    objective = resolve(config)
    build_gate(objective.gate, objective.gate_options, objective.level)
    find_engine(config.rollout.engine)
    find_task(config.data.task)
    check_local_model(config.model)
    return objective


def check_data(config: Config) -> None:
    """Load local data, so that wrong options and rows are refused; data on the hub is not fetched. ConfigError says why."""
    if config.data.path is not None or config.data.task != "gsm8k":
        _check_task_size(config, load_task(config.data))


def assemble(config: Config, checkpoint: Checkpoint | None = None, training: bool = True) -> Parts:
    """Load data, model and engine; the learner starts from `checkpoint` when given, with its training state if `training`."""
    objective = check(config)
    task = load_task(config.data)
    _check_task_size(config, task)
    base = resolve_model(config.model)
    tokenizer = load_tokenizer(base, config.model.trust_remote_code)
    sampling = Sampling(
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        stop_token_ids=stop_token_ids(base, tokenizer),
    )
    engine = build_engine(EngineSpec(base, config.model, config.rollout))
    state = checkpoint.training_state if checkpoint and training else None
    learner = Learner(config, objective, base, checkpoint.folder if checkpoint else None, state)
    collector = Collector(engine, tokenizer, task.grade, config.seed, config.rollout.max_prompt_tokens)
    return Parts(config, objective, task, tokenizer, sampling, engine, collector, learner, _weights_dir(config, base))


def _check_task_size(config: Config, task: TaskProtocol) -> None:
    if config.evaluation.enabled and len(task.heldout) < config.evaluation.problems:
        raise ConfigError(
            f"evaluation.problems={config.evaluation.problems}, but task {config.data.task!r} holds out only "
            f"{len(task.heldout)} problems: lower evaluation.problems or raise data.heldout_problems"
        )


def _weights_dir(config: Config, model: Path) -> Path:
    """A new folder for pushes, in shared memory where it fits; folders that killed jobs left there go first."""
    if config.rollout.weights_dir:
        parent = Path(expand_path(config.rollout.weights_dir))
        if not parent.is_dir():
            raise ConfigError(
                f"rollout.weights_dir={config.rollout.weights_dir!r}: no such folder; create it or leave it null"
            )
    else:
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        shared = Path("/dev/shm")
        fits = shared.is_dir() and shutil.disk_usage(shared).free > 2 * size
        parent = shared if fits else Path(tempfile.gettempdir())
    for stale in parent.glob(f"{_WEIGHTS_PREFIX}*"):
        owner = stale.name.removeprefix(_WEIGHTS_PREFIX).split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists() and Path("/proc/self").exists():
            shutil.rmtree(stale, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_WEIGHTS_PREFIX}{os.getpid()}-", dir=parent))
