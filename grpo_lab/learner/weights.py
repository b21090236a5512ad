"""The policy's weights as files a sampler can load: every tensor by its checkpoint name, or the adapter alone for LoRA."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from grpo_lab.learner.learner import Learner
from grpo_lab.storage.scratch import disk_errors


def export_weights(learner: Learner, folder: Path, reference: bool = False) -> None:
    """Write the policy (or the reference) to `folder`: the whole model, of a LoRA policy the adapter as peft saves it.

    RunError when the disk refuses.
    """
    with disk_errors(folder, "free some space there, or set rollout.weights_dir to a larger folder"):
        if learner.policy.lora and not reference:
            learner.policy.model.save_pretrained(folder, state_dict=learner.weights())
        else:
            model = learner.policy.reference if reference else learner.policy.model
            _export_model(model, learner.weights(reference), folder)


def save_model(learner: Learner, folder: Path) -> None:
    """Write the policy to `folder` as transformers (or peft) saves it."""
    model, sharded = learner.policy.model, learner.policy.is_sharded
    model.save_pretrained(folder, state_dict=learner.weights() if sharded else None)
    file = folder / "config.json"
    if sharded and file.exists():  # its masters' dtype is not the files'
        file.write_text(json.dumps({**json.loads(file.read_text()), "dtype": learner.policy.dtype}, indent=2))


def _export_model(model: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write `folder`/model.safetensors in the compute dtype.

    A tied output head is written too: an engine that packed its own copy of the head would otherwise keep the old one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors, head = dict(weights), model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head:
            tensors[f"{name}.weight"] = weights[f"{name}.weight"].clone()
    partial = folder / "model.safetensors.partial"
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, partial)
    partial.replace(folder / "model.safetensors")


def weight_digests(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """sha256 of every tensor's bytes by its name, as vLLM's weight checker computes them."""
    return {
        name: hashlib.sha256(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
        for name, tensor in weights.items()
    }
