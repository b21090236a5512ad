"""The time estimate of a dry run, by hand."""

from grpo_lab.config import Config, EvaluationConfig, LearnerConfig, RolloutConfig
from grpo_lab.planning.probe import Speeds, clock, estimate, lines

SPEEDS = Speeds(length=100, sampling=0.1, logprobs=0.05, update=0.2, push=2.0, completions=64)


def config(**more: object) -> Config:
    """10 steps of 8 rollouts, checkpoints after steps 4, 8 and 10; 3 problems x 2 samples."""
    shape = {"prompts_per_step": 2, "group_size": 4, "total_rollouts": 80, "checkpoint_every": 32}
    return Config(**{**shape, "evaluation": EvaluationConfig(problems=3, samples=2), **more})  # type: ignore[arg-type]


def test_a_step_is_the_sum_of_its_parts() -> None:
    found = estimate(config(), SPEEDS)
    assert (found.sampling, found.logprobs, found.update, found.push) == (0.8, 0.4, 1.6, 2.0)
    assert abs(found.step - 4.8) < 1e-9 and abs(found.evaluation - 6 * 0.15) < 1e-9
    assert abs(found.run - (10 * 4.8 + 4 * 0.9)) < 1e-9


def test_passes_repeat_the_update_alone() -> None:
    found = estimate(config(learner=LearnerConfig(passes=3, mini_batches=1)), SPEEDS)
    assert abs(found.update - 4.8) < 1e-9 and found.logprobs == 0.4


def test_ahead_the_longer_side_counts() -> None:
    ahead = RolloutConfig(workers=1, max_staleness=2)
    assert abs(estimate(config(rollout=ahead), SPEEDS).step - 4.0) < 1e-9
    slow = Speeds(length=100, sampling=1.0, logprobs=0.05, update=0.2, push=2.0, completions=64)
    assert abs(estimate(config(rollout=ahead), slow).step - 8.0) < 1e-9


def test_without_evaluations_there_is_no_time_for_them() -> None:
    quiet = config(evaluation=EvaluationConfig(enabled=False))
    assert estimate(quiet, SPEEDS).run == 10 * estimate(quiet, SPEEDS).step
    assert "evaluation" not in " ".join(lines(quiet, SPEEDS, estimate(quiet, SPEEDS), 3))


def test_seconds_in_words() -> None:
    assert [clock(s) for s in (0.42, 31, 540, 12600, 181440)] == ["0.4 s", "31 s", "9.0 min", "3.5 h", "2.1 days"]
