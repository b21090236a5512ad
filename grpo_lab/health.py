"""Stops a run whose sampler and learner are not the same policy any more, before it trains on the difference."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping

from grpo_lab.config import Config
from grpo_lab.errors import RunError

_ENOUGH = 256  # completions that an estimate of the KL needs for its standard error to mean what it says
_KL_TOLERANCE = 0.05  # nats; a sampled KL this little below zero is rounding, whatever its error says


class Health:
    """Judges the metrics of a batch, before the update on it; `past` are those of the steps so far."""

    def __init__(self, config: Config, past: Iterable[Mapping[str, float]] = ()) -> None:
        self._rollout = config.rollout
        self._kl: deque[tuple[float, float]] = deque(maxlen=-(-_ENOUGH // config.rollouts_per_step))
        for metrics in past:
            self._remember(metrics)

    def check(self, metrics: Mapping[str, float], step: int) -> None:
        """RunError when this batch of `step` was not sampled from the learner's policy, or shows it over the last steps.

        Numbers that are not finite stop it too; samples and rewards are when they come here, so the learner's are not.
        """
        if broken := not_finite(metrics):
            raise RunError(
                f"step {step}: {broken}: log-probs of the learner, or of the reference, are not finite; nothing was trained on "
                "this batch; check the model, or start again with a lower learner.learning_rate or model.dtype=float32"
            )
        mismatch = metrics.get("rollout/mismatch_mean", 0.0)  # absent where no sample is of these very weights
        limit = self._rollout.mismatch_limit
        if self._rollout.top_p == 1 and not mismatch <= limit:
            raise RunError(
                f"step {step}: sampler and learner differ by {mismatch:.3g} nats per token on average (limit "
                f"{limit:g}): the sampler does not hold the learner's weights; use one model.dtype that both support, or raise "
                "rollout.mismatch_limit"
            )
        self._remember(metrics)
        kl, error = self.kl()
        if kl < -max(3 * error, _KL_TOLERANCE):
            steps = f" over {len(self._kl)} steps" if len(self._kl) > 1 else ""
            raise RunError(
                f"step {step}: the estimated KL to the reference is {kl:.3g} +- {error:.2g} nats{steps}, below zero "
                "beyond its error: a KL cannot be negative, so the samples do not come from the learner's policy (weights "
                "lost in rounding, a failed push, or sampling settings); nothing was trained on this batch"
            )

    def kl(self) -> tuple[float, float]:
        """Mean KL of the last steps that together have enough completions, and its standard error; 0 before there are."""
        count = len(self._kl)
        if count < (self._kl.maxlen or 1):
            return 0.0, 0.0
        return sum(kl for kl, _ in self._kl) / count, sum(error**2 for _, error in self._kl) ** 0.5 / count

    def _remember(self, metrics: Mapping[str, float]) -> None:
        self._kl.append((metrics["policy/kl_ref"], metrics["policy/kl_ref_se"]))


def not_finite(metrics: Mapping[str, object]) -> str:
    """The metrics that are not finite, as words; "" where all are."""
    numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
    return ", ".join(f"{name} is {value:g}" for name, value in numbers.items() if not math.isfinite(value))
