"""The simulator of learner and workers against closed forms, conservation, and the rules of the real thing."""

import json
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from grpo_lab.rollout.ahead import BatchesAhead

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts/bench"))
import simulate as bench
from _simulation import Outcome, Rates, System, Workload, candidates, learner_speed_up, simulate

RATES = Rates(peak=1000.0, half=10.0, concurrency=16, learner=2000.0, push_seconds=0.5)
ALIKE = numpy.full((12, 16), 100)  # 16 x 100 tokens: 2.6 s on one worker, 0.8 s of learning
VARIED = Workload(4, 8, 0, 120, 0.8, 500).lengths(15, seed=3)


def run(
    lengths: numpy.ndarray = ALIKE, workers: int = 1, staleness: int = 0, mode: str = "wait", **rates: float
) -> Outcome:
    return simulate(System(workers, replace(RATES, **rates), staleness, mode), lengths, 8)


def cycles(outcome: Outcome) -> numpy.ndarray:
    return numpy.diff(outcome.ended, prepend=0.0)


def test_one_after_the_other_takes_the_sum() -> None:
    outcome = run()
    generate = 100 * (16 + 10) / 1000
    assert outcome.wait == pytest.approx(generate) and outcome.generate == pytest.approx(generate)
    assert cycles(outcome) == pytest.approx(generate + 1600 / 2000 + 0.5)
    summary = outcome.summary(0, 12)
    assert summary["learner_idle"] == pytest.approx(1 - 0.8 / 3.9)
    assert summary["worker_idle"] == pytest.approx(1 - 2.6 / 3.9)
    assert summary["rollouts_per_second"] == pytest.approx(16 / 3.9)
    assert summary["overlap"] == 0 and summary["staleness"] == 0


def test_more_than_fits_at_once_is_sampled_in_waves() -> None:
    outcome = run(concurrency=4)
    assert outcome.generate == pytest.approx(4 * 100 * (4 + 10) / 1000)


def test_the_prompt_is_learned_once_a_group() -> None:
    outcome = simulate(System(1, RATES, 0), ALIKE, 8, prompt_tokens=50)
    assert outcome.learn == pytest.approx((1600 + 2 * 50) / 2000)


@pytest.mark.parametrize("learner", [2000.0, 400.0], ids=["workers slower", "learner slower"])
def test_a_batch_ahead_takes_the_slower_of_both(learner: float) -> None:
    """A batch that fits on the workers has to end before the push: the slower side, and the push."""
    outcome = run(staleness=1, learner=learner)
    assert cycles(outcome)[1:-1] == pytest.approx(max(2.6, 1600 / learner) + 0.5)
    assert outcome.wait[1:] == pytest.approx(0) and outcome.staleness[1:].min() == 1


def test_two_batches_share_a_worker_as_its_rate_says() -> None:
    """Kept over pushes, with the learner slow: alone 2.6 s of the cycle's 8.5; two batches run at once at the start only."""
    outcome = run(staleness=1, learner=200.0, mode="keep", concurrency=32)
    assert outcome.generate[0] == pytest.approx(100 * (32 + 10) / 1000)
    assert cycles(outcome)[1:] == pytest.approx(8.5)
    assert outcome.generate[2:] == pytest.approx(2.6)


