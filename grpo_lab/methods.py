"""The named methods: each is one row over the five axes. `--recipe` chooses between the free-energy row and the paper's.

`free_energy` keeps the method's gate, level and old policy and sets the rest so that the expected gradient is -grad F_beta:
KL in the reward, leave-one-out baseline, no std, constant length. `paper` takes the published advantage, KL and aggregate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_lab.config import AdvantageName, AggregateName, Config, CorrectionName, KLName, Level, OldPolicy
from grpo_lab.errors import ConfigError, unknown_name


@dataclass(frozen=True)
class Method:
    """One row. The last three axes are the paper's; gate, level and old policy hold under both recipes."""

    gate: str
    gate_options: Mapping[str, float]
    level: Level
    old: OldPolicy
    advantage: AdvantageName
    kl: KLName
    aggregate: AggregateName
    source: str
    note: str = ""


_CLIP = {"clip_low": 0.2, "clip_high": 0.2}

METHODS: dict[str, Method] = {
    "ppo": Method(
        "clip", _CLIP, "token", "learner", "zscore", "reward", "token_mean", "Schulman et al. 2017, arXiv 1707.06347",
        "group z-score in place of the critic's whitened GAE",
    ),
    "grpo": Method(
        "clip", _CLIP, "token", "learner", "zscore", "loss_k3", "sequence_mean", "Shao et al. 2024, arXiv 2402.03300",
    ),
    "dapo": Method(
        "clip", {"clip_low": 0.2, "clip_high": 0.28}, "token", "learner", "zscore", "none", "token_mean",
        "Yu et al. 2025, arXiv 2503.14476", "without dynamic sampling and overlong shaping",
    ),
    "sao": Method(
        "double_sided", {"window_low": 0.3, "window_high": 5.0}, "token", "rollout", "zscore", "none", "token_mean",
        "Hou et al. 2026, arXiv 2607.07508", "the paper's GRPO (w/ DIS): group baseline in place of the critic",
    ),
    "sapo": Method(
        "sigmoid", {"tau_positive": 1.0, "tau_negative": 1.05}, "token", "learner", "zscore", "none", "sequence_mean",
        "Gao et al. 2025, arXiv 2511.20347",
    ),
    "gspo": Method(
        "clip", {"clip_low": 3e-4, "clip_high": 4e-4}, "sequence", "learner", "zscore", "none", "sequence_mean",
        "Zheng et al. 2025, arXiv 2507.18071",
    ),
    "dr_grpo": Method(
        "clip", _CLIP, "token", "learner", "center", "none", "constant_length", "Liu et al. 2025, arXiv 2503.20783",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Objective:
    """The axes of one run, every one decided. `length_constant` is the divisor of `aggregate: constant_length`."""

    beta: float
    gate: str
    gate_options: Mapping[str, float] = field(default_factory=dict)
    level: Level = "token"
    advantage: AdvantageName = "leave_one_out"
    kl: KLName = "reward"
    aggregate: AggregateName = "constant_length"
    old: OldPolicy = "learner"
    correction: CorrectionName = "none"
    length_constant: int = 1

    @property
    def minimises_free_energy(self) -> bool:
        """Whether the expected on-policy gradient is proportional to grad F_beta (THEORY: Ahmadian et al. 2402.14740)."""
        return (self.advantage, self.kl, self.aggregate) in {
            ("leave_one_out", "reward", "constant_length"),
            ("center", "reward", "constant_length"),
        }


def resolve(config: Config) -> Objective:
    """Method row, then recipe, then the axes the user overrode. ConfigError for unknown names and refused combinations."""
    if config.method not in METHODS:
        raise unknown_name("method", config.method, METHODS)
    method, chosen = METHODS[config.method], config.objective
    paper = config.recipe == "paper"
    same_gate = chosen.gate in (None, method.gate)
    objective = Objective(
        beta=config.beta,
        gate=chosen.gate or method.gate,
        gate_options={**(method.gate_options if same_gate else {}), **chosen.gate_options},
        level=chosen.level or method.level,
        advantage=chosen.advantage or (method.advantage if paper else "leave_one_out"),
        kl=chosen.kl or (method.kl if paper else "reward"),
        aggregate=chosen.aggregate or (method.aggregate if paper else "constant_length"),
        old=chosen.old or method.old,
        correction=chosen.correction,
        length_constant=config.rollout.max_new_tokens,
    )
    if objective.old == "rollout" and objective.correction != "none":
        raise ConfigError(
            f"objective.correction={objective.correction} with objective.old=rollout counts the sampler-learner mismatch "
            "twice: the ratio to the rollout log-probs already contains it; set correction=none or old=learner"
        )
    return objective


def effective_beta_line(objective: Objective, group_size: int) -> str:
    """One line: which beta the loss really optimises."""
    beta = objective.beta
    if objective.kl == "none":
        return f"beta_eff = 0: no KL term in the loss; beta = {beta:g} is used in the evaluation only"
    if objective.minimises_free_energy:
        return f"beta_eff = {beta:g}: the loss descends F = -E[r] + {beta:g} KL exactly (KL in the reward)"
    if objective.kl == "reward":
        way = f"{objective.advantage} and {objective.aggregate} reweight the way there"
        return f"beta_eff = {beta:g} at the fixed point (KL in the reward); {way}"
    if objective.advantage == "zscore":
        return f"beta_eff = {beta:g} x std(r) of each prompt, moving with training: not the Gibbs temperature you asked for"
    scale = group_size / (group_size - 1) if objective.advantage == "center" else 1.0
    return f"beta_eff = {beta * scale:g}, token-local: its fixed point is not the Gibbs policy"


def warnings(config: Config, objective: Objective) -> list[str]:
    """What is questionable in this run and its consequence, one line each (THEORY B.2, B.5)."""
    learner, rollout = config.learner, config.rollout
    checks = [
        (
            learner.passes * learner.mini_batches == 1 and objective.old == "learner",
            "gate inert: one update per rollout batch with old log-probs of the same weights gives ratio 1 everywhere, so "
            "every gate is open; raise learner.passes or learner.mini_batches to let gates differ",
        ),
        (
            objective.advantage == "zscore" and objective.kl.startswith("loss"),
            "advantages divided by std(r) with the KL in the loss: the temperature becomes beta x std(r), different for "
            "every prompt; the gap to the floor will not close",
        ),
        (
            objective.kl in ("loss_k2", "loss_k3", "loss_k3_is"),
            f"KL {objective.kl} is token-local: it ignores how a token changes the KL of later ones, so its fixed point is not "
            "the Gibbs policy",
        ),
        (objective.kl == "loss_k1", "KL loss_k1 has expected gradient 0 on-policy: it adds noise, no KL force"),
        (
            rollout.temperature != 1 or rollout.top_p < 1,
            f"sampling at temperature {rollout.temperature:g}, top-p {rollout.top_p:g}: rewards and KL belong to that "
            "modified policy, while the evaluation uses temperature 1, top-p 1",
        ),
    ]  # fmt: skip
    return [text for applies, text in checks if applies]
