"""The laboratory's commands on a real (tiny) run, and a new gate from one file that shows up everywhere by itself."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import write_tiny_config

from grpo_lab.cli import main
from grpo_lab.config.file import load_config
from grpo_lab.console import Console
from grpo_lab.lab.parameters import nearest_checkpoint, replay_parameters
from grpo_lab.lab.recorded import read_step
from grpo_lab.lab.replay import named_objective, replay
from grpo_lab.objective import gates
from grpo_lab.objective.axes import resolve
from grpo_lab.run_dir import RunDir
from grpo_lab.train import train

OWN_GATE = Path(__file__).parents[2] / "configs/examples/own_gate.py"


@pytest.fixture(scope="module")
def run(tiny_model: Path, module_path: Path) -> RunDir:
    """Two steps of two passes x two mini-batches, so that ratios leave 1."""
    config = write_tiny_config(module_path / "tiny.yaml", tiny_model, module_path / "runs")
    sets = ["evaluation.enabled=false", "learner.passes=2", "learner.learning_rate=0.003"]
    return train(load_config(config, sets, {"method": "dapo"}), Console())


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["grpo-lab", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def test_the_record_is_what_the_learner_saw(run: RunDir) -> None:
    """Replaying the run's own objective gives the gate metrics the run logged, from the files alone."""
    metrics = run.read_metrics()
    for step in (1, 2):
        recorded = read_step(run, step)
        (own,) = replay(recorded, {"own": resolve(run.config)})
        logged = {key: value for key, value in metrics[step - 1].items() if key.startswith(("gate/", "ratio/"))}
        assert len(logged) == 11
        for key, value in logged.items():
            assert own.record[key] == pytest.approx(value, abs=1e-6), key
        assert (recorded.trained_logprobs != recorded.batch.old_logprobs).any()


def test_gradients_by_token_follow_the_gate(run: RunDir) -> None:
    """-dL/dlogprob is f' * ratio * A / (N L) at token level, computed here from the record."""
    recorded = read_step(run, 2)
    tokens, config = recorded.batch.tokens, run.config
    (own,) = replay(recorded, {"own": resolve(config)})
    ratio = (recorded.trained_logprobs - recorded.batch.old_logprobs).exp()
    ell = ((recorded.batch.old_logprobs - recorded.batch.ref_logprobs) * tokens.completion_mask).sum(1)
    returns = (tokens.rewards - config.beta * ell).view(-1, config.group_size)
    others = (returns.sum(1, keepdim=True) - returns) / (config.group_size - 1)
    a = (returns - others).flatten().unsqueeze(1)
    is_open = torch.where(a >= 0, ratio <= 1.28, ratio >= 0.8)
    wanted = is_open * ratio * a * tokens.completion_mask / (len(a) * config.rollout.max_new_tokens)
    assert torch.allclose(-own.gradient.view_as(wanted), wanted, atol=1e-7)