def test_what_a_push_does_to_running_sequences() -> None:
    """Both batches run until the first ends (4.2 s), the second alone while the learner works (0.8 s); then comes the push."""
    lengths = numpy.vstack([numpy.full((1, 16), 100), numpy.full((3, 16), 1000)])
    kept, again, waited = (run(lengths, staleness=1, mode=mode, concurrency=32) for mode in ("keep", "abort", "wait"))
    done = 100 + 0.8 / 0.026  # tokens the second batch has then; afterwards it shares the worker with the third
    assert kept.generate[1] == pytest.approx(5.5 + (1000 - done) * 0.042)
    assert again.generate[1] == pytest.approx(5.5 + 1000 * 0.042)
    assert waited.generate[1] == pytest.approx(5.0 + (1000 - done) * 0.026) == waited.ended[0] - 0.5
    rebuilt = run(lengths, staleness=1, mode="keep", concurrency=32, recompute=16_000.0)
    assert rebuilt.ended[0] - kept.ended[0] == pytest.approx(done * 16 / 16_000)
    assert [one.staleness[1, 0] for one in (kept, again, waited)] == [1, 0, 1]


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("workers", [1, 3, 40])
def test_every_rollout_is_finished_once_and_is_not_too_old(workers: int, staleness: int, mode: str) -> None:
    outcome = run(VARIED, workers, staleness, mode)
    assert (outcome.finishes == 1).all()
    assert outcome.staleness.min() >= 0 and outcome.staleness.max() <= staleness
    assert outcome.ended == pytest.approx(numpy.cumsum(outcome.wait + outcome.learn + outcome.push))
    assert (outcome.decoding <= workers * (cycles(outcome) + 1e-9)).all()


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_no_token_is_lost(mode: str) -> None:
    """With half = 0 a busy worker makes `peak` tokens/s however many run, so its busy time counts tokens."""
    outcome = run(VARIED, 3, 2, mode, half=0.0)
    assert outcome.decoding.sum() * 1000 == pytest.approx(VARIED.sum())


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_twice_the_workers_are_never_slower(staleness: int) -> None:
    times = [run(VARIED, workers, staleness, learner=1e5).ended[-1] for workers in (1, 2, 4, 8, 16, 32, 64)]
    assert times == sorted(times, reverse=True) and times[0] > 1.5 * times[-1]


def test_lengths_have_their_mean_their_spread_and_their_seed() -> None:
    load = Workload(64, 16, 0, 200, 0.7, 100_000)
    lengths = load.lengths(40, seed=1)
    assert lengths.mean() == pytest.approx(200, rel=0.02) and lengths.std() / lengths.mean() == pytest.approx(
        0.7, rel=0.05
    )
    assert (lengths == load.lengths(40, seed=1)).all() and (lengths != load.lengths(40, seed=2)).any()
    assert replace(load, max_new_tokens=300).lengths(40, seed=1).max() == 300
    assert (replace(load, variation=0).lengths(2, seed=1) == 200).all()


def test_one_seed_one_result() -> None:
    one, other = (run(Workload(4, 8, 0, 120, 0.8, 500).lengths(15, seed=3), 3, 2) for _ in range(2))
    assert one.ended.tolist() == other.ended.tolist() and one.staleness.tolist() == other.staleness.tolist()


@pytest.mark.parametrize("learn", [0.05, 0.4, 2.0])
def test_the_measured_run_of_the_readme(learn: float) -> None:
    """250 steps of 8 completions, max_staleness 2, 0.84 s to sample: overlap 99.6 %, 4 ms of waiting a step.

    Measured learner times are not in the README, and need not be: pushes wait for what runs, so after the first batch (0.84 s /
    250 = 3.4 ms a step) no batch is ever waited for in the step itself.
    """
    lengths = numpy.full((250, 8), 20)
    peak = 20 * (24 + 4) / 0.84  # the first three batches run at once
    rates = Rates(peak=peak, half=4, concurrency=256, learner=160 / learn, push_seconds=0.05)
    summary = simulate(System(1, rates, 2), lengths, 4).summary(0, 250)
    assert summary["overlap"] == pytest.approx(0.996, abs=5e-4)
    assert 0.002 < summary["wait_seconds"] < 0.005


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_batches_begin_with_the_weights_that_batches_ahead_gives_them(staleness: int) -> None:
    steps, version, begun = 8, 0, dict[int, int]()
    changed = threading.Condition()

    def collect(step: int) -> int:
        with changed:
            begun[step] = version
            changed.notify()
        return step

    with BatchesAhead(collect, staleness, steps) as sampler:
        for step in range(steps):
            sampler.allow(step)
            sampler.take(step)
            last = min(step + staleness, steps - 1)
            with changed:
                assert changed.wait_for(lambda: last in begun, timeout=20)  # noqa: B023
            version = step + 1
    simulated = run(ALIKE[:steps], staleness=staleness, concurrency=1000)
    assert {step: step - int(simulated.staleness[step, 0]) for step in range(steps)} == begun


