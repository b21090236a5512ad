"""Small cases for tests of the learner: groups of random tokens, and a learner of three such groups."""

from pathlib import Path

import torch

from grpo_lab.config import Config, LearnerConfig, ModelConfig, ObjectiveConfig, RolloutConfig
from grpo_lab.learner.learner import Learner
from grpo_lab.objective.axes import resolve
from grpo_lab.types import Completion, Grade, Problem, RolloutGroup


def make_groups(seed: int = 0, groups: int = 3, size: int = 4) -> list[RolloutGroup]:
    """Random token ids of different lengths, one of them a single token."""
    generator = torch.Generator().manual_seed(seed)
    ids = lambda n: tuple(torch.randint(5, 4000, (n,), generator=generator).tolist())  # noqa: E731
    return [
        RolloutGroup(
            Problem(str(g), (), "1"),
            ids(5 + 3 * g),
            tuple(
                Completion(ids(n), (-10.9,) * n, "", "length" if n > 7 else "stop", 0)
                for n in range(1 + g, 1 + g + 2 * size, 2)
            ),
            tuple(Grade(float(i % 2), "correct") for i in range(size)),
        )
        for g in range(groups)
    ]


def make_learner(
    model: Path, method: str = "grpo", objective: dict[str, object] | None = None, **learner: object
) -> Learner:
    config = Config(
        method=method,
        objective=ObjectiveConfig(**(objective or {})),  # type: ignore[arg-type]
        prompts_per_step=3,
        total_rollouts=12,
        checkpoint_every=12,
        group_size=4,
        model=ModelConfig(
            name=str(model),
            dtype=learner.pop("dtype", "float32"),
            lora_rank=learner.pop("lora_rank", 0),  # type: ignore[arg-type]
            gradient_checkpointing=learner.pop("gradient_checkpointing", False),  # type: ignore[arg-type]
        ),
        rollout=RolloutConfig(max_new_tokens=16),
        learner=LearnerConfig(**{"learning_rate": 1e-3, "mini_batches": 1, **learner}),  # type: ignore[arg-type]
    )
    return Learner(config, resolve(config), model)
