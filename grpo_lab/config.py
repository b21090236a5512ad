"""The run's configuration as frozen pydantic models. Imports no torch; config_file.py reads and writes it.

The defaults are the GSM8K experiment with Qwen2.5-0.5B-Instruct. Axes left at null come from `--method` and `--recipe`
(see methods.py).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from string import Template
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator

from grpo_lab.errors import ConfigError

Level = Literal["token", "sequence", "sequence_token", "geometric_mean"]
AdvantageName = Literal["leave_one_out", "center", "zscore", "batch_zscore"]
KLName = Literal["reward", "loss_k1", "loss_k2", "loss_k3", "loss_k3_is", "loss_k2_sequence", "none"]
AggregateName = Literal["token_mean", "sequence_mean", "sequence_sum", "constant_length"]
OldPolicy = Literal["learner", "rollout"]
CorrectionName = Literal["none", "tis", "tis_sequence", "icepop", "mis", "mis_sequence", "m2po"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


class ModelConfig(_Section):
    """The policy. `name` is a hub id or a folder; `dtype` holds for the sampler and the learner alike."""

    name: str = "Qwen/Qwen2.5-0.5B-Instruct"
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    trust_remote_code: bool = False
    gradient_checkpointing: bool = False
    lora_rank: int = Field(0, ge=0)  # 0 = full fine-tuning
    lora_alpha: float = Field(32.0, gt=0)

    @property
    def place(self) -> str:
        """The hub id, or the folder with its variables replaced."""
        return expand_path(self.name)


class DataConfig(_Section):
    """The task: a file of grpo_lab/tasks or a dotted path, its data, and the disjoint train/held-out split."""

    task: str = "gsm8k"
    path: str | None = None  # local data instead of the hub
    train_problems: int | None = Field(6500, ge=1)  # null = all that are not held out
    heldout_problems: int = Field(500, ge=1)
    split_seed: int = 0
    options: dict[str, JsonValue] = {}  # the task's own


class RolloutConfig(_Section):
    """Sampling of completions. T != 1 or top-p < 1 changes the policy that is trained; the trainer warns."""

    engine: str = "vllm"
    workers: int = Field(0, ge=0)  # vLLM servers to start beside the learner; 0 = the engine runs in its process
    urls: list[str] = []  # running workers to attach, http://host:port; `grpo-lab worker` starts one
    worker_gpus: int = Field(1, ge=1)  # GPUs of one worker (tensor parallel)
    worker_gpu_memory: float = Field(0.9, gt=0, lt=1)  # share of its GPUs' memory a worker takes
    worker_timeout_s: float = Field(60, gt=0)  # a worker silent for this long counts as hung
    worker_restarts: int = Field(3, ge=0)  # of one worker in a run
    max_staleness: int = Field(0, ge=0)  # pushes a completion may be behind; above 0 sampling overlaps training
    in_flight: Literal["wait", "keep", "abort"] = (
        "wait"  # running completions at a push: finish, go on with new weights, redo
    )
    max_new_tokens: int = Field(512, ge=1)
    max_prompt_tokens: int = Field(512, ge=1)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    gpu_memory_utilization: float = Field(0.4, gt=0, lt=1)
    cpu_kv_cache_gb: int = Field(2, ge=1)
    weights_dir: str | None = None  # where weight pushes travel; null = /dev/shm, else the temporary directory
    mismatch_limit: float = Field(0.3, gt=0)  # mean |learner - sampler| log-prob in nats that stops the run

    @field_validator("urls")
    @classmethod
    def _check_urls(cls, urls: list[str]) -> list[str]:
        plain = [url.rstrip("/") for url in urls]
        for url in plain:
            if not re.fullmatch(r"https?://[^/\s:]+(:\d+)?", url):
                raise ValueError(f"{url!r} is no worker's address: write http://host:port")
            if plain.count(url) > 1:
                raise ValueError(f"{url!r} stands twice: name each worker once")
        return plain

    @property
    def started_workers(self) -> int:
        """The vLLM servers that a run with workers starts itself: one where none is counted and none attached."""
        return self.workers or int(not self.urls)

    @property
    def has_workers(self) -> bool:
        return bool(self.workers or self.urls or self.engine == "vllm_server")

    @property
    def engine_name(self) -> str:
        """The engine that runs: vLLM's servers where workers are asked for."""
        return "vllm_server" if self.engine == "vllm" and self.has_workers else self.engine


