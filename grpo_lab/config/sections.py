"""The sections of a configuration as frozen pydantic models; the text below a field is what `config explain` says of it."""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationInfo, field_validator

from grpo_lab.paths import expand_path

Level = Literal["token", "sequence", "sequence_token", "geometric_mean"]
AdvantageName = Literal["leave_one_out", "center", "zscore", "batch_zscore"]
KLName = Literal["reward", "loss_k1", "loss_k2", "loss_k3", "loss_k3_is", "loss_k2_sequence", "none"]
AggregateName = Literal["token_mean", "sequence_mean", "sequence_sum", "constant_length"]
OldPolicy = Literal["learner", "rollout"]
CorrectionName = Literal["none", "tis", "tis_sequence", "icepop", "mis", "mis_sequence", "m2po"]

_LARGEST = 2**53  # beyond it a float skips whole numbers


class Section(BaseModel):
    """What every part of a configuration has: it is frozen, knows all its keys, and takes no switch for a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _check_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML's yes, no, on and off are booleans, which pydantic takes for 1 and 0; and counts are no astronomy."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if {int, float, 0} & {kind, *get_args(kind)}:
            for each in value.values() if isinstance(value, dict) else [value]:
                if isinstance(each, bool):
                    raise ValueError("a number is needed; YAML reads yes, no, on and off as true and false")
                if isinstance(each, int) and abs(each) > _LARGEST:
                    raise ValueError(f"input should be at most {_LARGEST:,}")
        return value


class ModelConfig(Section):
    """The policy; the sampler and the learner hold the same numbers."""

    name: str = "Qwen/Qwen2.5-0.5B-Instruct"
    """Hub id or folder of a transformers model; `~` and `$VARIABLES` of a folder are replaced."""
    revision: str | None = None
    """Branch, tag or commit of the hub's model; null = its newest."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of sampler and learner alike; the learner trains float32 master weights under the two half precisions."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, more time, the same gradient."""
    lora_rank: int = Field(0, ge=0)
    """Rank of the LoRA adapters; 0 = full fine-tuning."""
    lora_alpha: float = Field(32.0, gt=0)
    """Adapters are scaled by lora_alpha / lora_rank."""

    @property
    def place(self) -> str:
        """The hub id, or the folder with its variables replaced."""
        return expand_path(self.name)


class DataConfig(Section):
    """The task, its data, and the disjoint split into training and held-out problems."""

    task: str = "gsm8k"
    """A task of `grpo-lab list`, or a dotted path module:Class to yours."""
    path: str | None = None
    """Local data, a jsonl file or its folder, instead of the hub's; null = what the task has by itself."""
    train_problems: int | None = Field(6500, ge=1)
    """Problems to train on; null = all that are not held out."""
    heldout_problems: int = Field(500, ge=1)
    """Problems kept out of the training, for evaluations."""
    split_seed: int = 0
    """Seed of the split alone: runs of different `seed` hold out the same problems."""
    options: dict[str, JsonValue] = {}
    """The task's own keys, for example grading, instruction, reward; a wrong one is refused with the list of its keys."""


class RolloutConfig(Section):
    """Sampling of completions, in the learner's process or by vLLM servers beside it."""

    engine: str = "vllm"
    """An engine of `grpo-lab list`, or a dotted path module:Class; with workers, vllm means vLLM servers."""
    workers: int = Field(0, ge=0)
    """vLLM servers to start beside the learner; 0 = the engine runs in its process."""
    urls: list[str] = []
    """Running workers to attach, each http://host:port; `grpo-lab worker` starts them."""
    worker_gpus: int = Field(1, ge=1)
    """GPUs of one worker (tensor parallel)."""
    worker_gpu_memory: float = Field(0.9, gt=0, lt=1)
    """Share of its GPUs' memory that a worker takes."""
    worker_timeout_s: float = Field(60, gt=0)
    """Seconds of silence after which a worker counts as hung."""
    worker_restarts: int = Field(3, ge=0)
    """How often one worker is restarted in a run; 0 = never."""
    max_staleness: int = Field(0, ge=0)
    """Pushes of weights that a completion may be behind; above 0 sampling overlaps training, 0 = always the newest weights."""
    in_flight: Literal["wait", "keep", "abort"] = "wait"
    """Completions that run at a push: wait for them, keep them going with the new weights, or abort and start over."""
    max_new_tokens: int = Field(512, ge=1)
    """Longest completion, in tokens; a longer one is truncated and has reward 0."""
    max_prompt_tokens: int = Field(512, ge=1)
    """Longest prompt, in tokens; a longer one stops the run."""
    temperature: float = Field(1.0, gt=0)
    """Of the training's sampling; other than 1 changes the policy that is trained, and the run warns."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus of the training's sampling; below 1 changes the policy that is trained, and the run warns."""
    gpu_memory_utilization: float = Field(0.4, gt=0, lt=1)
    """Share of the learner's GPU that vLLM takes in its process."""
    cpu_kv_cache_gb: int = Field(2, ge=1)
    """GiB of key-value cache of vLLM on a CPU."""
    weights_dir: str | None = None
    """Folder through which weights travel to the sampler; null = /dev/shm where they fit, else the temporary directory."""
    mismatch_limit: float = Field(0.3, gt=0)
    """Mean |learner - sampler| log-prob, nats a token, above which the run stops."""

    @field_validator("urls")
    @classmethod
    def _check_urls(cls, urls: list[str]) -> list[str]:
        plain = [url.rstrip("/") for url in urls]
        for url in plain:
            if not re.fullmatch(r"https?://[^/\s:@]+(:\d+)?", url):
                raise ValueError(f"{url!r} is no worker's address: write http://host:port, without a name or password")
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


