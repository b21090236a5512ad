"""The numbers of a model that its config gives: read on torch's meta device, so nothing is loaded, and nothing is fetched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpo_lab.config import ModelConfig
from grpo_lab.hub import check_local_model


@dataclass(frozen=True)
class ModelShape:
    """Numbers of a model: its parameters (tied ones once), those that are trained, and the sizes of a decoder layer.

    `attention` and `key_values` are the widths of a token's queries and keys; `layer_parameters` those of the largest layer.
    """

    parameters: int
    trainable: int
    layers: int
    layer_parameters: int
    hidden: int
    attention: int
    key_values: int
    key_value_heads: int
    intermediate: int
    vocabulary: int
    is_full_attention: bool


def local_folder(model: ModelConfig) -> Path | None:
    """Where the model lies on this machine, a local folder or the hub's cache; None where it is not here."""
    from huggingface_hub import try_to_load_from_cache

    local = check_local_model(model)
    if local:
        return local
    found = try_to_load_from_cache(model.place, "config.json", revision=model.revision)
    return Path(found).parent if isinstance(found, str) else None


def model_shape(model: ModelConfig) -> ModelShape | None:
    """The shape of a model by its config, without weights; None where it is not here or is of an unknown kind."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = local_folder(model)
    if folder is None:
        return None
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
        with torch.device("meta"):
            built: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
        return _shape(built, config.get_text_config(), model.lora_rank)
    except (OSError, ValueError, AttributeError):
        return None


def _shape(model: Any, text: Any, lora_rank: int) -> ModelShape:
    layers = model.get_decoder().layers
    parameters = sum(p.numel() for p in model.parameters())
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    key_value_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    experts, expert = getattr(text, "num_experts_per_tok", None), getattr(text, "moe_intermediate_size", None)
    kinds = getattr(text, "layer_types", None) or ["full_attention"]
    return ModelShape(
        parameters=parameters,
        trainable=_adapter_parameters(model, lora_rank) if lora_rank else parameters,
        layers=len(layers),
        layer_parameters=max(sum(p.numel() for p in layer.parameters()) for layer in layers),
        hidden=text.hidden_size,
        attention=head * text.num_attention_heads,
        key_values=head * key_value_heads,
        key_value_heads=key_value_heads,
        intermediate=experts * expert if experts and expert else text.intermediate_size,
        vocabulary=text.vocab_size,
        is_full_attention=set(kinds) == {"full_attention"},
    )


def _adapter_parameters(model: Any, rank: int) -> int:
    """Of LoRA on every linear layer but the output head."""
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    return sum(rank * (m.in_features + m.out_features) for m in linear)
