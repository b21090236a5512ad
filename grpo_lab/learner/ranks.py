"""The processes of one learner. Rank 0 runs the training; the others follow it method by method, on their share of a batch."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from grpo_lab.errors import UserError
from grpo_lab.signals import STOP_SIGNALS
from grpo_lab.types import TokenBatch

READY = "ready"  # rank 0 is about to build what the others follow
_PATIENCE = timedelta(hours=12)  # rank 0 samples and evaluates while the others wait


class Ranks:
    """How many processes there are, which this one is, and what they exchange. One process: everything is the identity."""

    def __init__(self) -> None:
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # else transformers loads on rank 0 alone
        patience = InitProcessGroupKwargs(timeout=_PATIENCE)
        self._accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[patience])
        self.index, self.count = self._accelerator.process_index, self._accelerator.num_processes
        self.device = self._accelerator.device

    @property
    def is_main(self) -> bool:
        return self.index == 0

    @property
    def launcher_shards(self) -> bool:
        """Whether `accelerate launch` was given a configuration with FSDP."""
        return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of every rank's tensor, on the device and of the shape of this one's."""
        if self.count == 1:
            return tensor
        total: Tensor = self._accelerator.reduce(tensor.to(self.device), "sum")
        return total.to(tensor.device)

    def mesh(self) -> DeviceMesh:
        """All ranks in a row, to shard weights over."""
        return init_device_mesh(self.device.type, (self.count,))

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.count == 1:
            return value
        return broadcast_object_list([value])[0]

    def split(self, tokens: TokenBatch, rows: Tensor) -> list[Tensor]:
        """The parts of `rows` (indices [n]) the ranks work on: whole groups, tokens spread evenly, the same answer everywhere.

        A rank has none where there are fewer groups than ranks.
        """
        if self.count == 1:
            return [rows]
        lengths = tokens.completion_mask.sum(dim=1)
        groups = tokens.group_ids[rows]
        sizes = {int(g): float(lengths[rows][groups == g].sum()) for g in groups.unique()}
        loads, owner = [0.0] * self.count, dict[int, int]()
        for group in sorted(sizes, key=lambda g: (-sizes[g], g)):
            owner[group] = min(range(self.count), key=lambda rank: loads[rank])
            loads[owner[group]] += sizes[group]
        owners = torch.tensor([owner[int(g)] for g in groups])
        return [rows[owners == rank] for rank in range(self.count)]

    def end(self) -> None:
        """Rank 0 lets the others go."""
        if self.is_main:
            self.share(None)


class Followed(Protocol):
    """An object whose methods run on every rank."""

    ranks: Ranks


F = TypeVar("F", bound=Followed)
P = ParamSpec("P")
R = TypeVar("R")


def on_every_rank(method: Callable[Concatenate[F, P], R]) -> Callable[Concatenate[F, P], R]:
    """A method that rank 0 calls and every rank carries out, with rank 0's arguments."""

    def call(self: F, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.ranks.is_main:
            self.ranks.share((method.__name__, args, kwargs))
        return method(self, *args, **kwargs)

    return functools.update_wrapper(call, method)


def follow(target: Followed) -> None:
    """What a rank other than 0 does: carry out what rank 0 does with its own object, until it ends.

    Stop signals are rank 0's business. An error that every rank runs into is told by rank 0.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    while (work := target.ranks.share(None)) is not None:
        name, args, kwargs = work
        try:
            getattr(target, name)(*args, **kwargs)
        except UserError:
            continue