class ObjectiveConfig(Section):
    """The five axes, the old policy, the correction, and what DAPO adds; null = what `method` and `recipe` say."""

    gate: str | None = None
    """How much of a token's signal its ratio lets through: a gate of `grpo-lab list`, or module:Class; null = the method's."""
    gate_options: dict[str, float] = {}
    """Parameters of the gate, for example clip_low and clip_high; those not given are the method's, or the gate's defaults."""
    level: Level | None = None
    """What the ratio is taken over; null = the method's."""
    advantage: AdvantageName | None = None
    """Baseline and scale of a completion's return among its siblings; null = what method and recipe say."""
    zscore_ddof: Literal[0, 1] = 1
    """Divisor G - ddof of the variance in the advantages `zscore` and `batch_zscore`."""
    kl: KLName | None = None
    """Where the KL to the reference enters, and by which estimator; null = what method and recipe say."""
    aggregate: AggregateName | None = None
    """How token losses become one number; null = what method and recipe say."""
    old: OldPolicy | None = None
    """Whose log-probs the ratio divides by, the learner's before the update or the sampler's; null = the method's."""
    correction: CorrectionName | None = None
    """Weights for the mismatch of sampler and learner; null = none, or tis where completions may be stale."""
    correction_options: dict[str, float] = {}
    """Parameters of the correction: cap, low and high, or limit."""
    dynamic_sampling: bool | None = None
    """Replace groups whose rewards are all equal by new ones (DAPO); null = what method and recipe say."""
    max_regenerations: int = Field(4, ge=1)
    """Rounds of replacement a step under dynamic_sampling; what is unmixed after them is kept."""
    overlong_cache: int | None = Field(None, ge=0)
    """Tokens before max_new_tokens over which a penalty grows (DAPO); 0 = none, null = what method and recipe say."""
    mask_truncated: bool = False
    """Let truncated completions give no gradient."""


class LearnerConfig(Section):
    """AdamW on groups; `passes` x `mini_batches` optimizer steps per rollout batch."""

    learning_rate: float = Field(1e-6, gt=0)
    """AdamW's step size after the warm-up."""
    warmup_updates: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate rises from 0; 0 = no warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate after the warm-up; linear and cosine fall to 0 at the end of the run."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay; 0 = none."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of AdamW's second moment."""
    max_grad_norm: float = Field(1.0, gt=0)
    """The gradient's norm is clipped to this."""
    passes: int = Field(1, ge=1)
    """Times each rollout batch is trained on."""
    mini_batches: int = Field(4, ge=1)
    """Optimizer steps of one pass; divides prompts_per_step, since groups are never split."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Tokens of one forward, padding included, a shared prompt once; changes memory and time, not the gradient."""
    shard: bool = False
    """With several processes, each holds its part of weights, gradients and moments (FSDP2)."""
    share_prompt: bool = True
    """Run each prompt once per group instead of once per sibling; changes time, not the gradient."""


class EvaluationConfig(Section):
    """Free-energy evaluation at step 0 and at every checkpoint: the same held-out problems and seeds each time."""

    enabled: bool = True
    """Evaluate at all."""
    problems: int = Field(500, ge=2)
    """Held-out problems of an evaluation, at most data.heldout_problems."""
    samples: int = Field(8, ge=2)
    """Completions of each problem, at temperature 1."""
    bank_dir: str | None = None
    """Folder where runs share the reference's samples; null = each run has its own."""


class TrackingConfig(Section):
    """metrics.jsonl is always written; these are extras."""

    rollouts: bool = True
    """Keep every rollout as parquet; `replay` and `plot gates --run` need them."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Mirror the numbers to Weights & Biases."""
    wandb_project: str = "grpo_lab"
    """Project of Weights & Biases."""
    tensorboard: bool = False
    """Write event files to the run's folder tensorboard/."""
