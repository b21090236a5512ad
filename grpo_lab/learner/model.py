"""Loads the policy and its frozen reference. LoRA: one model, and the reference is the same model with its adapter off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from grpo_lab.config import ModelConfig
from grpo_lab.errors import ConfigError
from grpo_lab.learner.sharding import gather, shard

_LOGIT_CHANGERS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class PolicyModel:
    """The policy in the compute dtype, and access to the reference it is tied to.

    `source` is where the policy's weights come from (the base model, or a checkpoint of it).
    """

    def __init__(self, base: Path, source: Path, config: ModelConfig, device: torch.device) -> None:
        self.lora, self.is_sharded = config.lora_rank > 0, False
        self.full_precision: dict[str, torch.Tensor] = {}  # the files' numbers before the cast, for master weights
        self._config, self.dtype = config, config.dtype
        compute_dtype = getattr(torch, config.dtype)
        if self.lora:
            self.model = self._with_adapter(_load(base, config, compute_dtype).to(device), base, source)
            self.reference: Any = self.model
        else:
            self.model = _load(source, config, compute_dtype).to(device)
            if config.dtype != "float32":
                self.full_precision = dict(_load(source, config, torch.float32).named_parameters())
            self.reference = _load(base, config, compute_dtype).to(device).requires_grad_(False)
        if config.gradient_checkpointing:
            _checkpoint_layers(self.model)

    @property
    def causal_lm(self) -> Any:
        """The transformers model inside, adapter included."""
        return self.model.get_base_model() if self.lora else self.model

    @property
    def can_share_prompt(self) -> bool:
        """Whether a prompt's cache can be continued by its siblings: full attention everywhere and a cache allowed."""
        layers = getattr(self.causal_lm.config, "layer_types", None) or ["full_attention"]
        return set(layers) == {"full_attention"} and not self._config.gradient_checkpointing

    @contextmanager
    def as_reference(self) -> Iterator[Any]:
        """The reference as a transformers model, adapter off while inside."""
        with self.model.disable_adapter() if self.lora else nullcontext():
            yield self.causal_lm if self.lora else self.reference

    def shard(self, mesh: DeviceMesh, masters: Mapping[str, torch.Tensor]) -> None:
        """Spread policy and reference over the ranks of `mesh`, with the fp32 `masters` in the place of trained weights."""
        dtype = getattr(torch, self._config.dtype)
        for name, parameter in self.trainable().items():
            parameter.data = masters[name].data
        shard(self.causal_lm, mesh, dtype)
        if not self.lora:
            shard(self.reference, mesh, dtype)
        self.is_sharded = True

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Trainable parameters by name; tied ones once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def weights(self, reference: bool, keep: bool) -> dict[str, torch.Tensor]:
        """Whole tensors by name: the reference's, the policy's, or of a LoRA policy the adapter's.

        Sharded ones are gathered by all ranks, in the compute dtype, and stay where `keep`.
        """
        model = self.reference if reference else self.model
        trained = self.trainable() if self.lora and not reference else None
        tensors = {name: t for name, t in model.state_dict().items() if trained is None or name in trained}
        if not self.is_sharded:
            return {name: tensor.detach() for name, tensor in tensors.items()}
        dtype = getattr(torch, self._config.dtype)
        return gather({n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}, keep)

    def _with_adapter(self, model: Any, base: Path, source: Path) -> Any:
        from peft import LoraConfig, PeftModel, get_peft_model

        if source != base:
            return PeftModel.from_pretrained(model, source, is_trainable=True, autocast_adapter_dtype=False)
        adapter = LoraConfig(
            r=self._config.lora_rank,
            lora_alpha=self._config.lora_alpha,
            lora_dropout=0.0,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return get_peft_model(model, adapter, autocast_adapter_dtype=False)


def _checkpoint_layers(model: Any) -> None:
    """Have every decoder layer keep its input alone and run again in backward; dropout stays off."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # of this module alone: transformers checkpoints in training mode only


def _load(folder: Path, config: ModelConfig, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=config.trust_remote_code, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load a model from {folder}: {' '.join(str(error).split())[:300]}") from None
    changed = [name for name in _LOGIT_CHANGERS if getattr(model.config, name, None) not in (None, 1.0)]
    if changed:
        raise ConfigError(
            f"model {folder.name} changes its logits after the output head ({changed[0]}); log-probs would be wrong, so such "
            "models are refused"
        )
    return model.eval()
