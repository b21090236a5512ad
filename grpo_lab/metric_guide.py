"""What every metric means, in which unit, what is healthy, and what to do when it is not. Names as in metrics.jsonl."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from grpo_lab.run_dir import RunDir


@dataclass(frozen=True)
class Metric:
    """One metric. Values outside `low` and `high` deserve a look; None: no number says so for every run."""

    meaning: str
    healthy: str
    remedy: str = ""
    low: float | None = None
    high: float | None = None

    @property
    def marked(self) -> str:
        """Which values are marked, in words: "Marked above 0.3.", or ""."""
        ends = [f"{word} {end:g}" for word, end in (("below", self.low), ("above", self.high)) if end is not None]
        return f"Marked {' or '.join(ends)}." if ends else ""

    def is_healthy(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


_COUNTER = "Grows by the same each step."
_LOWER_RATE = "Lower learner.learning_rate, take fewer updates a batch (learner.mini_batches, passes), or raise beta."
_GATE = (
    "Updates move the policy out of the gate, and closed tokens teach nothing: lower learner.learning_rate or take fewer "
    "updates a batch; or choose a wider or smooth gate (`grpo-lab replay RUN` compares them)."
)
_SAMPLER = (
    "Run `grpo-lab doctor` with this config: the sampler may hold other weights or another dtype. float32 on both sides "
    "should give 1e-5, bfloat16 some 0.01 to 0.05; objective.correction=tis or icepop lives with what remains."
)
_STALE = "Lower rollout.max_staleness, or let objective.correction (tis, icepop, mis) or old=rollout account for it."
_BETA_EFF = (
    "Near the run's beta with recipe free_energy. The papers' recipes have another: 0 where the loss has no KL, beta x std(r) "
    "under z-scores with the KL in the loss."
)
_BETA_REMEDY = (
    "The run then descends F at that temperature, not at beta: use --recipe free_energy, or read F at the one it has."
)
_SIGNAL = "Small after one update a batch, more after several: what lies far from ratio 1 is old news."
_FLOOR = "Constant over a run: it is the reference's."
_WAITING = "Compare with time/update and time/generate."

GUIDE: dict[str, Metric] = {
    "step": Metric("Finished steps, one batch of rollouts each.", _COUNTER),
    "rollouts/total": Metric("Completions trained on so far; the axis of every curve.", _COUNTER),
    "tokens/total": Metric("Completion tokens trained on so far.", "Grows; by less each step as completions get shorter."),
    "loss": Metric(
        "Mean loss of the step's updates (surrogate, and the KL where it is in the loss), in units of reward.",
        "Its value says nothing: with one update a batch the ratios are 1 and a group's advantages sum to 0, so it is 0 but "
        "for lengths (and the KL, where it is in the loss), from the first step to the last. Nothing is broken.",
        "Look at policy/grad_norm for whether there is a signal, at reward/mean and policy/free_energy for whether it learns.",
    ),
    # what was sampled
    "reward/mean": Metric(
        "Mean reward of the batch's completions, in units of reward.",
        "Rises over tens of steps; noisy from one to the next, since each has other problems.",
        "Flat: see reward/zero_std_groups, completion/unparsable, gate/open_fraction; then raise learner.learning_rate. "
        "Rising while eval/reward does not: the training problems are being memorised.",
    ),
    "reward/std": Metric(
        "Standard deviation of the batch's rewards.",
        "For a binary reward sqrt(q (1 - q)) at a share q of right answers.",
        "0: all rewards are equal, so only the KL gives a gradient; the task is too hard or too easy, or the grading is wrong.",
        low=1e-6,
    ),
    "reward/zero_std_groups": Metric(
        "Share of the groups whose rewards are all equal; they say nothing about the reward.",
        "Below 0.8; falls while a hard task becomes solvable, rises again once it is solved.",
        "Near 1: raise group_size, take easier (or harder) problems, or objective.dynamic_sampling=true; read some "
        "completions with `grpo-lab report RUN`, the grading may refuse right answers.",
        high=0.8,
    ),
    "reward/overlong_penalty": Metric(
        "Mean of DAPO's soft penalty over the last tokens before the length limit, in units of reward, 0 or less.",
        "Near 0.",
        "Completions crowd the limit: raise rollout.max_new_tokens.",
        low=-0.3,
    ),
    "completion/length_mean": Metric(
        "Tokens of a completion on average.",
        "Settles; some growth is usual where reasoning helps.",
        "Growing into rollout.max_new_tokens: see completion/truncated. Collapsing: see completion/unparsable, and "
        "objective.aggregate (sequence_mean favours short right and long wrong answers).",
    ),
    "completion/unparsable": Metric(
        "Share of the completions that declare no answer; their reward is 0.",
        "Falls early in training.",
        "Ask for the form in the prompt (`#### 18` or \\boxed{18}), or data.options.grading=flexible.",
        high=0.5,
    ),
    "completion/truncated": Metric(
        "Share of the completions cut at the length limit; their reward is 0.",
        "Below 0.1.",
        "Raise rollout.max_new_tokens; with objective.mask_truncated=true they at least teach nothing wrong.",
        high=0.3,
    ),
    "rollouts/sampled": Metric(
        "Completions sampled for the step, with those that dynamic sampling replaced.",
        "A small multiple of prompts_per_step x group_size.",
        "Sampling is spent on groups of equal rewards: see reward/zero_std_groups.",
    ),
    "rollouts/unmixed_groups": Metric(
        "Groups of equal rewards kept because objective.max_regenerations rounds did not replace them.",
        "0.",
        "The problems are too hard or too easy; more rounds cost time and rarely help.",
    ),
    "rollouts/overage_groups": Metric(
        "Groups dropped because a completion was more than rollout.max_staleness pushes old, and sampled again.",
        "0 or rare.",
        "Workers fall behind: see rollout/requests_resent, and rollout.in_flight.",
    ),
    # the policy
    "policy/kl_ref": Metric(
        "KL to the reference on the training batch, nats per sequence (k1).",
        "Rises from 0 and settles; at the floor beta x KL costs less than the reward it bought.",
        "Rising without reward: it is wasted, so F rises. Raise beta, lower learner.learning_rate, or put the KL where it "
        "counts in full (objective.kl=reward).",
        low=-0.05,
    ),
    "policy/kl_ref_se": Metric("Standard error of policy/kl_ref, nats.", "Small beside policy/kl_ref.", "More a step."),
    "policy/free_energy": Metric(
        "F = -E[r] + beta KL of the policy on the training batch, in units of reward.",
        "Falls towards the floor (eval/floor_lower to eval/floor_upper, of other problems).",
        "Rising: the KL costs more than the reward brings; see policy/kl_ref and policy/beta_eff_p50.",
    ),
    "policy/grad_norm": Metric(
        "Norm of the gradient before clipping, mean over the step's updates.",
        "Steady within a factor of ten; learner.max_grad_norm clips what is above it.",
        "0: no group has different rewards, or the gate is closed. Always far above max_grad_norm: every step has the same "
        "length, lower learner.learning_rate. Growing: as gate/open_fraction.",
        low=1e-9,
    ),
    "policy/learning_rate": Metric("Learning rate of the next update.", "As learner.schedule and warmup_updates say."),
    "policy/beta_eff_expected": Metric(
        "Median temperature that the loss optimises, with the sampling of the group's std taken into account; reward a nat.",
        _BETA_EFF,
        _BETA_REMEDY,
    ),
    **{
        f"policy/beta_eff_p{q}": Metric(
            f"{name} over groups of the temperature that the loss really optimises, in units of reward a nat.",
            _BETA_EFF,
            _BETA_REMEDY,
        )
        for q, name in ((10, "10th percentile"), (50, "Median"), (90, "90th percentile"))
    },
    # what the gate did
    "gate/open_fraction": Metric(
        "Share of the trained tokens that the gate lets through (f' of at least 1/2).",
        "1 at the first update of a batch; above 0.7 over several. gspo's narrow gate works at 0.5.",
        _GATE,
        low=0.3,
    ),
    "gate/open_fraction_positive": Metric(
        "The same among tokens of positive advantage.", "As gate/open_fraction.", _GATE, low=0.3
    ),
    "gate/open_fraction_negative": Metric(
        "The same among tokens of negative advantage.",
        "As gate/open_fraction; far below the positive one, the gate stops unlearning first.",
        _GATE,
        low=0.3,
    ),
    "gate/mean": Metric("Mean f' of the gate over the trained tokens.", "Near 1.", _GATE, low=0.3),
    "gate/ess": Metric(
        "Effective share of the tokens that carry the signal: (sum g)^2 / (n sum g^2) of their weights.",
        "Above 0.5.",
        _GATE,
        low=0.2,
    ),
    **{
        f"gate/signal_beyond_{limit:g}": Metric(
            f"Share of the learning signal from tokens whose |log ratio| is above {limit:g} nats.",
            _SIGNAL,
            _LOWER_RATE,
            high=high,
        )
        for limit, high in ((0.1, None), (0.5, 0.5), (1.0, 0.3))
    },
    "ratio/min": Metric("Smallest ratio to the old policy, at the objective's level.", "Not many orders below 1.", _LOWER_RATE),
    "ratio/mean": Metric("Mean ratio to the old policy.", "Near 1.", _LOWER_RATE, low=0.7, high=1.5),
    "ratio/max": Metric("Largest ratio to the old policy.", "Single digits; rare larger ones are gated.", _LOWER_RATE),
    "correction/mean": Metric(
        "Mean weight that objective.correction gives the trained tokens.", "Near 1.", _STALE, low=0.7, high=1.5
    ),
    "correction/zero": Metric("Share of the trained tokens that the correction silenced.", "Below 0.1.", _STALE, high=0.2),
    # sampler against learner
    "rollout/mismatch_mean": Metric(
        "Mean |log-prob of learner - of sampler| with the same weights, nats per token.",
        "1e-5 in float32, up to 0.05 in bfloat16, and not growing. rollout.mismatch_limit stops the run.",
        _SAMPLER,
        high=0.1,
    ),
    "rollout/mismatch_max": Metric("The largest such difference, nats.", "1e-4 in float32, up to 3 in bfloat16.", _SAMPLER),
    "rollout/off_policy_mean": Metric(
        "Mean |log-prob of learner - of sampler| where the sampler had older weights, nats per token.",
        "What training changed since; below 0.1.",
        _STALE,
        high=0.2,
    ),
    "rollout/off_policy_max": Metric("The largest such difference, nats.", "Single digits.", _STALE),
    "rollout/staleness_mean": Metric("Pushes that the batch's completions are behind, mean.", "At most max_staleness.", _STALE),
    "rollout/staleness_max": Metric("The same, largest.", "At most max_staleness.", _STALE),
    "rollout/update_absorbed": Metric(
        "Share of an update that the model's dtype swallowed: 0 when it arrived, 1 when the model stood still.",
        "0 in float32; below 0.5 in bfloat16.",
        "Near 1 the steps are smaller than the dtype's spacing: raise learner.learning_rate or take model.dtype=float32.",
        high=0.5,
    ),
    "rollout/canary_mean": Metric(
        "Mean |log-prob of learner - of workers| on a fixed prompt after the push, nats per token.",
        "As rollout/mismatch_mean.",
        _SAMPLER,
        high=0.1,
    ),
    "rollout/canary_max": Metric("The largest such difference, nats.", "As rollout/mismatch_max.", _SAMPLER),
    "rollout/workers": Metric("Rollout workers that are up.", "All of them.", "The run's log says why one was lost.", low=1),
    "rollout/worker_restarts": Metric("Restarts of workers so far.", "0.", "The run's log says why.", high=0),
    "rollout/requests_resent": Metric("Completions asked for again so far.", "0.", "The run's log says why."),
    # speed
    "perf/tokens_per_second": Metric(
        "Completion tokens of the step for each second that it lasted.",
        "Steady.",
        "Falling: completions grew (completion/length_mean), the machine is shared, or it swaps; see which time/ grew.",
    ),
    "perf/overlap": Metric(
        "Share of the sampling that ran while the learner worked.",
        "0 with max_staleness 0; near 1 above it.",
        "Sampling is the slower side: more workers, or a higher rollout.max_staleness.",
    ),
    "perf/packing_fill": Metric(
        "Share of the positions run through the model that are tokens, not padding.",
        "Above 0.8.",
        "More micro-batches fit like lengths better: lower learner.microbatch_tokens; with few rows there is no mend.",
        low=0.6,
    ),
    "perf/prompt_share_saving": Metric(
        "Share of the tokens that were not run because siblings share their prompt.",
        "Larger for long prompts and short completions; 0 with learner.share_prompt=false.",
    ),
    "time/generate": Metric("Seconds of sampling the batch.", "Most of a step.", "More workers or GPUs; fewer max_new_tokens."),
    "time/annotate": Metric(
        "Seconds of the log-probs under the learner and the reference.",
        "Below time/update; with one update a batch it holds that update's forward.",
        "Raise learner.microbatch_tokens as memory allows.",
    ),
    "time/update": Metric("Seconds of the updates.", "Steady.", "Raise learner.microbatch_tokens as memory allows."),
    "time/sync": Metric(
        "Seconds of bringing the new weights to the sampler.",
        "Small beside the rest.",
        "rollout.weights_dir on a faster disk or in memory; with in_flight=wait a push waits for the longest completion.",
    ),
    "time/wait_rollouts": Metric("Seconds the learner waited for its batch.", "Near 0.", f"{_WAITING} More workers."),
    "time/wait_learner": Metric(
        "Seconds nothing was sampled because the learner had not pushed.",
        "Near 0.",
        f"{_WAITING} Raise rollout.max_staleness, or give the learner more GPUs and the workers fewer.",
    ),
    # evaluations
    "eval/reward": Metric("E[r] on the held-out problems, in units of reward.", "Rises.", "Compare with reward/mean."),
    "eval/kl": Metric("KL to the reference on the held-out problems, nats (k1).", "As policy/kl_ref."),
    "eval/free_energy": Metric(
        "F = -E[r] + beta KL on the held-out problems, in units of reward; 0 rollouts: the reference's.",
        "Falls towards the floor.",
        "Above the reference's: the policy is worse than none at this beta. `grpo-lab eval checkpoint` takes the gap apart: "
        "wasted KL asks for a higher beta or a lower rate, wrong tilt for more training.",
    ),
    "eval/free_energy_se": Metric("Standard error of eval/free_energy, by problem.", "Small.", "More problems."),
    "eval/floor_lower": Metric("Lower end of the bracket of F* = -beta log Z, the least F of any policy.", _FLOOR),
    "eval/floor_upper": Metric(
        "Upper end of that bracket.", _FLOOR, "Far above the lower one: more evaluation.samples; the reference rarely succeeds."
    ),
    # what trackers show as a run's result
    "final/free_energy": Metric("eval/free_energy of the newest evaluation.", "As eval/free_energy."),
    "final/floor_lower": Metric("eval/floor_lower of the newest evaluation.", _FLOOR),
    "final/floor_upper": Metric("eval/floor_upper of the newest evaluation.", _FLOOR),
    "final/gap_lower": Metric("F - F* to the upper end of the floor's bracket.", "Falls towards 0; below 0 within its error."),
    "final/gap_upper": Metric("F - F* to the lower end of the floor's bracket.", "Falls towards 0."),
}  # fmt: skip


def newest_values(run: RunDir) -> dict[str, float]:
    """The last line of metrics.jsonl and the newest evaluation, by their logged names."""
    values: dict[str, float] = dict((run.read_metrics() or [{}])[-1])
    for file in sorted(run.evaluations.glob("rollouts_*.json"))[-1:]:
        row: dict[str, Any] = json.loads(file.read_text())
        values |= {f"eval/{key}": row[key]["mean"] for key in ("reward", "kl", "free_energy")}
        values |= {f"eval/floor_{end}": row["floor"][end]["mean"] for end in ("lower", "upper")}
        values["eval/free_energy_se"] = row["free_energy"]["se"]
    return values
