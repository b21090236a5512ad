"""The Slurm script: what it asks for, how it quotes, what is refused. tests/integration runs one to its end."""

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_lab.cli.cluster import slurm
from grpo_lab.cluster.slurm import Layout, submit
from grpo_lab.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = REPOSITORY / "configs/gsm8k_qwen0.5b.yaml"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The script of a command, once bash has found no fault in it."""
    monkeypatch.chdir(tmp_path)

    def write(**options: object) -> str:
        defaults = {"output": tmp_path / "job.sbatch", "time": "24:00:00", "nodes": "1+2", "gpus": 8, "grace": 300}
        unset = dict.fromkeys(("method", "recipe", "beta", "seed", "name", "set_", "processes", "workers", "sbatch"))
        slurm(CONFIG, **{**unset, "setup": "", "submit": False, **defaults, **options})  # type: ignore[arg-type]
        subprocess.run(["bash", "-n", tmp_path / "job.sbatch"], check=True)
        return (tmp_path / "job.sbatch").read_text()

    return write


def arguments(script: str) -> list[list[str]]:
    lines = [line.strip() for line in script.splitlines() if line.strip().startswith("ARGUMENTS=(")]
    return [shlex.split(line.removeprefix("ARGUMENTS=(").removesuffix(")")) for line in lines]


def test_nodes_gpus_and_roles(written: Callable[..., str]) -> None:
    script = written(method=["dapo"], beta=[0.05], sbatch=["--account=mine"])
    for line in (
        "--nodes=3",
        "--gpus-per-node=8",
        "--time=24:00:00",
        "--signal=B:USR1@300",
        "--requeue",
        "--account=mine",
    ):
        assert f"#SBATCH {line}\n" in script
    assert "--count 8" in script and "-ge 16 ]" in script and "--processes 8 &" in script
    assert '"${NODES[@]:1}"' in script and '"${NODES[@]:0:1}"' in script and "--rendezvous" not in script


def test_several_learner_nodes_meet(written: Callable[..., str]) -> None:
    script = written(nodes="2+1", processes=4, workers=3)
    assert '--processes 4 --nodes 2 --rendezvous "${NODES[0]}:' in script and "--count 3" in script


def test_without_rollout_nodes_nothing_is_served(written: Callable[..., str]) -> None:
    script = written(nodes="1", gpus=1)
    assert "grpo-lab worker" not in script and "rollout.urls" not in script


def test_a_grid_is_an_array_of_named_runs(written: Callable[..., str]) -> None:
    script = written(method=["dapo", "sao"], beta=[0.05, 0.2], name="grid")
    assert "#SBATCH --array=0-3\n" in script and script.count("    RUN=runs/grid/") == 4
    sets = [dict(word.split("=", 1) for word in words if "=" in word) for words in arguments(script)]
    assert {(each["method"], each["beta"]) for each in sets} == {
        (f'"{method}"', beta) for method in ("dapo", "sao") for beta in ("0.05", "0.2")
    }


def test_awkward_values_survive_the_shell(written: Callable[..., str]) -> None:
    hostile = "data.path=/a b/$(touch hacked)'\"`x`"
    script = written(set_=[hostile], name="run")
    assert hostile in arguments(script)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": "0+2"}, "--nodes '0\\+2': write L or L\\+R"),
        ({"nodes": "1+x"}, "--nodes '1\\+x'"),
        ({"name": "a/b"}, "--name 'a/b': letters"),
        ({"name": "$(reboot)"}, "--name"),
        ({"time": "tomorrow"}, "--time 'tomorrow': write minutes"),
        ({"sbatch": ["account=mine"]}, "--sbatch 'account=mine': write an option"),
        ({"workers": 9}, "--workers 9 .* need more than --gpus 8"),
        ({"processes": 9}, "--processes 9"),
        ({"nodes": "1"}, "nobody to sample .*--nodes 1\\+1"),
        ({"nodes": "1", "processes": 8}, "8 learner processes and rollout.engine=vllm"),
        ({"time": "00:04:00"}, "--grace 300 .* more than half of --time 00:04:00"),
        ({"beta": [0.02, 0.2]}, "several runs need a name"),
        ({"method": ["dapoo"]}, "dapoo"),
    ],
)
def test_refusals_write_nothing(
    written: Callable[..., str], tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        written(**options)
    assert not list(tmp_path.iterdir())


def test_submit_needs_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no sbatch on this machine"):
        submit(tmp_path / "job.sbatch")


def test_own_workers_leave_their_gpus_alone() -> None:
    assert Layout.of("1", 8, None, None, rollout_workers=2, worker_gpus=2).processes == 4
    assert Layout.of("1+1", 8, None, None, rollout_workers=0, worker_gpus=4).workers == 2
    assert Layout.of("1+2", 0, 2, None, rollout_workers=0, worker_gpus=1) == Layout(1, 2, 0, 2, 1)


def test_the_shipped_example_is_what_the_command_writes(written: Callable[..., str]) -> None:
    shipped = (REPOSITORY / "scripts/slurm/train.sbatch").read_text()
    script = written(method=["dapo"], beta=[0.05], name="dapo", setup="source .venv/bin/activate")
    assert script.replace(str(CONFIG), "configs/gsm8k_qwen0.5b.yaml") == shipped
