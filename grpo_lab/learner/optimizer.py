"""AdamW on the master weights, its schedule, and the state of both that a checkpoint keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import get_scheduler

from grpo_lab.config import Config
from grpo_lab.learner.precision import MasterWeights
from grpo_lab.learner.sharding import gather, like

_FIRST_LOSS_SCALE = 2.0**16


@dataclass(frozen=True)
class LearnerState:
    """What a checkpoint keeps beside the model: tensors by name (moments, masters) and plain numbers."""

    tensors: dict[str, Tensor]
    numbers: dict[str, Any]

    @property
    def masters(self) -> dict[str, Tensor]:
        """The master weights by parameter name; empty in fp32, where the model holds them."""
        return {name.removeprefix("master/"): t for name, t in self.tensors.items() if name.startswith("master/")}


class PolicyOptimizer:
    """Steps the masters along their gradients. `loss_scale` keeps fp16 gradients in range; it is 1 for other dtypes."""

    def __init__(self, config: Config, masters: MasterWeights, state: LearnerState | None) -> None:
        settings = config.learner
        self._masters, self._max_grad_norm = masters, settings.max_grad_norm
        self._adamw = torch.optim.AdamW(
            list(masters.masters.values()),
            lr=settings.learning_rate,
            betas=(settings.adam_beta1, settings.adam_beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        steps = config.total_rollouts // config.rollouts_per_step
        self._scheduler: Any = get_scheduler(
            "constant_with_warmup" if settings.schedule == "constant" else settings.schedule,
            self._adamw,
            num_warmup_steps=settings.warmup_updates,
            num_training_steps=steps * settings.passes * settings.mini_batches,
        )
        self.loss_scale = _FIRST_LOSS_SCALE if config.model.dtype == "float16" else 1.0
        if state is not None:
            self._restore(state)

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        return float(self._scheduler.get_last_lr()[0])

    def step(self) -> dict[str, float]:
        """Clip the gradient's norm, step, cast into the model. Returns the norm before clipping and the share absorbed."""
        masters = list(self._masters.masters.values())
        norm = float(torch.nn.utils.clip_grad_norm_(masters, self._max_grad_norm))
        before = self._masters.snapshot()
        self._adamw.step()
        self._scheduler.step()
        self.discard_gradients()
        return {"policy/grad_norm": norm, "rollout/update_absorbed": self._masters.apply(before)}

    def discard_gradients(self) -> None:
        """Forget the gradients; nothing moves."""
        self._adamw.zero_grad(set_to_none=True)

    def state(self, keep: bool = True) -> LearnerState:
        """Moments and (below fp32) masters by parameter name, whole; schedule and loss scale as numbers.

        Every rank must call it when the weights are sharded; the tensors stay where `keep`.
        """
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters.masters.items():
            tensors |= {f"{key}/{name}": value for key, value in self._adamw.state[master].items()}
            if not self._masters.is_exact:
                tensors[f"master/{name}"] = master
        numbers = {"scheduler": self._scheduler.state_dict(), "loss_scale": self.loss_scale}
        return LearnerState(gather(tensors, keep), numbers)

    def _restore(self, state: LearnerState) -> None:
        for name, master in self._masters.masters.items():
            moments = {key: like(state.tensors[f"{key}/{name}"], master) for key in ("exp_avg", "exp_avg_sq")}
            self._adamw.state[master] = {"step": state.tensors[f"step/{name}"].to(master.device), **moments}
        self._scheduler.load_state_dict(state.numbers["scheduler"])
        self.loss_scale = state.numbers["loss_scale"]
        for group, rate in zip(self._adamw.param_groups, self._scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
