"""The memory estimate against a real learner: every byte of the weights and their state, and about those of a forward."""

from pathlib import Path

import pytest
import torch
from learner_cases import make_groups, make_learner
from torch import Tensor

from grpo_lab.config import Config, LearnerConfig, ModelConfig, RolloutConfig
from grpo_lab.learner.collate import collate
from grpo_lab.learner.learner import Learner
from grpo_lab.learner.logprobs import completion_logprobs
from grpo_lab.learner.model import PolicyModel
from grpo_lab.planning.memory import (
    GIB,
    FullLength,
    LearnerMemory,
    Machine,
    activation_bytes,
    full_length,
    learner_memory,
    sampler_memory,
    token_values,
)
from grpo_lab.planning.memory_lines import memory_lines
from grpo_lab.planning.model_shape import model_shape
from grpo_lab.planning.roles import Launch
from grpo_lab.types import Completion, Grade, Problem, RolloutGroup, TokenBatch


def size(*tensors: Tensor) -> int:
    """Bytes of distinct storages."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


def config_of(model: Path, dtype: str = "float32", lora_rank: int = 0, **more: object) -> Config:
    return Config(
        prompts_per_step=1,
        group_size=4,
        total_rollouts=4,
        checkpoint_every=4,
        model=ModelConfig(name=str(model), dtype=dtype, lora_rank=lora_rank),  # type: ignore[arg-type]
        rollout=RolloutConfig(max_prompt_tokens=48, max_new_tokens=32),
        learner=LearnerConfig(**{"mini_batches": 1, **more}),  # type: ignore[arg-type]
    )


def trained(model: Path, dtype: str, lora_rank: int) -> tuple[Learner, int]:
    """A learner after one update, and the bytes of its gradients before it."""
    learner = make_learner(model, dtype=dtype, lora_rank=lora_rank)
    batch = learner.annotate(collate(make_groups()))
    advantages = torch.tensor([1.0, -1.0] * 6)
    learner.gradient.of(batch, advantages, torch.arange(12), batch.old_logprobs.clone())
    masters = learner.masters.masters.values()
    gradients = size(*(m.grad for m in masters if m.grad is not None))
    learner.optimizer.step()
    return learner, gradients


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_state_is_exact(tiny_model: Path, dtype: str, lora_rank: int) -> None:
    learner, gradients = trained(tiny_model, dtype, lora_rank)
    shape = model_shape(ModelConfig(name=str(tiny_model), lora_rank=lora_rank))
    assert shape is not None
    found = learner_memory(config_of(tiny_model, dtype, lora_rank), shape)
    held, policy = learner.masters.masters.values(), learner.policy
    weights = list(policy.model.parameters())
    own = {p.data_ptr() for p in weights}
    assert found.weights == size(*weights)
    assert found.masters == size(*(m for m in held if m.data_ptr() not in own))
    assert found.reference == (0 if lora_rank else size(*policy.reference.parameters()))
    assert found.gradients == gradients
    state = learner.state().tensors
    assert found.moments == size(*(t for name, t in state.items() if name.startswith("exp_avg")))
    assert found.step_copy == sum(t.nbytes for t in learner.masters.snapshot().values())
    assert found.resident == found.weights + found.masters + found.moments + found.reference


def test_untied_head_counts(tiny_model: Path, untied_model: Path) -> None:
    tied, untied = (model_shape(ModelConfig(name=str(model))) for model in (tiny_model, untied_model))
    assert tied is not None and untied is not None
    assert untied.parameters - tied.parameters == tied.vocabulary * tied.hidden


def full_batch(prompt: int, completion: int) -> TokenBatch:
    ids = lambda n: tuple(torch.randint(5, 900, (n,)).tolist())  # noqa: E731
    texts = tuple(Completion(ids(completion), (-1.0,) * completion, "", "stop", 0) for _ in range(4))
    return collate([RolloutGroup(Problem("", (), ""), ids(prompt), texts, (Grade(0.0, "wrong"),) * 4)])


def kept_for_backward(config: Config, share_prompt: bool) -> int:
    """Bytes that autograd keeps of a real forward, weights and the output head's chunks left out."""
    folder = Path(config.model.name)
    policy = PolicyModel(folder, folder, config.model, torch.device("cpu"))
    weights = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        completion_logprobs(policy.model, full_batch(48, 32), share_prompt)
    return size(*kept.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("share_prompt", [True, False])
def test_activations_have_the_right_size(tiny_model: Path, dtype: str, share_prompt: bool) -> None:
    config = config_of(tiny_model, dtype)
    shape = model_shape(config.model)
    assert shape is not None
    about = activation_bytes(config, shape, full_length(config, share_prompt))
    assert about == pytest.approx(kept_for_backward(config, share_prompt), rel=1 / 3)


def test_gradient_checkpointing_keeps_the_inputs_of_layers_alone(tiny_model: Path) -> None:
    plain = config_of(tiny_model)
    again = plain.model_copy(update={"model": plain.model.model_copy(update={"gradient_checkpointing": True})})
    less, shape = kept_for_backward(again, False), model_shape(plain.model)
    assert shape is not None
    of_layers = shape.layers * 4 * 79 * token_values(shape) * 4
    assert kept_for_backward(plain, False) - less == pytest.approx(of_layers, rel=1 / 3)


def test_sharding_divides_what_stays(tiny_model: Path) -> None:
    shape = model_shape(ModelConfig(name=str(tiny_model)))
    assert shape is not None
    alone, both = (learner_memory(config_of(tiny_model, "bfloat16", shard=True), shape, n) for n in (1, 2))
    assert alone.weights == 2 * shape.parameters and both.weights == 0, "the masters are the sharded model"
    for name in ("masters", "moments", "gradients", "reference"):
        assert getattr(both, name) == getattr(alone, name) // 2
    assert both.gathered > 0 == alone.gathered


def test_full_length_plan(tiny_model: Path) -> None:
    """4 siblings of 48 + 31 tokens: with a budget of 120 two fit beside their prompt, one without."""
    config = config_of(tiny_model, microbatch_tokens=120)
    assert full_length(config, True) == FullLength(2, 2, 1, 48 + 2 * 31)
    assert full_length(config, False) == FullLength(4, 1, 1, 79)
    assert full_length(config_of(tiny_model), True) == FullLength(1, 4, 1, 48 + 4 * 31)


def test_lines_add_up_and_warn(tiny_model: Path) -> None:
    config = config_of(tiny_model)
    shape = model_shape(config.model)
    assert shape is not None
    found = learner_memory(config, shape)
    assert found.peak == found.resident + found.gradients + found.activations + found.logits
    fits = memory_lines(config, shape, Machine("GPU", 80 * GIB), Launch(()))
    assert fits[0].startswith("memory     learner GPU: weights ") and not any("warning" in line for line in fits)
    tight = "\n".join(memory_lines(config, shape, Machine("GPU", found.peak // 2), Launch(())))
    assert "warning    the learner needs about" in tight and "model.lora_rank=16" in tight
    assert "vLLM will refuse to start" in "\n".join(memory_lines(config, shape, Machine("GPU", 2**20), Launch(())))
    assert "warning    this run needs" in "\n".join(memory_lines(config, shape, Machine("RAM", GIB), Launch(())))


def test_a_token_of_the_cache(tiny_model: Path) -> None:
    """2 layers x keys and values x 1 head of 64 numbers x 2 bytes."""
    shape = model_shape(ModelConfig(name=str(tiny_model)))
    assert shape is not None
    found = sampler_memory(config_of(tiny_model, "bfloat16"), shape, Machine("GPU", 10 * GIB))
    assert found.token == 2 * 2 * 64 * 2
    assert found.total == pytest.approx(0.4 * 10 * GIB, abs=1)


def test_a_model_that_is_not_here_is_said() -> None:
    shape = model_shape(ModelConfig(name="nobody/no-such-model"))
    assert shape is None
    assert memory_lines(Config(), shape, Machine("GPU", GIB), Launch(()))[0].startswith(
        "memory     unknown: model not here"
    )


def test_the_larger_of_step_and_backward_counts() -> None:
    some = dict.fromkeys(LearnerMemory.__dataclass_fields__, 1)
    assert LearnerMemory(**some).peak == 4 + 1 + 4
    assert LearnerMemory(**{**some, "step_copy": 10}).peak == 4 + 1 + 10
