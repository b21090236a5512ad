"""The policy's weights as files a sampler can load: every tensor by its checkpoint name, in the compute dtype."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from grpo_lab.learner.model import PolicyModel


def export_weights(policy: PolicyModel, folder: Path) -> None:
    """Write `folder`/model.safetensors. LoRA is merged; a tied output head is written too, since engines that packed it
    would otherwise keep the old one."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(_named_weights(policy))
    model = policy.causal_lm
    head = next((name for name, module in model.named_modules() if module is model.get_output_embeddings()), None)
    if head is not None:
        tensors[f"{head}.weight"] = tensors.get(f"{head}.weight", model.get_input_embeddings().weight.detach()).clone()
    partial = folder / "model.safetensors.partial"
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, partial)
    partial.replace(folder / "model.safetensors")


@torch.no_grad()
def _named_weights(policy: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    merged = _merged_layers(policy) if policy.lora else {}
    for name, tensor in policy.causal_lm.state_dict().items():
        if ".lora_" not in name:
            plain = name.replace(".base_layer.", ".")
            yield plain, merged.get(plain, tensor).detach()


def _merged_layers(policy: PolicyModel) -> dict[str, Tensor]:
    """W + (alpha / r) B A of every adapted layer, added in fp32 and rounded once."""
    from peft.tuners.lora import LoraLayer

    merged: dict[str, Tensor] = {}
    for name, module in policy.causal_lm.named_modules():
        if isinstance(module, LoraLayer):
            weight = module.get_base_layer().weight
            delta = module.get_delta_weight("default").float()
            merged[f"{name}.weight"] = (weight.float() + delta).to(weight.dtype)
    return merged
