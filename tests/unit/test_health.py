"""A run stops when its samples are not the learner's, and not because a few samples say so by chance."""

import random

import pytest

from grpo_lab.config import Config
from grpo_lab.errors import RunError
from grpo_lab.health import Health


def config(prompts: int, group_size: int) -> Config:
    return Config(prompts_per_step=prompts, group_size=group_size)


def row(kl: float, error: float = 0.1, mismatch: float = 0.01) -> dict[str, float]:
    return {"policy/kl_ref": kl, "policy/kl_ref_se": error, "rollout/mismatch_mean": mismatch}


def test_a_large_batch_is_judged_at_once() -> None:
    health = Health(config(8, 32))
    health.check(row(-0.29), 1)  # within three errors
    with pytest.raises(RunError, match=r"step 2: the estimated KL .* -0.31 \+- 0.1 nats, below zero"):
        health.check(row(-0.31), 2)


def test_rounding_is_no_negative_kl() -> None:
    Health(config(8, 32)).check(row(-0.049, error=1e-6), 1)


def test_small_batches_are_judged_together() -> None:
    health = Health(config(2, 4))  # 32 steps have 256 completions
    for step in range(1, 32):
        health.check(row(-0.54, error=0.14), step)
    with pytest.raises(RunError, match=r"step 32: .* -0.54 \+- 0.025 nats over 32 steps"):
        health.check(row(-0.54, error=0.14), 32)


def test_a_resumed_run_goes_on_with_what_was_recorded() -> None:
    past = [row(-0.54, error=0.14) for _ in range(40)]
    with pytest.raises(RunError, match="over 32 steps"):
        Health(config(2, 4), past).check(row(-0.54, error=0.14), 41)


def test_chance_stops_no_run_of_few_completions() -> None:
    """Batches of eight completions of a policy at KL 0.1, their own spread as the error, over a hundred runs."""
    rng = random.Random(0)
    for _ in range(100):
        health = Health(config(2, 4))
        for step in range(200):
            sample = [rng.gauss(0.1, 0.45) for _ in range(8)]
            mean = sum(sample) / 8
            error = (sum((x - mean) ** 2 for x in sample) / 7 / 8) ** 0.5
            health.check(row(mean, error), step)


def test_a_mismatch_stops_at_once_and_nan_too() -> None:
    with pytest.raises(
        RunError, match=r"step 3: sampler and learner differ by 0.4 nats per token on average .limit 0.3"
    ):
        Health(config(2, 4)).check(row(1.0, mismatch=0.4), 3)
    with pytest.raises(RunError, match="rollout/mismatch_mean is nan: log-probs of the learner"):
        Health(config(2, 4)).check(row(1.0, mismatch=float("nan")), 1)
