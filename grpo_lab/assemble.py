"""Config -> the running parts of a job: task, tokenizer, engine, learner. Used by training and by evaluation alike."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo_lab.config import Config, expand_path
from grpo_lab.environment.model_files import measure as model_size
from grpo_lab.errors import ConfigError
from grpo_lab.hub import check_local_model, load_tokenizer, resolve_model, stop_token_ids
from grpo_lab.learner.checkpoint import Checkpoint
from grpo_lab.learner.learner import Learner
from grpo_lab.learner.weights import export_weights, weight_digests
from grpo_lab.objective.axes import Objective, resolve
from grpo_lab.objective.gates import build_gate
from grpo_lab.rollout.collect import Collector, render_prompt
from grpo_lab.rollout.engines import Engine, EngineSpec, build_engine, find_engine
from grpo_lab.storage.scratch import scratch_folder
from grpo_lab.tasks import TaskProtocol, find_task, load_task
from grpo_lab.types import Canary, Sampling

_CANARY_TOKENS = 256
_EXACT_LIMIT = 0.01  # nats per token between a sampler and a learner that both compute in fp32


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
    canary_ids: tuple[int, ...]

    @property
    def evaluation_sampling(self) -> Sampling:
        """The policy under evaluation: temperature 1, top-p 1 (THEORY C.1)."""
        return replace(self.sampling, temperature=1.0, top_p=1.0)

    @property
    def largest_reward(self) -> float:
        """The most this task pays for a completion; 1 unless the task says otherwise."""
        return float(getattr(self.task, "largest_reward", 1.0))

    def push_weights(self, version: int) -> dict[str, float]:
        """Send the learner's weights to the engine, stamped `version`, and have it prove what it holds: the metrics."""
        folder = self.weights_dir / f"version_{version:08d}"
        export_weights(self.learner, folder)
        self.engine.load_weights(folder, version)
        kept = 1 + (self.config.rollout.max_staleness + 1 if self.learner.policy.lora else 0)  # adapters still in use
        for old in sorted(self.weights_dir.iterdir())[:-kept]:
            shutil.rmtree(old, ignore_errors=True)
        return self._verify(version)

    def push_reference(self) -> None:
        """Have the engine prove that it holds the reference, which attached workers, after another run, get first."""
        if not self.config.model.lora_rank:
            folder = self.weights_dir / "reference"
            export_weights(self.learner, folder, reference=True)
            self.engine.load_weights(folder, 0)
        self._verify(0, reference=True)

    def _verify(self, version: int, reference: bool = False) -> dict[str, float]:
        verify: Callable[[Canary], dict[str, float]] | None = getattr(self.engine, "verify", None)
        if verify is None:
            return {}
        score = partial(self.learner.score, reference=reference)
        logprobs = score(self.canary_ids[:1], self.canary_ids[1:])
        digests = lambda: weight_digests(self.learner.weights(reference))  # noqa: E731
        return verify(Canary(version, self.canary_ids, logprobs, self.canary_limit, score, digests))

    @property
    def canary_limit(self) -> float:
        """How far a sampler with the learner's weights may be from it, nats per token on average: rounding of the dtype."""
        limit = self.config.rollout.mismatch_limit
        return min(limit, _EXACT_LIMIT) if self.config.model.dtype == "float32" else limit

    def close(self) -> None:
        """Stop the engine and remove the pushed weights."""
        self.engine.close()
        shutil.rmtree(self.weights_dir, ignore_errors=True)


def check(config: Config, processes: int = 1) -> Objective:
    """What can be refused before anything loads: axes, gate, the names of engine and task, a local model's folder.

    `processes` of the learner, or as many as a launcher has started.
    """
    objective = resolve(config)
    _check_rollout(config, max(processes, int(os.environ.get("WORLD_SIZE", "1"))))
    build_gate(objective.gate, objective.gate_options, objective.level)
    find_engine(config.rollout.engine_name)
    find_task(config.data.task)
    check_local_model(config.model)
    return objective


