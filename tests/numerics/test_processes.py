"""Two learner processes are one: the same log-probs, statistics, metrics and weights, whatever the split leaves to each."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_cases import make_groups, make_learner

from grpo_lab.learner.collate import collate
from grpo_lab.learner.learner import Learner
from grpo_lab.learner.ranks import follow
from grpo_lab.learner.sharding import whole
from grpo_lab.objective.advantages import batch_advantages

CASES: dict[str, dict[str, Any]] = {
    "uneven": {},  # three groups on two ranks
    "idle": {"mini_batches": 3},  # one group a mini-batch: a rank has nothing to do
    "padded": {"share_prompt": False, "microbatch_tokens": 40},
    "bfloat16": {"dtype": "bfloat16"},
    "adapter": {"lora_rank": 4},
    "correction": {"objective": {"correction": "m2po"}, "passes": 2},  # looks at the whole batch
    "sharded": {"shard": True},
    "sharded idle": {"shard": True, "mini_batches": 3},
    "sharded padded": {"shard": True, "share_prompt": False, "microbatch_tokens": 40},
    "sharded small": {
        "shard": True,
        "microbatch_tokens": 20,
        "objective": {"kl": "loss_k3"},
    },  # one forward, idle ranks
    "sharded bfloat16": {"shard": True, "dtype": "bfloat16"},
    "sharded float16": {"shard": True, "dtype": "float16"},
    "sharded adapter": {"shard": True, "lora_rank": 4, "dtype": "bfloat16"},
}


def results(learner: Learner) -> dict[str, Any]:
    """Three updates, and everything that came out; `gradient` is what waits for the first, where one forward gives both."""
    tokens = collate(make_groups())
    statistics = learner.statistics(tokens)
    batch = learner.prepare(tokens)
    gradients = [] if learner.policy.is_sharded else [m.grad for m in learner.masters.masters.values()]
    waiting = [gradient.flatten().clone() for gradient in gradients if gradient is not None]
    advantages = batch_advantages(batch, learner.gradient.objective)
    reports = [learner.update(batch, advantages, step) for step in range(3)]
    metrics = {f"{i}/{name}": value for i, report in enumerate(reports) for name, value in report.metrics.items()}
    return {
        "old": batch.old_logprobs,
        "ref": batch.ref_logprobs,
        "kl": statistics.full_kl,
        "trained": reports[-1].trained_logprobs,
        "metrics": metrics,
        "gradient": torch.cat(waiting) if waiting else torch.zeros(1),
        "saved": learner.weights(),
        "state": learner.state().tensors,
    }


def held(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: whole(p.detach()) for name, p in learner.policy.trainable().items()}


def run_rank(model: Path, output: str) -> None:
    for name, case in CASES.items():
        learner = make_learner(model, **case)
        assert learner.ranks.count == 2
        if learner.ranks.is_main:
            result = results(learner)
            learner.ranks.end()
        else:
            follow(learner)
            result = {}
        result["weights"] = held(learner)
        torch.save(result, f"{output}.{name}.{learner.ranks.index}")


@pytest.fixture(scope="module")
def two_processes(tiny_model: Path, module_path: Path) -> str:
    output = str(module_path / "result")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
    folders = f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": folders}
    done = subprocess.run(
        [*launch, str(tiny_model), output], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return output


@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(two_processes: str, tiny_model: Path, name: str) -> None:
    rank_0, rank_1 = (torch.load(f"{two_processes}.{name}.{rank}", weights_only=True) for rank in range(2))
    assert all(torch.equal(rank_0["weights"][key], rank_1["weights"][key]) for key in rank_0["weights"])
    alone = results(make_learner(tiny_model, **CASES[name]))
    low = CASES[name].get("dtype", "float32") != "float32"
    tolerance = 1e-2 if low else 1e-5
    for key in ("old", "ref", "kl", "trained"):
        assert torch.allclose(rank_0[key], alone[key], atol=tolerance), key
    gap = (rank_0["gradient"] - alone["gradient"]).norm()
    assert CASES[name].get("shard") or gap <= (1e-2 if low else 1e-6) * alone["gradient"].norm()
    one_update = CASES[name].get("passes", 1) * CASES[name].get("mini_batches", 1) == 1
    assert bool(alone["gradient"].any()) == one_update
    for key, value in alone["metrics"].items():
        if "/perf/" in key:  # which rows run together does depend on the split
            continue
        assert rank_0["metrics"][key] == pytest.approx(value, rel=10 * tolerance, abs=tolerance), key
    start = make_learner(tiny_model, **CASES[name]).weights()
    assert set(rank_0["state"]) == set(alone["state"]) and set(rank_0["saved"]) == set(alone["saved"])
    for key, expected in alone["saved"].items():
        assert rank_0["saved"][key].dtype == expected.dtype
        gap = (rank_0["saved"][key].float() - expected.float()).abs()
        moved = (expected.float() - start[key].float()).norm()
        if low:  # casts round the other way, and Adam takes the sign of gradients that are rounding
            assert gap.norm() <= 0.2 * moved + 2**-9 * expected.float().norm(), key
        else:  # Adam divides by the gradient's size: where that is rounding, so is the step
            assert gap.mean() < 1e-7 and gap.max() < 1e-4, key
    assert rank_0["metrics"]["0/policy/grad_norm"] > 0


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), sys.argv[2])
