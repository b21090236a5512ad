"""Two processes with half of the groups each leave the gradient that one process has."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from learner_cases import make_groups, make_learner

from grpo_lab.learner.collate import collate

RANK = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
from learner_cases import make_groups, make_learner
from grpo_lab.learner.collate import collate

learner = make_learner(Path(sys.argv[1]))
rank, ranks = learner._accelerator.process_index, learner._accelerator.num_processes
assert ranks == 2
mine = [[0, 2], [1]][rank]
groups = make_groups()
batch = learner.annotate(collate([groups[i] for i in mine], mine))
advantages = torch.linspace(-1, 1, 12).view(3, 4)[mine].flatten()
learner.gradient(batch, advantages, torch.arange(4 * len(mine)), batch.old_logprobs.clone(), 0)
torch.save({n: p.grad for n, p in learner.policy.trainable().items()}, f"{sys.argv[3]}.{rank}")
"""


def test_gradient_of_two_processes(tiny_model: Path, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    arguments = [str(tiny_model), str(Path(__file__).parents[1]), str(tmp_path / "grad")]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *arguments], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    learner = make_learner(tiny_model)
    batch = learner.annotate(collate(make_groups()))
    learner.gradient(batch, torch.linspace(-1, 1, 12), torch.arange(12), batch.old_logprobs.clone(), 0)
    for rank in range(2):
        got = torch.load(tmp_path / f"grad.{rank}", weights_only=True)
        for name, parameter in learner.policy.trainable().items():
            assert torch.allclose(got[name], parameter.grad, atol=1e-7, rtol=1e-4), name  # type: ignore[arg-type]
