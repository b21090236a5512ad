"""The run's configuration: frozen pydantic models, read from YAML and `--set a.b=value`. Imports no torch.

The defaults are the GSM8K experiment with Qwen2.5-0.5B-Instruct. Axes left at null come from `--method` and `--recipe`
(see methods.py). Unknown keys are refused with the near ones named.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from grpo_lab.errors import ConfigError, unknown_name

Level = Literal["token", "sequence"]
AdvantageName = Literal["leave_one_out", "center", "zscore"]
KLName = Literal["reward", "loss_k1", "loss_k2", "loss_k3", "loss_k3_is", "none"]
AggregateName = Literal["token_mean", "sequence_mean", "constant_length"]
OldPolicy = Literal["learner", "rollout"]
CorrectionName = Literal["none", "tis", "icepop"]


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
    max_new_tokens: int = Field(512, ge=1)
    max_prompt_tokens: int = Field(512, ge=1)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    gpu_memory_utilization: float = Field(0.4, gt=0, lt=1)
    cpu_kv_cache_gb: int = Field(2, ge=1)
    weights_dir: str | None = None  # where weight pushes travel; null = /dev/shm, else the temporary directory
    mismatch_limit: float = Field(0.3, gt=0)  # mean |learner - sampler| log-prob in nats that stops the run


class ObjectiveConfig(_Section):
    """The five axes, the old policy and the correction; null = what `method` and `recipe` say."""

    gate: str | None = None
    gate_options: dict[str, float] = {}
    level: Level | None = None
    advantage: AdvantageName | None = None
    kl: KLName | None = None
    aggregate: AggregateName | None = None
    old: OldPolicy | None = None
    correction: CorrectionName = "none"


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
    microbatch_tokens: int = Field(16384, ge=1)  # rows x padded length of one forward
    share_prompt: bool = True  # run each prompt once per group instead of once per sibling


class EvaluationConfig(_Section):
    """Free-energy evaluation at step 0 and at every checkpoint: the same held-out problems and seeds each time."""

    enabled: bool = True
    problems: int = Field(500, ge=2)
    samples: int = Field(8, ge=2)


class TrackingConfig(_Section):
    """metrics.jsonl is always written; these are extras."""

    rollouts: bool = True  # keep every rollout as parquet
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    wandb_project: str = "grpo_lab"


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


# Keys that do not change what is computed: a resumed run may change them (total_rollouts under a constant schedule only).
FREE_ON_RESUME = {
    "output_dir",
    "run_name",
    "tracking",
    "total_rollouts",
    "rollout.weights_dir",
    "rollout.mismatch_limit",
}


def expand_path(text: str) -> str:
    """`~` and `$VARIABLES` of a path replaced; hub ids pass unchanged."""
    return os.path.expanduser(os.path.expandvars(text))


def load_config(path: Path | None, overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None) -> Config:
    """The configuration of a YAML file (or the defaults), then `--set key.path=value`, then non-null command-line flags.

    Raises ConfigError, in one line, for a missing file, bad YAML, an unknown key or a wrong value.
    """
    tree = _read_yaml(path) if path is not None else {}
    for override in overrides:
        _apply_override(tree, override)
    for key, value in (flags or {}).items():
        if value is not None:
            tree[key] = value
    return build_config(tree, source=str(path) if path else "command line")


def build_config(tree: Mapping[str, Any], source: str) -> Config:
    """A validated Config of a plain tree; ConfigError says which key of which source is wrong."""
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{source}: {first_problem(error)}") from None
    check_batch_algebra(config)
    return config


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


def dump_yaml(config: BaseModel) -> str:
    """The configuration as YAML, every key resolved."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def changed_keys(old: Config, new: Config) -> list[str]:
    """Keys that differ and would change the trajectory, as `key: old -> new`."""
    before, after = _flatten(old.model_dump(mode="json")), _flatten(new.model_dump(mode="json"))
    differing = [k for k in before.keys() | after.keys() if before.get(k) != after.get(k)]
    free = FREE_ON_RESUME if new.learner.schedule == "constant" else FREE_ON_RESUME - {"total_rollouts"}
    relevant = [k for k in sorted(differing) if not any(k == name or k.startswith(name + ".") for name in free)]
    return [f"{k}: {before.get(k)!r} -> {after.get(k)!r}" for k in relevant]


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read config {str(path)!r}: {error.strerror}; give the path of a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {str(path)!r} is not valid YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"config {str(path)!r} must be a mapping of keys to values, got a {type(tree).__name__}")
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {override!r}: expected key.path=value, for example --set learner.learning_rate=1e-5")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set {override!r}: the value is not valid YAML; quote it") from None
    *parents, leaf = key.strip().split(".")
    for parent in parents:
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override!r}: {parent!r} is a single value, it has no key below it")
        tree = child
    tree[leaf] = value


def first_problem(error: ValidationError, root: type[BaseModel] = Config, prefix: str = "") -> str:
    """What is wrong, in one line, with the first bad key of model `root`, whose keys stand under `prefix` ("a.b.")."""
    problem = error.errors(include_url=False)[0]
    location = prefix + ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return str(unknown_name("key", location, _keys_beside(problem["loc"], root, prefix)))
    given = problem["input"]
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{location}={given!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}{more}"


def _keys_beside(location: tuple[int | str, ...], root: type[BaseModel], prefix: str) -> list[str]:
    section: Any = root
    for part in location[:-1]:
        section = section.model_fields[str(part)].annotation
    prefix += "".join(f"{part}." for part in location[:-1])
    return [prefix + name for name in section.model_fields]
