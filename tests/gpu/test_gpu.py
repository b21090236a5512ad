"""On a CUDA device, without vLLM, a hub or data: the learner against the CPU's, every method, prompts shared or not."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from learner_cases import make_groups, make_learner  # noqa: E402

from grpo_lab.learner.collate import collate  # noqa: E402
from grpo_lab.learner.learner import Learner  # noqa: E402
from grpo_lab.objective.advantages import batch_advantages  # noqa: E402

pytestmark = pytest.mark.gpu
METHODS = ("ppo", "grpo", "dapo", "sao", "sapo", "gspo")


@pytest.fixture(scope="module")
def model(module_path: Path) -> Path:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts/bench"))
    from _models import random_model

    return random_model(module_path / "random", 4096)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Inside, learners are made on the CPU."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield patch


def gradient(learner: Learner) -> torch.Tensor:
    batch = learner.annotate(collate(make_groups()))
    return learner.flat_gradient(batch, torch.linspace(-1, 1, 12), batch.old_logprobs.clone())[1]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_three_updates(model: Path, method: str, dtype: str) -> None:
    learner = make_learner(model, method, dtype=dtype, mini_batches=3)
    assert next(learner.policy.model.parameters()).device.type == "cuda"
    batch = learner.prepare(collate(make_groups()))
    report = learner.update(batch, batch_advantages(batch, learner.gradient.objective), 0)
    assert 0 < report.metrics["policy/grad_norm"] < float("inf")
    moved = learner.annotate(batch.tokens).old_logprobs - batch.old_logprobs
    assert torch.isfinite(moved).all() and moved.abs().max() > 0


def test_gpu_and_cpu_agree_in_float32(model: Path, on_cpu: pytest.MonkeyPatch) -> None:
    cpu = make_learner(model)
    wanted, scores = gradient(cpu), cpu.annotate(collate(make_groups())).old_logprobs
    on_cpu.undo()
    gpu = make_learner(model)
    assert torch.allclose(gpu.annotate(collate(make_groups())).old_logprobs, scores, atol=1e-3)
    assert (gradient(gpu) - wanted).norm() < 1e-3 * wanted.norm()


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-4), ("bfloat16", 5e-2)])
def test_shared_prompts_change_nothing(model: Path, dtype: str, tolerance: float) -> None:
    shared, padded = (gradient(make_learner(model, dtype=dtype, share_prompt=share)) for share in (True, False))
    assert (shared - padded).norm() < tolerance * padded.norm()
