"""Runs killed with SIGKILL and resumed, again and again: equal to the undisturbed run, and nothing is left behind."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import comparable_metrics, write_tiny_config

from grpo_lab.config import Config
from grpo_lab.config.file import load_config
from grpo_lab.console import Console
from grpo_lab.errors import ConfigError
from grpo_lab.learner.checkpoint import newest_checkpoint
from grpo_lab.run_dir import RunDir
from grpo_lab.verification.breaking import Operation, Outcome
from grpo_lab.verification.kill_moments import KINDS, Kind, Planned, candidates, choose_moments
from grpo_lab.verification.verify_resume import WatchedRun, compare, new_folder, shortened, verify

Run = Callable[..., subprocess.CompletedProcess[str]]
STEPS = 4
SETS = ("keep_last=2", "evaluation.problems=2", "evaluation.samples=2", "rollout.max_new_tokens=4")
KIND = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True)
class Undisturbed:
    config: Config
    run: RunDir
    operations: tuple[Operation, ...]


def short_config(folder: Path, model: Path) -> Config:
    return shortened(load_config(write_tiny_config(folder / "tiny.yaml", model, folder / "runs"), SETS), STEPS)


@pytest.fixture(scope="module")
def undisturbed(module_path: Path, tiny_model: Path) -> Undisturbed:
    config = short_config(module_path, tiny_model)
    calm = WatchedRun(new_folder(config), "undisturbed")
    outcome = calm.to_the_end()
    return Undisturbed(config, RunDir.open(calm.path), outcome.operations)


def assert_nothing_left(run: RunDir, outcomes: Sequence[Outcome]) -> None:
    assert [row["step"] for row in comparable_metrics(run.path)] == list(range(1, STEPS + 1))
    assert list(run.rollout_files()) == list(range(1, STEPS + 1))
    assert [str(path) for path in run.path.rglob(".*") if path.name != ".lock"] == []
    parents = {Path("/dev/shm"), Path(tempfile.gettempdir())}
    folders = [path for parent in parents for path in parent.glob("grpo_lab-*")]
    assert [path for path in folders for outcome in outcomes if f"-{outcome.pid}-" in path.name] == []


def chosen(undisturbed: Undisturbed, kind: str, part: str) -> Planned:
    """The moment of this kind whose operation has `part` in its name; of several, that in the longest work."""
    found = [p for p in candidates(undisturbed.operations, KIND[kind]) if part in p.moment.operation]
    return max(found, key=lambda planned: planned.moment.wait_s)


def has_no_config(run: RunDir, planned: Planned, config: Config) -> None:
    """The product says in one line what to do, by both ways to go on."""
    assert run.path.is_dir() and not (run.path / "config.yaml").exists()
    with pytest.raises(ConfigError, match="remove the folder"):
        RunDir.open(run.path)
    with pytest.raises(ConfigError, match="remove the folder"):
        RunDir.refuse_existing(
            config.model_copy(update={"output_dir": str(run.path.parent), "run_name": run.path.name})
        )


def has_a_bank_and_no_evaluation(run: RunDir, planned: Planned, config: Config) -> None:
    assert [path.name for path in run.evaluations.glob("[!.]*")] == ["reference_bank.parquet"]


def has_half_a_checkpoint(run: RunDir, planned: Planned, config: Config) -> None:
    (partial,) = run.checkpoints.glob(".partial-*")
    assert not (partial / "manifest.json").exists()


def has_a_sealed_checkpoint(run: RunDir, planned: Planned, config: Config) -> None:
    (partial,) = run.checkpoints.glob(".partial-*")
    assert json.loads((partial / "manifest.json").read_text())["files"]
    final = run.path / planned.moment.operation.split("run/")[1]
    newest = newest_checkpoint(run.checkpoints)
    assert not final.exists() and (newest is None or newest.folder.name < final.name)


def has_rollouts_without_their_line(run: RunDir, planned: Planned, config: Config) -> None:
    assert max(run.rollout_files()) == len(run.read_metrics()) + 1


FEW = (  # a kind, the operation it means here, what the kill leaves
    ("folder of the run", "os.rename run/config.yaml", has_no_config),
    ("file of an evaluation", "os.rename run/evaluations/rollouts_00000000", has_a_bank_and_no_evaluation),
    ("checkpoint, half-written", "rollouts_00000008", has_half_a_checkpoint),
    ("checkpoint between manifest and rename", "rollouts_00000016", has_a_sealed_checkpoint),
    ("line of metrics", "3 open", has_rollouts_without_their_line),
)


@pytest.mark.slow
def test_few_kills(undisturbed: Undisturbed) -> None:
    killed, outcomes = WatchedRun(new_folder(undisturbed.config), "killed"), []
    for name, part, leaves in FEW:
        planned = chosen(undisturbed, name, part)
        outcomes.append(killed.go(planned.moment))
        assert outcomes[-1].code == -9, name
        leaves(RunDir(killed.path), planned, undisturbed.config)
    outcomes.append(killed.to_the_end())
    run = RunDir.open(killed.path)
    assert [(c.what, c.difference) for c in compare(undisturbed.run, run) if c.difference] == []
    assert_nothing_left(run, outcomes)


def test_every_kind_of_moment_exists(undisturbed: Undisturbed) -> None:
    assert [kind.name for kind in KINDS if not candidates(undisturbed.operations, kind)] == []
    moments = choose_moments(undisturbed.operations, len(KINDS), 0)
    assert {planned.kind for planned in moments} == set(KIND)
    assert moments == choose_moments(undisturbed.operations, len(KINDS), 0)


@pytest.mark.slow
def test_twenty_kills(tmp_path: Path, tiny_model: Path) -> None:
    found = verify(short_config(tmp_path, tiny_model), 20, Console())
    assert [outcome.code for outcome in found.outcomes] == [-9] * 20 + [0]
    assert {planned.kind for planned in found.kills} == set(KIND)
    assert [(c.what, c.difference) for c in found.comparisons if c.difference] == []
    assert_nothing_left(RunDir.open(found.folder / "killed"), found.outcomes)


@pytest.mark.slow
def test_command(grpo_lab: Run, tiny_config: Path) -> None:
    done = grpo_lab("verify-resume", "--config", tiny_config, "--kills", "2", "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("resumed after step") + done.stdout.count("from the start") == 2
    assert done.stdout.count(": equal\n") == 5


def test_refuses_what_cannot_be_exact(tiny_config: Path) -> None:
    config = load_config(tiny_config, ["rollout.max_staleness=1"])
    with pytest.raises(ConfigError, match="no resume of it is exact"):
        shortened(config, STEPS)


def change_metric(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[2]["policy/grad_norm"] *= 1 + 1e-15
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def repeat_line(run: Path) -> None:
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text + text.splitlines()[-1] + "\n")


def swap_rollouts(run: Path) -> None:
    shutil.copy(run / "rollouts/step_000002.parquet", run / "rollouts/step_000003.parquet")


def damage_weights(run: Path) -> None:
    file = max(run.glob("checkpoints/rollouts_*/model.safetensors"))
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(bytes(data))


def change_evaluation(run: Path) -> None:
    file = run / "evaluations/rollouts_00000016.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "beta": 0.5}))


def leave_half_a_file(run: Path) -> None:
    (run / ".partial-config.yaml").touch()


@pytest.mark.parametrize(
    ("change", "what", "said"),
    [
        (change_metric, "metrics", "line 3, step 3, policy/grad_norm"),
        (repeat_line, "metrics", "line 5, step 4"),
        (swap_rollouts, "rollouts", "step_000003.parquet, token_ids"),
        (damage_weights, "weights", "rollouts_00000032/"),
        (change_evaluation, "evaluation", "rollouts_00000016.json, beta"),
        (leave_half_a_file, "files", ".partial-config.yaml"),
    ],
)
def test_a_difference_is_seen(
    undisturbed: Undisturbed, tmp_path: Path, change: Callable[[Path], None], what: str, said: str
) -> None:
    other = tmp_path / "other"
    shutil.copytree(undisturbed.run.path, other)
    change(other)
    different = {c.what: c.difference for c in compare(undisturbed.run, RunDir.open(other)) if c.difference}
    assert list(different) == [what] and different[what].startswith(said)


def test_moments_lie_ahead_of_each_other() -> None:
    names = ["-1 os.mkdir weights", "0 os.mkdir run/checkpoints/.partial-rollouts_00000008/training"]
    names += [
        "0 open run/checkpoints/.partial-rollouts_00000008/config.json",
        "0 os.rename run/checkpoints/rollouts_00000008",
    ]
    operations = [Operation(name, float(second)) for second, name in enumerate(names)]
    moments = choose_moments(operations, 20, seed=1)
    assert [planned.index for planned in moments] == sorted({planned.index for planned in moments})
    between = Kind("", "between", r" run/checkpoints/\.partial-")
    assert [planned.moment.wait_s for planned in candidates(operations, between)] == [0.5]