def _check_rollout(config: Config, processes: int) -> None:
    """ConfigError for workers that cannot be, and for staleness without an engine that samples beside the learner."""
    rollout = config.rollout
    if rollout.has_workers and rollout.engine_name != "vllm_server":
        raise ConfigError(
            f"rollout.workers and rollout.urls are vLLM servers, but rollout.engine={rollout.engine}: leave it at vllm, or "
            "set rollout.workers=0 and rollout.urls=[]"
        )
    if processes > 1 and rollout.engine_name == "vllm":
        raise ConfigError(
            f"{processes} learner processes and rollout.engine=vllm in one of them: give the engine GPUs of its own with "
            "--set rollout.workers=1 (or more), or attach workers with rollout.urls"
        )
    if rollout.max_staleness and not getattr(find_engine(rollout.engine_name), "concurrent", False):
        raise ConfigError(
            f"rollout.max_staleness={rollout.max_staleness} lets sampling run beside the training, which engine "
            f"{rollout.engine_name} cannot: add --set rollout.workers=1 (or more), or rollout.urls, or set it to 0"
        )
    if rollout.in_flight != "wait" and (config.model.lora_rank or not rollout.max_staleness):
        lora = config.model.lora_rank > 0
        reason = "an adapter comes beside the one in use" if lora else "with max_staleness 0 nothing runs at a push"
        raise ConfigError(f"rollout.in_flight={rollout.in_flight} has no meaning here ({reason}): leave it at wait")


def check_data(config: Config) -> TaskProtocol | None:
    """Load local data, so that wrong options and rows are refused; None for data on the hub, which is not fetched.

    ConfigError says why.
    """
    return _load_task(config) if config.data.path is not None or config.data.task != "gsm8k" else None


def assemble(
    config: Config,
    checkpoint: Checkpoint | None = None,
    training: bool = True,
    say: Callable[[str], None] = lambda line: None,
    task: TaskProtocol | None = None,
) -> Parts:
    """Load data, model and engine; the learner starts from `checkpoint` when given, with its training state if `training`.

    `task` is what `check_data` has loaded already. `say` takes a line for the user, now and while the engine runs.
    """
    objective = check(config)
    task = task or _load_task(config)
    base = resolve_model(config.model)
    tokenizer = load_tokenizer(base, config.model.trust_remote_code)
    sampling = build_sampling(config, base, tokenizer)
    if not tokenizer.chat_template:
        say("note       the tokenizer has no chat template: a prompt is the plain text of its messages")
    prompt = render_prompt(tokenizer, task.train[0], config.rollout.max_prompt_tokens)[-_CANARY_TOKENS:]
    canary = prompt if len(prompt) > 1 else prompt * 2
    with ExitStack() as on_failure:
        weights = _weights_dir(config, base)
        on_failure.callback(shutil.rmtree, weights, ignore_errors=True)
        engine = build_engine(EngineSpec(base, config.model, config.rollout, say))
        on_failure.callback(engine.close)
        learner = build_learner(config, checkpoint, training, base)
        collector = Collector(engine, tokenizer, task.grade, config.seed, config.rollout.max_prompt_tokens)
        parts = Parts(config, objective, task, tokenizer, sampling, engine, collector, learner, weights, canary)
        if config.rollout.urls:
            parts.push_reference()
        on_failure.pop_all()
        return parts


def build_sampling(config: Config, base: Path, tokenizer: Any) -> Sampling:
    """How the config samples; completions end where the model in `base` says."""
    return Sampling(
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        stop_token_ids=stop_token_ids(base, tokenizer),
    )


def build_learner(
    config: Config, checkpoint: Checkpoint | None = None, training: bool = True, base: Path | None = None
) -> Learner:
    """The learner alone, at `checkpoint` when given, with its training state if `training`; `base` where it is known."""
    state = checkpoint.training_state if checkpoint and training else None
    return Learner(
        config, resolve(config), base or resolve_model(config.model), checkpoint.folder if checkpoint else None, state
    )


def _load_task(config: Config) -> TaskProtocol:
    """The task, with the held-out problems that evaluations need."""
    task = load_task(config.data)
    if config.evaluation.enabled and len(task.heldout) < config.evaluation.problems:
        raise ConfigError(
            f"evaluation.problems={config.evaluation.problems}, but task {config.data.task!r} holds out only "
            f"{len(task.heldout)} problems: lower evaluation.problems or raise data.heldout_problems"
        )
    return task


def _weights_dir(config: Config, model: Path) -> Path:
    """A new folder for pushes, in shared memory where it fits."""
    if config.rollout.weights_dir:
        parent = Path(expand_path(config.rollout.weights_dir))
        if not parent.is_dir():
            raise ConfigError(
                f"rollout.weights_dir={config.rollout.weights_dir!r}: no such folder; create it or leave it null"
            )
    else:
        size = model_size(model, config.model.lora_rank)
        shared = Path("/dev/shm")
        fits = size and shared.is_dir() and shutil.disk_usage(shared).free > 2 * size.push(config.model.dtype)
        parent = shared if fits else Path(tempfile.gettempdir())
    return scratch_folder("weights", parent)