def test_a_learner_of_several_gpus_ends_with_the_one_that_has_most_groups() -> None:
    assert [learner_speed_up(gpus, 8, 0) for gpus in (1, 2, 3, 4, 7, 8, 500)] == [
        1,
        2,
        pytest.approx(8 / 3),
        4,
        4,
        8,
        8,
    ]
    assert learner_speed_up(4, 8, 0.05) == pytest.approx(4 * 0.95**2)


def test_rates_follow_from_the_hardware_and_measured_ones_replace_them() -> None:
    """A 7B model on one H200, by hand."""
    options = bench.make_parser().parse_args(
        ["--mean-length", "100", "--length-variation", "0", "--prompt-tokens", "50"]
    )
    derived = bench.rates(bench.MODELS["7B"], 1, options)
    assert derived.learner == pytest.approx(0.4 * 989e12 / (10 * 7.62e9))
    step = 15.24e9 / (0.7 * 4.8e12) + 0.005 + 256 * (57344 * 100 / (0.7 * 4.8e12) + 15.24e9 / (0.4 * 989e12))
    assert derived.concurrency == 256 and derived.decoding(256) == pytest.approx(256 / step)
    assert derived.push_seconds == pytest.approx(0.5 + 15.24 / 10)
    given = "--learner-tokens-per-second 700 --worker-tokens-per-second 9000 --push-seconds 0 --concurrency 32"
    measured = bench.rates(bench.MODELS["7B"], 1, bench.make_parser().parse_args(given.split()))
    assert measured.decoding(32) == pytest.approx(9000)
    assert (measured.learner, measured.push_seconds, measured.concurrency) == (700, 0, 32)


def test_the_search_finds_what_trying_everything_finds() -> None:
    options = bench.make_parser().parse_args(
        ["--prompts-per-step", "16", "--steps", "4", "--staleness", "0", "2", "--gpus", "16"]
    )
    load = Workload(16, 8, options.prompt_tokens, 1000, 0.7, 4096)
    lengths, model = load.lengths(9, 0), bench.MODELS["7B"]
    splits = candidates(16, bench.fewest_learner_gpus(model, options), 1, 16)
    assert {learner + workers for learner, workers in splits} == {16} and len(splits) == 14
    every = [
        bench.evaluate("7B", split, (mode, k), lengths, options)["rollouts_per_second"]
        for split in splits
        for mode, k in (("wait", 0), ("wait", 2), ("keep", 2))
    ]
    found = bench.best_split("7B", 16, lengths, options)
    assert found and found["rollouts_per_second"] > 0.95 * max(every) > 1.2 * min(every)


def test_the_script_prints_a_table_and_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--tiny", "--json", str(tmp_path / "out.json"), "--figure", str(tmp_path / "figure.png")])
    printed = capsys.readouterr().out
    header, *rows = json.loads((tmp_path / "out.json").read_text())["table"]
    assert "not a measurement" in printed and "0.5B" in printed and "knee" in printed
    assert [row[1] for row in rows] == [1, 4] and all(len(row) == len(header) for row in rows)
    assert (tmp_path / "figure.png").stat().st_size > 10_000 and (tmp_path / "figure.svg").exists()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--mean-length -3", "-3: at least 1"),
        ("--steps many", "invalid int value"),
        ("--models 70B --worker-gpus 1", "141 GB of weights and a cache do not fit"),
    ],
)
def test_impossible_numbers_are_refused(given: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        bench.main(given.split())
    assert told in f"{refused.value} {capsys.readouterr().err}"
