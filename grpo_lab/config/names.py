"""The keys of a configuration, and the one a user means who writes another trainer's name for it. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from grpo_lab.config import Config
from grpo_lab.errors import ConfigError, unknown_name

# Names that TRL, verl and others use, by ours.
_FOREIGN = {
    "method": "algo algorithm adv_estimator",
    "beta": "kl_coef kl_loss_coef init_kl_coef kl_penalty kl_beta temperature_kl",
    "seed": "random_seed data_seed",
    "group_size": "num_generations n n_samples rollout_n num_return_sequences samples_per_prompt g",
    "prompts_per_step": "batch_size train_batch_size per_device_train_batch_size generation_batch_size rollout_batch_size",
    "total_rollouts": "epochs num_epochs num_train_epochs total_epochs max_steps num_steps steps total_training_steps",
    "checkpoint_every": "save_steps save_freq save_every save_interval eval_steps eval_every test_freq",
    "keep_last": "save_total_limit max_ckpt_to_keep max_actor_ckpt_to_keep",
    "output_dir": "out_dir default_local_dir save_dir log_dir",
    "run_name": "name experiment_name exp_name",
    "model": "policy actor_model",
    "model.name": "model_name model_name_or_path model_path model_id pretrained",
    "model.dtype": "torch_dtype precision bf16 fp16 dtype_",
    "model.lora_rank": "lora lora_r r peft use_peft",
    "data": "dataset datasets",
    "data.task": "dataset_name env environment",
    "data.path": "train_files train_file data_path data_dir",
    "data.heldout_problems": "val_size eval_size test_size",
    "data.options": "reward reward_fn reward_funcs reward_function system_prompt",
    "rollout": "sampling generation sampler inference vllm",
    "rollout.engine": "use_vllm vllm_mode backend",
    "rollout.worker_gpus": "tensor_parallel_size tensor_model_parallel_size vllm_tensor_parallel_size tp",
    "rollout.max_new_tokens": "max_length max_tokens max_completion_length max_response_length response_length",
    "rollout.max_prompt_tokens": "max_prompt_length prompt_length",
    "rollout.temperature": "temp",
    "rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "rollout.max_staleness": "staleness max_async_level async_level off_policy_steps",
    "objective": "loss algorithm algorithm_args",
    "objective.gate_options": "clip_eps clip epsilon eps cliprange clip_range clip_ratio clip_low clip_high epsilon_high "
    "clip_ratio_low clip_ratio_high clip_eps_low clip_eps_high epsilon_low",
    "objective.level": "importance_sampling_level",
    "objective.advantage": "advantages advantage_estimator scale_rewards norm_adv_by_std_in_grpo",
    "objective.kl": "use_kl_loss kl_loss_type use_kl_in_reward kl_estimator",
    "objective.aggregate": "loss_type loss_agg_mode",
    "objective.correction": "rollout_is tis vllm_importance_sampling_correction",
    "objective.correction_options": "tis_imp_ratio_cap vllm_importance_sampling_cap",
    "objective.dynamic_sampling": "filter_groups",
    "objective.overlong_cache": "overlong_buffer soft_punish_cache",
    "objective.mask_truncated": "mask_truncated_completions",
    "learner": "trainer training train optim optimizer actor",
    "learner.learning_rate": "lr actor_lr",
    "learner.warmup_updates": "warmup warmup_steps warmup_ratio num_warmup_steps lr_warmup_steps",
    "learner.schedule": "lr_scheduler lr_scheduler_type scheduler lr_schedule",
    "learner.weight_decay": "wd",
    "learner.adam_beta1": "beta1 betas",
    "learner.adam_beta2": "beta2",
    "learner.max_grad_norm": "grad_clip clip_grad grad_norm clip_grad_norm",
    "learner.passes": "num_iterations ppo_epochs mu",
    "learner.mini_batches": "num_mini_batches mini_batch_size ppo_mini_batch_size",
    "learner.microbatch_tokens": "gradient_accumulation_steps micro_batch_size ppo_micro_batch_size_per_gpu "
    "ppo_max_token_len_per_gpu",
    "learner.shard": "fsdp zero deepspeed",
    "evaluation": "eval validation val",
    "tracking": "logging log",
    "tracking.wandb": "report_to logger",
    "tracking.wandb_project": "project project_name",
}
_MOST = 3  # suggestions


def fields(model: type[BaseModel] = Config, prefix: str = "") -> dict[str, FieldInfo]:
    """Every key below `model` by its dotted name, sections too, in their order."""
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        found[prefix + name] = field
        if section := section_of(field):
            found |= fields(section, f"{prefix}{name}.")
    return found


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a section, None for a single value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def known_part(key: str) -> str:
    """The key itself, or the nearest one above it; "" when there is none: `objective.gate_options.clip_low` is in a mapping."""
    parts, every = key.split("."), fields()
    above = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in above if name in every), "")


def unknown_key(given: str, beside: Sequence[str]) -> ConfigError:
    """The error for a key that does not exist: what other trainers' names mean here, the same name elsewhere, or near ones.

    `beside` are the keys of the section it stands in.
    """
    leaf, every = given.rpartition(".")[2].lower(), list(fields())
    meant = [ours for ours, names in _FOREIGN.items() if leaf in names.split()]
    meant += [key for key in every if key != given and key.rpartition(".")[2] == leaf]
    for keys, cutoff in ((beside, 0.6), (every, 0.75)):
        leaves = {key.rpartition(".")[2]: key for key in reversed(keys)}
        meant = meant or [leaves[name] for name in difflib.get_close_matches(leaf, leaves, n=2, cutoff=cutoff)]
    return unknown_name("key", given, beside, tuple(dict.fromkeys(meant))[:_MOST])
