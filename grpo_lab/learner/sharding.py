"""Spreads models over the learner's processes with FSDP2: each holds a part of every weight and gathers a layer to run it.

What every rank must do equally often, or all wait forever: run a micro-batch, gather a tensor (`whole`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

T = TypeVar("T")
_ENTRY = "run_inside"  # the method of a sharded model during which its root is gathered


def shard(model: Any, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Shard a transformers model in place, layer by layer; embedding, last norm and head go with the root.

    Weights keep their dtype (fp32 where they are trained) and are gathered in `compute_dtype`. All are let go after a
    forward, so that none is older than the last step. Gradients are fp32 sums over the ranks.
    """
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*model.get_decoder().layers, model):
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # the way to a plain sum that gloo takes
    setattr(model, _ENTRY, MethodType(lambda self, function: function(), model))
    register_fsdp_forward_method(model, _ENTRY)


def inside(model: Any, function: Callable[[], T]) -> T:
    """The value of `function`, which may call any part of `model` (decoder, head) as often as it likes."""
    result: T = getattr(model, _ENTRY)(function) if isinstance(model, FSDPModule) else function()
    return result


def whole(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, on every rank; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Whole tensors by name, on CPU and one after the other; nothing where not `keep`."""
    kept = {}
    for name, tensor in tensors.items():
        gathered = whole(tensor.detach())
        if keep:
            kept[name] = gathered.cpu().contiguous()
    return kept


def like(tensor: Tensor, pattern: Tensor) -> Tensor:
    """This rank's part of a whole tensor, on the device of `pattern` and sharded as it is."""
    moved = tensor.to(pattern.device)
    if not isinstance(pattern, DTensor):
        return moved
    return distribute_tensor(moved, pattern.device_mesh, pattern.placements, src_data_rank=None)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
