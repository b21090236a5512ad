"""The policy's weights as files a sampler can load: every tensor by its checkpoint name, or the adapter alone for LoRA."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from grpo_lab.learner.model import PolicyModel


def export_weights(policy: PolicyModel, folder: Path) -> None:
    """Write the policy to `folder`: the whole model, of a LoRA run the adapter as peft saves it."""
    if policy.lora:
        policy.model.save_pretrained(folder)
    else:
        export_model(policy.model, folder)


def export_model(model: Any, folder: Path) -> None:
    """Write `folder`/model.safetensors in the compute dtype.

    A tied output head is written too: an engine that packed its own copy of the head would otherwise keep the old one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head:
            tensors[f"{name}.weight"] = head.weight.detach().clone()
    partial = folder / "model.safetensors.partial"
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, partial)
    partial.replace(folder / "model.safetensors")


def weight_digests(model: Any) -> dict[str, str]:
    """sha256 of every tensor's bytes by its name, as vLLM's weight checker computes them."""
    return {
        name: hashlib.sha256(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
        for name, tensor in model.state_dict().items()
    }
