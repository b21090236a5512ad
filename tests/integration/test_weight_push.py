"""Every push proven on real vLLM: after several different pushes the sampler's log-probs are the learner's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

PROBE = """
import json, sys, tempfile
from pathlib import Path
import torch
from grpo_lab.config import Config, ModelConfig, RolloutConfig
from grpo_lab.learner.collate import collate
from grpo_lab.learner.learner import Learner
from grpo_lab.learner.weights import export_weights
from grpo_lab.objective.axes import resolve
from grpo_lab.rollout.engines import EngineSpec, build_engine
from grpo_lab.types import GenerationRequest, Grade, Problem, RolloutGroup, Sampling

folder, dtype, rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
config = Config(model=ModelConfig(name=str(folder), dtype=dtype, lora_rank=rank),
                rollout=RolloutConfig(max_new_tokens=24, max_prompt_tokens=32))
engine = build_engine(EngineSpec(folder, config.model, config.rollout))
learner = Learner(config, resolve(config), folder)
differences, kls = [], []
for push in range(4):
    with torch.no_grad():
        for index, (name, parameter) in enumerate(learner.policy.trainable().items()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * push + index))
            parameter.add_(noise.to(parameter.dtype) * (0.02 if rank else 0.003))
    with tempfile.TemporaryDirectory() as weights:
        export_weights(learner, Path(weights))
        engine.load_weights(Path(weights), push + 1)
        prompt = tuple(range(30, 50))
        completions = engine.generate([GenerationRequest(prompt, s) for s in range(8)], Sampling(24, stop_token_ids=(2,)))
    groups = [RolloutGroup(Problem("p", (), ""), prompt, tuple(completions), tuple(Grade(0.0, "wrong") for _ in completions))]
    batch = learner.annotate(collate(groups))
    assert {c.weight_version for c in completions} == {push + 1}
    mask = batch.tokens.completion_mask
    differences.append(float(((batch.old_logprobs - batch.tokens.rollout_logprobs) * mask).abs().max()))
    kls.append(float(((batch.old_logprobs - batch.ref_logprobs) * mask).abs().max()))
print("RESULT" + json.dumps([differences, kls]))
"""


@pytest.mark.parametrize("model, dtype, rank, limit", [
    ("tiny_model", "float32", 0, 1e-5),
    ("untied_model", "float32", 0, 1e-5),
    ("tiny_model", "float32", 8, 1e-5),
    pytest.param("untied_model", "bfloat16", 0, 0.1, marks=pytest.mark.slow),
    pytest.param("demo_model", "float32", 0, 1e-3, marks=pytest.mark.slow),
])  # fmt: skip
def test_sampler_follows_every_push(
    request: pytest.FixtureRequest, model: str, dtype: str, rank: int, limit: float
) -> None:
    """`limit` is on the largest difference of any token's log-prob: rounding only, and not growing push by push."""
    folder: Path = request.getfixturevalue(model)
    command = [sys.executable, "-c", PROBE, str(folder), dtype, str(rank)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, run.stderr[-2000:]
    differences, moved = json.loads(lines[0].removeprefix("RESULT"))
    assert max(differences) < limit, differences
    assert moved[0] > 100 * limit or dtype == "bfloat16", "each push really changed the policy"
    assert moved[-1] > moved[0]