class ObjectiveConfig(_Section):
    """The five axes, the old policy, the correction, and what DAPO adds; null = what `method` and `recipe` say."""

    gate: str | None = None
    gate_options: dict[str, float] = {}
    level: Level | None = None
    advantage: AdvantageName | None = None
    zscore_ddof: Literal[0, 1] = 1  # divisor G - ddof of the variance in `zscore` and `batch_zscore`
    kl: KLName | None = None
    aggregate: AggregateName | None = None
    old: OldPolicy | None = None
    correction: CorrectionName | None = None  # null = none, or tis where completions may be stale
    correction_options: dict[str, float] = {}
    dynamic_sampling: bool | None = None  # replace groups whose rewards are all equal
    max_regenerations: int = Field(4, ge=1)  # rounds of replacement a step; what is unmixed after them is kept
    overlong_cache: int | None = Field(None, ge=0)  # soft penalty over the last tokens before max_new_tokens; 0 = none
    mask_truncated: bool = False  # truncated completions give no gradient


class LearnerConfig(_Section):
    """AdamW on groups; `passes` x `mini_batches` optimizer steps per rollout batch."""

    learning_rate: float = Field(1e-6, gt=0)
    warmup_updates: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: float = Field(0.0, ge=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    max_grad_norm: float = Field(1.0, gt=0)
    passes: int = Field(1, ge=1)
    mini_batches: int = Field(4, ge=1)
    microbatch_tokens: int = Field(16384, ge=1)  # of one forward, padding included, a shared prompt once
    shard: bool = False  # several processes: each holds its part of weights, gradients and moments (FSDP2)
    share_prompt: bool = True  # run each prompt once per group instead of once per sibling


class EvaluationConfig(_Section):
    """Free-energy evaluation at step 0 and at every checkpoint: the same held-out problems and seeds each time."""

    enabled: bool = True
    problems: int = Field(500, ge=2)
    samples: int = Field(8, ge=2)
    bank_dir: str | None = None  # where runs share the reference's samples; null = each run its own


class TrackingConfig(_Section):
    """metrics.jsonl is always written; these are extras."""

    rollouts: bool = True  # keep every rollout as parquet
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    wandb_project: str = "grpo_lab"
    tensorboard: bool = False  # event files in RUN/tensorboard


class Config(_Section):
    """A whole run. `total_rollouts` is authoritative: groups, steps, epochs and checkpoints follow (see `BatchAlgebra`)."""

    method: str = "grpo"
    recipe: Literal["free_energy", "paper"] = "free_energy"
    beta: float = Field(0.05, gt=0)
    seed: int = Field(0, ge=0)
    group_size: int = Field(32, ge=2)
    prompts_per_step: int = Field(32, ge=1)
    total_rollouts: int = Field(262_144, ge=1)
    checkpoint_every: int = Field(32_768, ge=1)
    keep_last: int = Field(0, ge=0)  # the newest checkpoints to keep; 0 = all
    keep_every: int = Field(0, ge=0)  # with keep_last, also those at multiples of this many rollouts; 0 = none
    output_dir: str = "runs"
    run_name: str | None = None
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    learner: LearnerConfig = LearnerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def rollouts_per_step(self) -> int:
        return self.prompts_per_step * self.group_size


def check_batch_algebra(config: Config) -> None:
    """Refuse counts that do not divide: every step is whole, every checkpoint falls on a step."""
    step = config.rollouts_per_step
    for key in ("total_rollouts", "checkpoint_every"):
        value = getattr(config, key)
        if value % step:
            near = max(step, round(value / step) * step)
            raise ConfigError(
                f"{key}={value} is not a multiple of prompts_per_step x group_size = "
                f"{config.prompts_per_step} x {config.group_size} = {step}: use for example {key}={near}"
            )
    if config.prompts_per_step % config.learner.mini_batches:
        raise ConfigError(
            f"learner.mini_batches={config.learner.mini_batches} does not divide prompts_per_step="
            f"{config.prompts_per_step}: groups are never split over mini-batches; choose a divisor"
        )
    if config.evaluation.enabled and config.evaluation.problems > config.data.heldout_problems:
        raise ConfigError(
            f"evaluation.problems={config.evaluation.problems} but only data.heldout_problems="
            f"{config.data.heldout_problems} are held out: lower the first or raise the second"
        )


def cache_folder() -> Path:
    """Where models written on this machine lie: $GRPO_LAB_CACHE, else grpo_lab below $XDG_CACHE_HOME or ~/.cache."""
    parent = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("GRPO_LAB_CACHE") or Path(parent) / "grpo_lab").expanduser()


def expand_path(text: str) -> str:
    """`~` and `$VARIABLES` of a path replaced ($GRPO_LAB_CACHE has a default); hub ids pass unchanged."""
    variables = {**os.environ, "GRPO_LAB_CACHE": str(cache_folder())}
    return os.path.expanduser(Template(text).safe_substitute(variables))
