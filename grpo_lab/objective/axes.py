"""Config -> `Objective`: the axes of one run, every one decided, and the combinations that are refused. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_lab.config import AdvantageName, AggregateName, Config, CorrectionName, KLName, Level, OldPolicy
from grpo_lab.errors import ConfigError, unknown_name
from grpo_lab.methods import METHODS

CORRECTION_OPTIONS: Mapping[CorrectionName, Mapping[str, float]] = {
    "none": {},
    "tis": {"cap": 2.0},
    "tis_sequence": {"cap": 2.0},
    "icepop": {"low": 0.5, "high": 5.0},
    "mis": {"low": 0.0, "high": 2.0},
    "mis_sequence": {"low": 0.0, "high": 2.0},
    "m2po": {"limit": 0.04},
}
"""The parameters of every correction with their defaults; ratio.py says what they do."""


@dataclass(frozen=True)
class Objective:
    """The axes of one run. `max_tokens` is the length limit: divisor of `constant_length`, end of the overlong penalty."""

    beta: float
    gate: str
    gate_options: Mapping[str, float] = field(default_factory=dict)
    level: Level = "token"
    advantage: AdvantageName = "leave_one_out"
    kl: KLName = "reward"
    aggregate: AggregateName = "constant_length"
    old: OldPolicy = "learner"
    correction: CorrectionName = "none"
    correction_options: Mapping[str, float] = field(default_factory=dict)
    zscore_ddof: int = 1
    dynamic_sampling: bool = False
    overlong_cache: int = 0
    mask_truncated: bool = False
    max_tokens: int = 1
    max_staleness: int = 0

    @property
    def kl_in_loss(self) -> bool:
        return self.kl.startswith("loss")

    @property
    def minimises_free_energy(self) -> bool:
        """Whether the expected on-policy gradient is proportional to grad F_beta (Ahmadian et al. 2402.14740).

        The KL force of `loss_k2_sequence` is exact too (Liu et al. 2510.01555), but only a leave-one-out baseline keeps the
        reward's force at the same scale.
        """
        unchanged = not (self.dynamic_sampling or self.overlong_cache or self.mask_truncated)
        kl_exact = self.kl == "reward" and self.advantage in ("leave_one_out", "center")
        kl_exact |= self.kl == "loss_k2_sequence" and self.advantage == "leave_one_out"
        return kl_exact and unchanged and self.aggregate in ("constant_length", "sequence_sum")


def resolve(config: Config) -> Objective:
    """Method row, then recipe, then the axes the user overrode. ConfigError for unknown names and refused combinations."""
    if ":" in config.method:
        raise ConfigError(
            f"unknown method {config.method!r}: a gate of your own goes with a method, --set objective.gate={config.method}"
        )
    if config.method not in METHODS:
        raise unknown_name("method", config.method, METHODS)
    method, chosen, limit = METHODS[config.method], config.objective, config.rollout.max_new_tokens
    paper = config.recipe == "paper"
    same_gate = chosen.gate in (None, method.gate)
    old = chosen.old or method.old
    correction: CorrectionName = chosen.correction or (
        "tis" if config.rollout.max_staleness and old == "learner" else "none"
    )
    overlong = round(method.overlong_share * limit) if paper else 0
    objective = Objective(
        beta=config.beta,
        gate=chosen.gate or method.gate,
        gate_options={**(method.gate_options if same_gate else {}), **chosen.gate_options},
        level=chosen.level or method.level,
        advantage=chosen.advantage or (method.advantage if paper else "leave_one_out"),
        kl=chosen.kl or (method.kl if paper else "reward"),
        aggregate=chosen.aggregate or (method.aggregate if paper else "constant_length"),
        old=old,
        correction=correction,
        correction_options={**CORRECTION_OPTIONS[correction], **chosen.correction_options},
        zscore_ddof=chosen.zscore_ddof,
        dynamic_sampling=paper and method.dynamic_sampling
        if chosen.dynamic_sampling is None
        else chosen.dynamic_sampling,
        overlong_cache=overlong if chosen.overlong_cache is None else chosen.overlong_cache,
        mask_truncated=chosen.mask_truncated,
        max_tokens=limit,
        max_staleness=config.rollout.max_staleness,
    )
    _refuse(objective)
    return objective


def _refuse(objective: Objective) -> None:
    """ConfigError for combinations that mean nothing, with the reason."""
    o, allowed = objective, CORRECTION_OPTIONS[objective.correction]
    wrong = sorted(set(o.correction_options) - set(allowed))
    refused = [
        (
            o.old == "rollout" and o.correction != "none",
            f"objective.correction={o.correction} with objective.old=rollout counts the sampler-learner mismatch twice: the "
            "ratio to the rollout log-probs already contains it; set correction=none or old=learner",
        ),
        (
            bool(wrong),
            f"objective.correction_options: correction {o.correction!r} has no {', '.join(wrong)}; it has: "
            f"{', '.join(allowed) or 'no parameters'}",
        ),
        (
            not wrong and not _is_sensible(o.correction_options),
            f"objective.correction_options={dict(o.correction_options)}: a cap or limit is above 0, and a band holds ratio 1, "
            "0 <= low <= 1 <= high; anything else silences or reverses every token",
        ),
        (
            o.dynamic_sampling and o.kl == "reward",
            "objective.dynamic_sampling=true with objective.kl=reward: a group of equal rewards still has different KL, so "
            "its advantages are not 0 and dropping it drops the KL force that holds solved prompts; set "
            "dynamic_sampling=false, or put the KL elsewhere (objective.kl=none or loss_...)",
        ),
        (
            o.overlong_cache > o.max_tokens,
            f"objective.overlong_cache={o.overlong_cache} is more than rollout.max_new_tokens={o.max_tokens}: the penalty "
            "would start before the first token; give a smaller number",
        ),
        (
            o.overlong_cache > 0 and o.mask_truncated,
            "objective.overlong_cache with objective.mask_truncated=true: the completions with the full penalty are the ones "
            "that give no gradient; choose one of the two",
        ),
    ]  # fmt: skip
    for applies, reason in refused:
        if applies:
            raise ConfigError(reason)


def _is_sensible(options: Mapping[str, float]) -> bool:
    """Whether the parameters of a correction leave the ratio 1 its weight."""
    positive = all(options[name] > 0 for name in ("cap", "limit") if name in options)
    return positive and 0 <= options.get("low", 0.0) <= 1 <= options.get("high", 1.0)
