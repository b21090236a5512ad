"""Hostile numbers: equal rewards, empty batches, log-ratios of 500, NaN from the engine, the model and the user's reward.

Each is defined: the gradient is 0 or bounded, or one line names the step and what was not finite, and nothing is written.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import write_tiny_config
from learner_cases import make_groups, make_learner
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from grpo_lab import plugins
from grpo_lab.config import Config, DataConfig, ModelConfig, RolloutConfig
from grpo_lab.config.file import load_config
from grpo_lab.config.sections import AdvantageName, AggregateName, KLName
from grpo_lab.console import Console
from grpo_lab.errors import ConfigError, RunError, spelled
from grpo_lab.health import Health
from grpo_lab.learner.collate import collate
from grpo_lab.learner.gradient import NonFiniteError
from grpo_lab.learner.learner import Learner
from grpo_lab.metrics import batch_metrics
from grpo_lab.objective.advantages import advantages, batch_advantages
from grpo_lab.objective.axes import CORRECTION_OPTIONS, Objective
from grpo_lab.objective.gates import PACKAGE, build_gate
from grpo_lab.objective.loss import batch_totals, loss_inputs, policy_loss
from grpo_lab.objective.record import correction_record, gate_record
from grpo_lab.rollout.collect import Collector
from grpo_lab.rollout.engines import EngineSpec, hf, scripted
from grpo_lab.run_dir import RunDir
from grpo_lab.tasks import load_task
from grpo_lab.train import train
from grpo_lab.types import Completion, GenerationRequest, Grade, Problem, RolloutGroup, Sampling, TrainBatch

ADVANTAGES: list[AdvantageName] = ["leave_one_out", "center", "zscore", "batch_zscore"]
PROBLEMS = [Problem(f"p{n}", ({"role": "user", "content": f"{n} + {n} ="},), str(2 * n)) for n in range(3)]
SAMPLING = Sampling(8, stop_token_ids=(2,))


def one_line(error: pytest.ExceptionInfo[BaseException], *parts: str) -> None:
    text = str(error.value)
    assert "\n" not in text
    for part in parts:
        assert part in text


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.policy.trainable().items()}


def assert_same(before: dict[str, torch.Tensor], learner: Learner) -> None:
    assert all(torch.equal(before[name], p) for name, p in learner.policy.trainable().items())


# -- rewards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7, 123.456, -1e6, 0.0])
def test_equal_rewards_give_advantages_of_exactly_zero(name: AdvantageName, reward: float) -> None:
    """Rounding would leave 1e-8, which a z-score makes 1e-4, and AdamW a step of full size."""
    for group_size in (2, 3, 5, 7, 12, 32, 33, 64):
        assert advantages(torch.full((3, group_size), reward), name).abs().max() == 0


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_completion_alone_has_no_advantage(name: AdvantageName) -> None:
    assert torch.equal(advantages(torch.tensor([[0.3]]), name), torch.zeros(1, 1))
    assert torch.equal(advantages(torch.tensor([[0.3], [1.0]]), name), torch.zeros(2, 1))
    with pytest.raises(ConfigError, match="group_size=1: input should be greater than or equal to 2") as error:
        load_config(None, ["group_size=1"])
    one_line(error)


@pytest.fixture(scope="module")
def still(tiny_model: Path) -> Learner:
    """At the reference; for tests that leave its weights as they are."""
    return make_learner(tiny_model)


def equal_groups(reward: float) -> list[RolloutGroup]:
    return [replace(group, grades=(Grade(reward, "wrong"),) * 7) for group in make_groups(size=7)]


@pytest.mark.parametrize("kl", ["none", "reward", "loss_k2_sequence"])
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_equal_rewards_move_no_weight_of_the_reference(still: Learner, kl: KLName, advantage: AdvantageName) -> None:
    """At the reference the KL has no gradient either."""
    learner = still.with_objective(replace(still.gradient.objective, kl=kl, advantage=advantage))
    before = weights(learner)
    batch = learner.annotate(collate(equal_groups(0.1)))
    taken = batch_advantages(batch, learner.gradient.objective)
    report = learner.update(batch, taken, 0)
    metrics = {**report.metrics, **batch_metrics(batch, learner.gradient.objective, 0)}
    assert all(map(math.isfinite, metrics.values()))
    assert taken.abs().max() == 0 and metrics["policy/grad_norm"] == 0
    assert_same(before, learner)


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "sequence_sum", "constant_length"])
def test_a_batch_without_a_trained_token_moves_nothing(still: Learner, aggregate: AggregateName) -> None:
    cut = [
        replace(group, completions=tuple(replace(c, finish_reason="length") for c in group.completions))
        for group in make_groups()
    ]
    axes = {"mask_truncated": True, "aggregate": aggregate, "correction": "tis", "correction_options": {"cap": 2.0}}
    learner = still.with_objective(replace(still.gradient.objective, **axes))  # type: ignore[arg-type]
    before = weights(learner)
    batch = learner.prepare(collate(cut))
    report = learner.update(batch, batch_advantages(batch, learner.gradient.objective), 0)
    assert (report.metrics["loss"], report.metrics["policy/grad_norm"]) == (0, 0)
    assert all(map(math.isfinite, report.metrics.values()))
    assert_same(before, learner)


def good(problem: Problem, text: str, truncated: bool) -> Grade:
    return Grade(1.0, "correct")


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


def spec(model: Path) -> EngineSpec:
    return EngineSpec(model, ModelConfig(name=str(model), dtype="float32"), RolloutConfig(max_new_tokens=8))


GRADES: list[object] = [
    Grade(math.nan, "wrong"),
    Grade(math.inf, "correct"),
    Grade(-math.inf, "wrong"),
    Grade(-1e300, "wrong"),  # infinite in float32
    Grade(10**400, "correct"),
    Grade(10**5000, "correct"),
    Grade("1", "correct"),  # type: ignore[arg-type]
    Grade(None, "wrong"),  # type: ignore[arg-type]
    Grade(1j, "wrong"),  # type: ignore[arg-type]
    Grade(1.0, "right"),  # type: ignore[arg-type]
    None,
    0.5,
]


@pytest.mark.parametrize("given", GRADES, ids=spelled)
def test_a_grade_that_is_none_is_refused(tiny_model: Path, tokenizer: PreTrainedTokenizerBase, given: object) -> None:
    def grade(problem: Problem, text: str, truncated: bool) -> object:
        return given if problem.id == "p1" else Grade(0.0, "wrong")

    collector = Collector(scripted.EngineImpl(spec(tiny_model)), tokenizer, grade, 0, 64)  # type: ignore[arg-type]
    with pytest.raises(RunError) as error:
        collector.collect(PROBLEMS, 2, SAMPLING, ("rollout", 2))
    one_line(error, "step 3: ", "grade gave ", "problem 'p1'", "between -1e+06 and 1e+06")
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("given", [True, 1, np.float32(1), np.float64(1), Fraction(1)])
def test_a_reward_of_any_kind_of_number_becomes_a_float(
    tiny_model: Path, tokenizer: PreTrainedTokenizerBase, given: float
) -> None:
    grade = lambda problem, text, truncated: Grade(given, "correct")  # noqa: E731
    collector = Collector(scripted.EngineImpl(spec(tiny_model)), tokenizer, grade, 0, 64)
    rewards = [r for g in collector.collect(PROBLEMS, 2, SAMPLING, ("rollout", 0)) for r in g.rewards]
    assert rewards == [1.0] * 6 and {type(reward) for reward in rewards} == {float}


def test_a_grade_function_that_fails_is_named(tiny_model: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    def grade(problem: Problem, text: str, truncated: bool) -> Grade:
        raise ZeroDivisionError("no\nsolution") if problem.id == "p2" else RunError("no key: give one")

    collector = Collector(scripted.EngineImpl(spec(tiny_model)), tokenizer, grade, 0, 64)
    with pytest.raises(RunError) as error:
        collector.collect(PROBLEMS[2:], 2, SAMPLING, ("evaluation",))
    one_line(
        error, "sampling for evaluation: ", "grade failed", "'p2'", "ZeroDivisionError: no solution", "test_numbers.py"
    )
    with pytest.raises(RunError, match=r"^step 1: no key: give one$"):
        collector.collect(PROBLEMS[:1], 2, SAMPLING, ("rollout", 0))


REWARDS = """
def fails(problem, text): return 1 / len(text)
def huge(problem, text): return 10**400
def endless(problem, text): return 10**5000
def text(problem, text): return "0.5"
def two(problem, text): return [0.5, 0.5]
def none(problem, text): return None
def unreal(problem, text): return 1j
def nan(problem, text): return float("nan")
def minus(problem, text): return float("-inf")
def yes(problem, text): return True
def late(problem, text): return 1 / (5 - len(text))
"""


def test_every_wrong_reward_of_a_users_function_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostile_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"q{n}", "answer": "1"}) + "\n" for n in range(4)))

    def grade(name: str, text: str = "") -> Grade:
        options = {"reward": f"hostile_rewards:{name}"}
        data = DataConfig(task="jsonl", path=str(file), train_problems=None, heldout_problems=1, options=options)
        task = load_task(data)
        return task.grade(task.train[0], text, False)

    with pytest.raises(ConfigError) as error:
        grade("fails")
    one_line(
        error,
        "reward 'hostile_rewards:fails' failed",
        "problem 'row-",
        "ZeroDivisionError",
        "hostile_rewards.py, line 2",
        "tried on an empty completion",
    )
    for name in ("huge", "endless", "text", "two", "none", "unreal", "nan", "minus"):
        with pytest.raises(ConfigError, match="return a finite number") as error:
            grade(name)
        one_line(error, f"'hostile_rewards:{name}'", "problem 'row-")
    assert grade("yes") == Grade(1.0, "correct") and grade("late").reward == 0.2
    with pytest.raises(RunError, match="'hostile_rewards:late' failed on a completion of problem 'row-"):
        grade("late", "12345")


# -- log-ratios ------------------------------------------------------------------------------------------------------

LEVELS = ("token", "sequence", "sequence_token", "geometric_mean")
KLS = ("none", "reward", "loss_k1", "loss_k2", "loss_k3", "loss_k3_is", "loss_k2_sequence")
AXES = [{"kl": kl} for kl in KLS] + [{"correction": c, "correction_options": o} for c, o in CORRECTION_OPTIONS.items()]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", plugins.names(PACKAGE))
def test_log_ratios_beyond_any_exponential_stay_finite(name: str, level: str) -> None:
    """|log rho| of 50 and 500, where e^500 is infinite: loss, gradient and record are finite, and the gate passes nothing."""
    try:
        gate = build_gate(name, {}, level)  # type: ignore[arg-type]
    except ConfigError:
        pytest.skip("the gate is not defined at this level")
    tokens = collate(make_groups(groups=1, size=4))
    mask, signs = tokens.completion_mask, torch.tensor([1.0, -1.0, 2.0, 0.0])
    for size in (50.0, 500.0):
        for sign in (1, -1):
            new = mask * (-5.0 if sign > 0 else -5.0 - size)
            old = mask * (-5.0 - size if sign > 0 else -5.0)
            batch = TrainBatch(replace(tokens, rollout_logprobs=new), old, mask * -5.0)
            for axes in AXES:
                objective = Objective(beta=0.05, gate=name, level=level, **{"kl": "none", **axes})  # type: ignore[arg-type]
                inputs = loss_inputs(batch, signs, objective, batch_totals(tokens, objective))
                leaf = new.clone().requires_grad_()
                loss = policy_loss(leaf, inputs, objective, gate)
                (gradient,) = torch.autograd.grad(loss, leaf)
                record = {**gate_record(new, inputs, objective, gate), **correction_record(inputs)}
                assert torch.isfinite(loss) and torch.isfinite(gradient).all(), (size, sign, axes)
                assert all(map(math.isfinite, record.values())), (size, sign, axes)
                if not objective.kl_in_loss:
                    assert gradient.abs().max() == 0, (size, sign, axes)


# -- engines ---------------------------------------------------------------------------------------------------------

Change = Callable[[Sequence[Completion]], Sequence[Completion]]


def changed(**values: object) -> Change:
    """Another second completion."""
    return lambda given: [given[0], replace(given[1], **values), *given[2:]]  # type: ignore[arg-type]


def with_logprob(value: float) -> Change:
    return changed(token_ids=(5, 6, 2), logprobs=(-1.0, value, -1.0))


ANSWERS: dict[str, tuple[Change, str]] = {
    "nothing": (changed(token_ids=(), logprobs=()), "a completion of 0 tokens and 0 log-probs"),
    "too few": (lambda given: given[1:], "answered 5 of 6 requests"),
    "fewer log-probs": (changed(token_ids=(5, 2), logprobs=(-1.0,)), "2 tokens and 1 log-probs"),
    "after the end": (changed(token_ids=(5, 2, 6), logprobs=(-1.0,) * 3), "went on after a stop token (one of [2])"),
    **{str(x): (with_logprob(x), f"are no log-probs, for example {x:g}") for x in (
        math.nan, math.inf, -math.inf, -1e300, 0.5)},
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_a_broken_answer_of_an_engine_is_refused(
    tiny_model: Path, tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    change, message = ANSWERS[name]

    class Hostile(scripted.EngineImpl):
        def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> list[Completion]:
            return list(change(super().generate(requests, sampling)))

    collector = Collector(Hostile(spec(tiny_model)), tokenizer, good, 0, 64)
    with pytest.raises(RunError) as error:
        collector.collect(PROBLEMS, 2, SAMPLING, ("rollout", 2, 1))
    one_line(error, "step 3: ", message)


# -- models ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken_model(tiny_model: Path, module_path: Path) -> Path:
    """One NaN in the last layer."""
    folder = module_path / "model"
    folder.mkdir()
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tiny_model / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_weights_that_are_nan_sample_nothing(broken_model: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    collector = Collector(hf.EngineImpl(spec(broken_model)), tokenizer, good, 0, 64)
    with pytest.raises(RunError) as error:
        collector.collect(PROBLEMS, 2, SAMPLING, ("rollout", 0))
    one_line(error, "step 1: ", "log-probs", "for example nan", "check the model")


def test_weights_that_are_nan_are_not_measured_and_not_trained(broken_model: Path) -> None:
    learner = make_learner(broken_model)
    tokens = collate(make_groups())
    with pytest.raises(RunError, match="cannot be measured") as error:
        learner.statistics(tokens)
    one_line(error)
    batch = learner.prepare(tokens)
    metrics = batch_metrics(batch, learner.gradient.objective, 0)
    with pytest.raises(RunError) as error:
        Health(Config()).check(metrics, 4)
    one_line(error, "step 4: policy/kl_ref is nan", "nothing was trained on this batch", "check the model")
    with pytest.raises(NonFiniteError, match="step 4: the loss is not finite"):
        learner.update(batch, torch.linspace(-1, 1, 12), 3)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("column", ["old_logprobs", "ref_logprobs"])
def test_log_probs_of_the_learner_that_are_none_stop_before_the_update(
    still: Learner, column: str, value: float
) -> None:
    batch = still.annotate(collate(make_groups()))
    getattr(batch, column)[0, 0] = value
    with pytest.raises(RunError) as error:
        Health(Config()).check(batch_metrics(batch, still.gradient.objective, 0), 9)
    one_line(error, "step 9: ", "policy/kl_ref is ", "log-probs of the learner, or of the reference, are not finite")


# -- updates ---------------------------------------------------------------------------------------------------------


def test_a_finite_spike_is_clipped(tiny_model: Path) -> None:
    learner = make_learner(tiny_model, learning_rate=1e-3, weight_decay=0.0)
    before = weights(learner)
    batch = learner.annotate(collate(make_groups()))
    report = learner.update(batch, torch.linspace(-1e15, 1e15, 12), 0)
    assert report.metrics["policy/grad_norm"] > 1e10 and all(map(math.isfinite, report.metrics.values()))
    moved = [float((before[name] - p.detach()).abs().max()) for name, p in learner.policy.trainable().items()]
    assert 0 < max(moved) < 1.1e-3


@pytest.mark.parametrize("size", [1e30, math.inf, math.nan])
def test_a_spike_beyond_float32_changes_no_weight(tiny_model: Path, size: float) -> None:
    """1e30: each number is finite and their norm is not, to which the gradient would be clipped to 0."""
    learner = make_learner(tiny_model)
    before = weights(learner)
    batch = learner.annotate(collate(make_groups()))
    with pytest.raises(NonFiniteError) as error:
        learner.update(batch, torch.linspace(-size, size, 12), 0)
    one_line(error, "step 1: the ", " is not finite", "changed no weight", "a lower learner.learning_rate")
    assert_same(before, learner)
    learner.update(batch, torch.linspace(-1, 1, 12), 0)
    assert all(torch.isfinite(p).all() for p in learner.policy.trainable().values())


def test_an_update_beyond_the_models_dtype_is_refused(tiny_model: Path) -> None:
    learner = make_learner(tiny_model, dtype="float16", learning_rate=1e5)  # float16 ends at 65504
    batch = learner.annotate(collate(make_groups()))
    with pytest.raises(NonFiniteError) as error:
        learner.update(batch, torch.linspace(-1, 1, 12), 1)
    one_line(error, "step 2: ", "weights that float16 cannot hold", "not saved", "a lower learner.learning_rate")


# -- whole runs ------------------------------------------------------------------------------------------------------


def test_metrics_that_are_not_finite_are_not_written(tmp_path: Path, tiny_config: Path) -> None:
    run = RunDir.create(load_config(tiny_config))
    run.append_metrics({"step": 1, "loss": 0.5})
    with pytest.raises(RunError) as error:
        run.append_metrics({"step": 2, "loss": math.nan, "ratio/max": math.inf, "reward/mean": 0.5})
    one_line(error, "step 2: loss is nan, ratio/max is inf", "not recorded")
    assert run.read_metrics() == [{"step": 1, "loss": 0.5}]


HOSTILE_TASK = """
from parity_task import Task as Parity
from grpo_lab.types import Grade

