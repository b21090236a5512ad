"""vLLM on a CUDA device: asleep between calls beside the learner, and as a worker on a GPU of its own."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_rollout_chain(grpo_lab: Run, tiny_config: Path, workers: int) -> None:
    """`grpo-lab doctor` passes in fp32 and bf16: the same weights on both sides, through a push, sleep and wake."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm")
    if torch.cuda.device_count() < 1 + workers:
        pytest.skip(f"{1 + workers} CUDA devices needed")
    done = grpo_lab(
        "doctor", "--config", tiny_config, "--set", "rollout.engine=vllm", "--set", f"rollout.workers={workers}"
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_engine_sleeps_while_the_learner_trains(tiny_model: Path) -> None:
    """Between calls the engine holds no cache and no weights on the device: most of its share of memory is free."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from grpo_lab.config import ModelConfig, RolloutConfig
    from grpo_lab.rollout.engines import EngineSpec, build_engine

    settings = RolloutConfig(gpu_memory_utilization=0.4, max_new_tokens=16, max_prompt_tokens=32)
    before, total = torch.cuda.mem_get_info()
    engine = build_engine(EngineSpec(tiny_model, ModelConfig(name=str(tiny_model), dtype="bfloat16"), settings))
    try:
        assert before - torch.cuda.mem_get_info()[0] < 0.1 * total
    finally:
        engine.close()
