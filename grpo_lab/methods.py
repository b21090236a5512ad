"""The named methods: each is one row over the five axes. `--recipe` chooses between the free-energy row and the paper's.

`free_energy` keeps the method's gate, level and old policy and sets the rest so that the expected gradient is -grad F_beta:
KL in the reward, leave-one-out baseline, no std, constant length. `paper` takes the published advantage, KL and aggregate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from grpo_lab.config import AdvantageName, AggregateName, KLName, Level, OldPolicy


def gate_in_words(gate: str, options: Mapping[str, float]) -> str:
    """A gate with its parameters, e.g. "clip (clip_low 0.2, clip_high 0.28)"."""
    given = ", ".join(f"{name} {value:g}" for name, value in options.items())
    return f"{gate} ({given})" if given else gate


@dataclass(frozen=True)
class Method:
    """One row. Gate, level and old policy hold under both recipes; advantage, KL, aggregate and the extras are the paper's."""

    gate: str
    gate_options: Mapping[str, float]
    level: Level
    old: OldPolicy
    advantage: AdvantageName
    kl: KLName
    aggregate: AggregateName
    source: str
    note: str = ""
    dynamic_sampling: bool = False
    overlong_share: float = 0.0  # part of max_new_tokens over which a long completion is penalised


_CLIP = {"clip_low": 0.2, "clip_high": 0.2}
_GSPO = {"clip_low": 3e-4, "clip_high": 4e-4}
_GMPO = {"clip_low": 0.329679953964, "clip_high": 0.491824697641}  # log-ratios within +-0.4

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
        "Yu et al. 2025, arXiv 2503.14476", dynamic_sampling=True, overlong_share=0.2,
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
        "clip", _GSPO, "sequence", "learner", "zscore", "none", "sequence_mean", "Zheng et al. 2025, arXiv 2507.18071",
    ),
    "gspo_token": Method(
        "clip", _GSPO, "sequence_token", "learner", "zscore", "none", "sequence_mean",
        "Zheng et al. 2025, arXiv 2507.18071 sec. 4.3", "the gradient of gspo where a sequence has one advantage",
    ),
    "dr_grpo": Method(
        "clip", _CLIP, "token", "learner", "center", "none", "constant_length", "Liu et al. 2025, arXiv 2503.20783",
    ),
    "dual_clip": Method(
        "dual_clip", {**_CLIP, "cap": 3.0}, "token", "learner", "zscore", "none", "token_mean",
        "Ye et al. 2019, arXiv 1912.09729", "group z-score in place of the critic",
    ),
    "cispo": Method(
        "truncated", {"cap": 5.0}, "token", "learner", "zscore", "none", "token_mean",
        "MiniMax 2025, arXiv 2506.13585", "the cap of ScaleRL (2510.13786): the paper gives none",
    ),
    "gmpo": Method(
        "clip", _GMPO, "geometric_mean", "learner", "zscore", "none", "sequence_mean",
        "Zhao et al. 2025, arXiv 2507.20673",
    ),
    "luspo": Method(
        "clip", {"clip_low": 2e-3, "clip_high": 2.5e-3}, "sequence", "learner", "zscore", "none", "sequence_sum",
        "arXiv 2602.05261",
    ),
    "dppo_tv": Method(
        "total_variation", {"limit": 0.15, "cap": 20.0}, "token", "learner", "zscore", "none", "token_mean",
        "arXiv 2602.04879",
    ),
    "ipo": Method(
        "probability_window", {"limit": 0.3}, "token", "rollout", "zscore", "none", "token_mean",
        "prime-rl's default loss", "group z-score as its advantage",
    ),
    "reinforce": Method(
        "none", {}, "token", "learner", "leave_one_out", "reward", "sequence_sum",
        "Ahmadian et al. 2024, arXiv 2402.14740", "importance-weighted where several updates share a batch",
    ),
}  # fmt: skip
