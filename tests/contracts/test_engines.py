"""What holds for every file of grpo_lab/rollout/engines, on a tiny model. A new file is found by itself.

vLLM runs in a process of its own (one engine a process); the checks are the same for all.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_lab import plugins

NAMES = [*plugins.names("grpo_lab.rollout.engines"), "configs.examples.own_engine:EngineImpl"]

PROBE = """
import json, sys
from pathlib import Path
from grpo_lab.config import ModelConfig, RolloutConfig
from grpo_lab.rollout.engines import EngineSpec, build_engine
from grpo_lab.types import GenerationRequest, Sampling

name, folder = sys.argv[1], Path(sys.argv[2])
rollout = RolloutConfig(engine=name, max_new_tokens=12, max_prompt_tokens=32)
engine = build_engine(EngineSpec(folder, ModelConfig(name=str(folder), dtype="float32"), rollout))
requests = [GenerationRequest(tuple(range(10, 20 + i)), 1000 + i) for i in range(6)]
twins = [GenerationRequest(requests[0].prompt_ids, seed) for seed in (1000, 1000, 1001, 1002)]
sampling = Sampling(12, stop_token_ids=(2,))
show = lambda cs: [[list(c.token_ids), list(c.logprobs), c.finish_reason, c.weight_version] for c in cs]
result = {"first": show(engine.generate(requests, sampling)), "again": show(engine.generate(requests, sampling)),
          "twins": show(engine.generate(twins, sampling))}
engine.load_weights(folder, 3)
result["pushed"] = show(engine.generate(requests, sampling))
engine.close(); engine.close()
print("RESULT" + json.dumps(result))
"""


def probe(name: str, model: Path) -> dict[str, list[list[object]]]:
    command = [sys.executable, "-c", PROBE, name, str(model)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, run.stderr[-2000:]
    return json.loads(lines[0].removeprefix("RESULT"))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.vllm) if "vllm" in n else n for n in NAMES])
def test_engine(name: str, tiny_model: Path) -> None:
    got = probe(name, tiny_model)
    for ids, logprobs, reason, version in got["first"]:
        assert 1 <= len(ids) <= 12 and len(ids) == len(logprobs)  # type: ignore[arg-type]
        assert all(value <= 1e-6 for value in logprobs)  # type: ignore[attr-defined]
        assert reason == ("stop" if ids[-1] == 2 else "length") and version == 0  # type: ignore[index]
    assert got["again"] == got["first"], "the same requests give the same completions"
    ids = [completion[0] for completion in got["twins"]]
    assert ids[0] == ids[1] and ids[0] != ids[2] != ids[3], "the seed decides, and nothing else"
    assert [completion[3] for completion in got["pushed"]] == [3] * 6
    assert [completion[0] for completion in got["pushed"]] == [completion[0] for completion in got["first"]]


def test_all_engines_are_found() -> None:
    assert {"vllm", "hf", "scripted"} <= set(NAMES)
