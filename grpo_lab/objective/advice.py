"""What the first lines of a run say of its objective: which beta the loss really optimises, and what is questionable."""

from __future__ import annotations

from grpo_lab.config import Config
from grpo_lab.objective.axes import Objective

_TOKEN_LOCAL = ("loss_k2", "loss_k3", "loss_k3_is")


def effective_beta_line(objective: Objective, group_size: int) -> str:
    """One line: which beta the loss really optimises."""
    beta, scale = objective.beta, group_size / (group_size - 1) if objective.advantage == "center" else 1.0
    if objective.kl == "none":
        return f"beta_eff = 0: no KL term in the loss; beta = {beta:g} is used in the evaluation only"
    if objective.kl == "loss_k1":
        return f"beta_eff = 0: the expected gradient of loss_k1 is 0; beta = {beta:g} adds noise, and is used in the evaluation"
    if objective.minimises_free_energy:
        place = "KL in the reward" if objective.kl == "reward" else "sequence KL in the loss"
        how = (
            f"up to the bias of samples {objective.max_staleness} pushes old" if objective.max_staleness else "exactly"
        )
        return f"beta_eff = {beta:g}: the loss descends F = -E[r] + {beta:g} KL {how} ({place})"
    extras = {
        "the overlong penalty": objective.overlong_cache > 0,
        "mask_truncated": objective.mask_truncated,
        "dynamic sampling": objective.dynamic_sampling,
    }
    changed = [name for name, on in extras.items() if on]
    if objective.kl == "reward":
        fixed = f"beta_eff = {beta:g} at the fixed point (KL in the reward)"
        if changed:
            return f"{fixed}, but with {' and '.join(changed)} it is another reward's or another policy's than F's"
        return f"{fixed}; {objective.advantage} and {objective.aggregate} reweight the way there"
    if objective.advantage in ("zscore", "batch_zscore"):
        what = "each prompt" if objective.advantage == "zscore" else "the batch"
        return f"beta_eff = {beta:g} x std(r) of {what}, moving with training: not the Gibbs temperature you asked for"
    if objective.kl in _TOKEN_LOCAL:
        return f"beta_eff = {beta * scale:g}, token-local: its fixed point is not the Gibbs policy"
    if objective.aggregate not in ("constant_length", "sequence_sum") or changed:
        reason = " and ".join([*changed, *([f"{objective.aggregate} weights"] if not changed else [])])
        return f"beta_eff = {beta * scale:g}, but {reason} shift the fixed point away from the Gibbs policy"
    return f"beta_eff = {beta * scale:g}: descends F at that temperature"


def warnings(config: Config, objective: Objective) -> list[str]:
    """What is questionable in this run and its consequence, one line each (THEORY B.2, B.5)."""
    return [
        text
        for applies, text in (*_of_updates(config, objective), *_of_axes(objective), *_of_data(config, objective))
        if applies
    ]


def _of_updates(config: Config, objective: Objective) -> list[tuple[bool, str]]:
    learner = config.learner
    return [
        (
            learner.passes * learner.mini_batches == 1 and objective.old == "learner",
            "gate inert: one update per rollout batch with old log-probs of the same weights gives ratio 1 everywhere, so "
            "every gate is open; raise learner.passes or learner.mini_batches to let gates differ",
        ),
        (
            objective.level != "token" and objective.old == "rollout",
            f"level {objective.level} with old=rollout: a sequence ratio as tight as GSPO's closes on the sampler's rounding "
            "alone; compare rollout/mismatch_mean with the gate's window, or set objective.old=learner",
        ),
    ]  # fmt: skip


def _of_axes(o: Objective) -> list[tuple[bool, str]]:
    zscore = o.advantage in ("zscore", "batch_zscore")
    return [
        (
            o.kl == "none",
            f"no KL in the loss: nothing holds the policy near the reference, so F at beta {o.beta:g} is measured but not "
            "optimised; E[r] goes to its maximum and the KL where the path leads",
        ),
        (
            zscore and o.kl_in_loss,
            "advantages divided by std(r) with the KL in the loss: the temperature becomes beta x std(r), "
            + ("different for every prompt; " if o.advantage == "zscore" else "moving with the batch; ")
            + "the gap to the floor will not close",
        ),
        (
            zscore and o.kl == "reward",
            "advantages divided by std(R): the fixed point stays, but prompts are weighted by 1/std and steps do not shrink "
            "near it; decay the learning rate",
        ),
        (
            o.kl in _TOKEN_LOCAL,
            f"KL {o.kl} is token-local: it ignores how a token changes the KL of later ones, so its fixed point is not the "
            "Gibbs policy",
        ),
        (o.kl == "loss_k1", "KL loss_k1 has expected gradient 0 on-policy: it adds noise, no KL force"),
        (
            o.advantage == "center" and o.kl_in_loss and o.kl != "loss_k1",
            "a baseline that includes the sample itself scales the reward's force by (G-1)/G but not the KL's in the loss: "
            "beta_eff is beta G/(G-1); use advantage=leave_one_out",
        ),
    ]  # fmt: skip


def _of_data(config: Config, o: Objective) -> list[tuple[bool, str]]:
    rollout = config.rollout
    behind = f"completions may be {rollout.max_staleness} push{'es' if rollout.max_staleness > 1 else ''} old"
    return [
        (
            rollout.max_staleness > 0 and o.correction == "none" and o.old == "learner",
            f"{behind}, and nothing corrects for it: the loss takes them for the current policy's, which biases its gradient; "
            "leave objective.correction at null (tis), or choose icepop or mis",
        ),
        (
            rollout.max_staleness > 0 and (o.correction != "none" or o.old == "rollout"),
            f"{behind}: corrected token by token "
            + (f"({o.correction})" if o.correction != "none" else "(by the ratio to the sampler)")
            + ", which bounds the variance and leaves some bias; training follows the workers' timing: a resume is not exact",
        ),
        (
            rollout.temperature != 1 or rollout.top_p < 1,
            f"sampling at temperature {rollout.temperature:g}, top-p {rollout.top_p:g}: rewards and KL belong to that "
            "modified policy, while the evaluation uses temperature 1, top-p 1",
        ),
        (
            o.dynamic_sampling,
            "dynamic sampling drops groups of equal rewards"
            + (" and their KL force with them: beta_eff = beta x P(a group is mixed)" if o.kl_in_loss else "")
            + f": training sees a harder set of prompts than the evaluation; up to {config.objective.max_regenerations} extra "
            "rounds of sampling a step, which the rollout counts leave out (rollouts/sampled has them)",
        ),
        (
            o.overlong_cache > 0,
            f"overlong penalty over the last {o.overlong_cache} of {o.max_tokens} tokens: the loss maximises r minus the "
            "penalty, while F and the floor are those of r",
        ),
        (
            o.mask_truncated,
            "truncated completions give no gradient: the policy is trained as if it always stopped in time, while F counts "
            "them with reward 0 and their whole KL",
        ),
    ]  # fmt: skip