def test_replay_prints_every_objective(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names = "grpo,grpo:paper,sao,sapo,gspo,gmpo,arctan"
    assert command(monkeypatch, "replay", run.path, "--methods", names, "--json", tmp_path / "r.json") == 0
    printed, numbers = capsys.readouterr().out, json.loads((tmp_path / "r.json").read_text())
    assert [row["name"] for row in numbers["objectives"]] == ["run: dapo", *names.split(",")]
    assert all(name in printed for name in names.split(","))
    cosines = torch.tensor([[cosine or 0.0 for cosine in row] for row in numbers["cosines"]])  # None: a zero gradient's
    assert torch.allclose(cosines, cosines.T) and cosines[0, 0] == pytest.approx(1, abs=1e-6)


def test_plot_gates_lays_the_tokens_over_the_plane(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command(monkeypatch, "plot", "gates", "--run", run.path, "--output", tmp_path / "f") == 0
    shares = re.findall(r"(\d+\.\d+)% +(\d+\.\d+)%", capsys.readouterr().out)
    assert sum(float(tokens) for tokens, _ in shares) == pytest.approx(100, abs=0.1)
    assert sum(float(mass) for _, mass in shares) == pytest.approx(100, abs=0.1)
    assert sorted(p.name for p in (tmp_path / "f").iterdir()) == ["gate_run_run.png", "gate_run_run.svg"]


def test_lab_equilibrium_prints_the_gap(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ("--method", "grpo", "--beta", "0.25", "--output", tmp_path, "--json", tmp_path / "e.json")
    assert command(monkeypatch, "lab", "equilibrium", *arguments) == 0
    rows = {row["recipe"]: row["exact"] for row in json.loads((tmp_path / "e.json").read_text())}
    assert rows["free_energy"]["gap"] < 1e-10 and rows["paper"]["gap"] == pytest.approx(4.1e-3, abs=5e-5)
    assert "0.00409" in capsys.readouterr().out and (tmp_path / "equilibrium.svg").is_file()


@pytest.mark.parametrize("arguments, message", [
    (["lab", "equilibrium", "--method", "grop"], "did you mean 'grpo'"),
    (["lab", "equilibrium", "--beta", "0"], "greater than 0"),
    (["lab", "equilibrium", "--method", "grpo", "--recipe", "cake"], "'free_energy' or 'paper'"),
    (["plot", "gates", "--method", "clp"], "did you mean 'clip'"),
    (["plot", "gates", "--step", "1"], "--run"),
    (["replay", "nowhere"], "not a run folder"),
    (["plot", "gates", "--run", "nowhere"], "not a run folder"),
])  # fmt: skip
def test_mistakes_are_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, *arguments) == 2
    error = capfd.readouterr().err
    assert message in error and "Traceback" not in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_records_that_cannot_be_replayed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command(monkeypatch, "replay", run.path, "--step", 7) == 2
    assert "steps 1 to 2 have" in capfd.readouterr().err
    assert command(monkeypatch, "replay", run.path, "--methods", "grpo:cake") == 2
    assert "unknown recipe 'cake'" in capfd.readouterr().err
    bare = tmp_path / "bare"
    (bare / "checkpoints").mkdir(parents=True)
    shutil.copy(run.path / "config.yaml", bare)
    assert command(monkeypatch, "replay", bare) == 2
    assert "tracking.rollouts=true" in capfd.readouterr().err


def test_a_new_gate_appears_everywhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_config: Path
) -> None:
    """The example of a gate, saved as one file beside the shipped ones."""
    (tmp_path / "bell.py").write_text(OWN_GATE.read_text())
    monkeypatch.setattr(gates, "__path__", [*gates.__path__, str(tmp_path)])
    monkeypatch.setattr(gates.__spec__, "submodule_search_locations", gates.__path__)
    assert command(monkeypatch, "list") == 0
    assert "bell" in capsys.readouterr().out
    output = ("--output", tmp_path / "figures")
    assert command(monkeypatch, "plot", "gates", "--method", "bell", *output) == 0
    assert (tmp_path / "figures/gate_bell.png").is_file()
    assert command(monkeypatch, "lab", "equilibrium", "--beta", 1, "--recipe", "free_energy", *output) == 0
    assert re.search(r"bell +largest F - F\* (0\.0e\+00|\d\.\de-1\d)", capsys.readouterr().out)
    run = train(load_config(tiny_config, ["objective.gate=bell", "evaluation.enabled=false"]), Console())
    (replayed,) = replay(read_step(run), {"bell": named_objective(run.config, "bell")})
    assert 0 < replayed.record["gate/mean"] <= 1


def test_a_gate_of_another_file_in_replays_and_plots(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "outside_gates.py").write_text(OWN_GATE.read_text())
    monkeypatch.syspath_prepend(tmp_path)
    assert command(monkeypatch, "replay", run.path, "--methods", "outside_gates:Gate,grpo:paper") == 0
    assert command(monkeypatch, "plot", "gates", "--method", "outside_gates:Gate", "-o", tmp_path / "f") == 0
    assert "outside_gates:Gate" in capsys.readouterr().out
    assert (tmp_path / "f/gate_outside_gates_Gate.png").is_file()


def test_dynamic_sampling_and_overlong_penalty_in_training(tiny_config: Path) -> None:
    sets = ["evaluation.enabled=false", "objective.correction=mis_sequence", "objective.overlong_cache=4"]
    config = load_config(tiny_config, sets, {"method": "dapo", "recipe": "paper"})
    run = train(config, Console())
    for row in run.read_metrics():
        assert row["rollouts/sampled"] >= 8 and row["rollouts/sampled"] % 4 == 0
        assert row["reward/zero_std_groups"] == row["rollouts/unmixed_groups"] / 2
        assert -1 <= row["reward/overlong_penalty"] <= 0
        assert 0 < row["correction/mean"] <= 2 and row["correction/zero"] == 0


def test_parameter_gradients_follow_from_token_gradients(run: RunDir) -> None:
    """By the chain rule: dL/dtheta = sum over tokens of dL/dlogprob * dlogprob/dtheta, with plain transformers."""
    from transformers import AutoModelForCausalLM

    recorded = read_step(run, 2)
    checkpoint = nearest_checkpoint(run, 2)
    names = {"own": resolve(run.config), "sapo": named_objective(run.config, "sapo")}
    results = replay_parameters(run, checkpoint, recorded, names)
    model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32).eval()
    tokens = recorded.batch.tokens
    logits = model(tokens.input_ids, attention_mask=tokens.attention_mask).logits.log_softmax(-1)
    at = logits[torch.arange(len(logits)).unsqueeze(1), tokens.predict_from]
    logprobs = at.gather(2, tokens.completion_ids.unsqueeze(2))[..., 0] * tokens.completion_mask
    here = replay(replace(recorded, trained_logprobs=logprobs.detach()), names)
    for result, by_token in zip(results, here, strict=True):
        assert result.loss == pytest.approx(by_token.loss, abs=1e-5)
        assert result.record["gate/mean"] == pytest.approx(by_token.record["gate/mean"], abs=1e-4)
        weight = by_token.gradient.view_as(logprobs)
        wanted = torch.autograd.grad((logprobs * weight).sum(), list(model.parameters()), retain_graph=True)
        flat = torch.cat([g.flatten() for g in wanted])
        assert torch.linalg.vector_norm(result.gradient - flat) < 1e-3 * flat.norm()
