"""Every shipped config loads, resolves and says what it is documented to say."""

from pathlib import Path

import pytest

from grpo_lab.config import Config
from grpo_lab.config.file import load_config
from grpo_lab.methods import METHODS
from grpo_lab.objective.axes import resolve

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    "path", sorted([*CONFIGS.glob("*.yaml"), *CONFIGS.glob("examples/*.yaml")]), ids=lambda p: p.name
)
def test_loads_with_every_method(path: Path) -> None:
    for method in METHODS:
        for recipe in ("free_energy", "paper"):
            assert resolve(load_config(path, [], {"method": method, "recipe": recipe})).beta > 0


def test_the_seed_experiment_is_the_default() -> None:
    """Qwen2.5-0.5B-Instruct on GSM8K: 262,144 rollouts in groups of 32, 6,500 / 500 problems, a checkpoint every 32,768."""
    config = load_config(CONFIGS / "gsm8k_qwen0.5b.yaml")
    assert config == Config(method=config.method)
    assert (config.model.name, config.data.task) == ("Qwen/Qwen2.5-0.5B-Instruct", "gsm8k")
    assert (config.data.train_problems, config.data.heldout_problems) == (6500, 500)
    assert (config.total_rollouts, config.group_size, config.checkpoint_every) == (262_144, 32, 32_768)
    assert config.total_rollouts // config.group_size == 8192
    assert config.total_rollouts // config.checkpoint_every == 8
    assert config.total_rollouts / config.group_size / config.data.train_problems == pytest.approx(1.2603076923)