class Task(Parity):
    graded = 0
    def grade(self, problem, text, truncated):
        Task.graded += 1
        return Grade(float("nan"), "wrong") if Task.graded > 12 else super().grade(problem, text, truncated)
"""


def test_a_run_whose_reward_becomes_nan_keeps_what_it_has(
    tmp_path: Path, tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nan_task.py").write_text(HOSTILE_TASK)
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(tiny_config, ["data.task=nan_task:Task", "evaluation.enabled=false"])
    with pytest.raises(RunError) as error:
        train(config, Console("quiet"))
    one_line(error, "step 2: Task.grade gave Grade(reward=nan", "problem 'p")
    run = RunDir.open(tmp_path / "runs/run")
    assert [row["step"] for row in run.read_metrics()] == [1]
    assert list(run.rollout_files()) == [1] and list(run.checkpoint_folders()) == [8]


@pytest.mark.parametrize("words, message", [
    ([], "sampling for evaluation: "),
    (["evaluation.enabled=false"], "step 1: "),
    (["rollout.engine=scripted", "rollout.top_p=0.9", "evaluation.enabled=false"], "step 1: policy/kl_ref is nan"),
    (["rollout.engine=scripted"], "the policy cannot be measured"),
])  # fmt: skip
def test_a_run_of_a_broken_model_writes_no_number(
    tmp_path: Path, broken_model: Path, words: list[str], message: str
) -> None:
    file = write_tiny_config(tmp_path / "tiny.yaml", broken_model, tmp_path / "runs")
    with pytest.raises(RunError) as error:
        train(load_config(file, words), Console("quiet"))
    one_line(error, message)
    run = RunDir.open(tmp_path / "runs/run")
    assert run.read_metrics() == [] and run.checkpoint_folders() == {} and list(run.evaluations.glob("*.json")) == []


def test_a_learning_rate_that_breaks_the_weights_stops_the_run(tmp_path: Path, tiny_config: Path) -> None:
    """The first of two updates makes weights of 1e30, whose logits are not finite: the second is refused."""
    words = ["learner.learning_rate=1e30", "evaluation.enabled=false", "rollout.engine=scripted"]
    with pytest.raises(RunError) as error:
        train(load_config(tiny_config, [*words, "rollout.mismatch_limit=100"]), Console("quiet"))
    one_line(error, "step 1: ", "not finite", "a lower learner.learning_rate", "last good checkpoint: none yet")
    assert RunDir.open(tmp_path / "runs/run").read_metrics() == []
