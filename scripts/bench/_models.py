"""Models, batches, learners and a plain reference computation for the benchmarks."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _common import seconds

from grpo_lab.config import Config, DataConfig, LearnerConfig, ModelConfig, RolloutConfig, cache_folder

if TYPE_CHECKING:
    import torch

    from grpo_lab.learner.learner import Learner
    from grpo_lab.objective.axes import Objective
    from grpo_lab.types import RolloutGroup, TokenBatch

DEMO_MODEL = cache_folder() / "SmolLM2-135M-Instruct"


def random_model(
    folder: Path,
    vocabulary: int,
    layers: int = 2,
    hidden: int = 128,
    intermediate: int = 256,
    kv_heads: int = 1,
    tokenizer: Path | None = None,
) -> Path:
    """A random Llama in float32 with tied embeddings, written without torch; `tokenizer`: a model folder that lends its own."""
    import numpy
    from safetensors.numpy import save_file

    rng, heads, kv = numpy.random.default_rng(0), hidden // 64, 64 * kv_heads
    shapes = {"model.embed_tokens": (vocabulary, hidden), "model.norm": (hidden,)}
    for layer in (f"model.layers.{index}" for index in range(layers)):
        shapes |= {f"{layer}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"{layer}.self_attn.{name}_proj": (hidden, hidden) for name in "qo"}
        shapes |= {f"{layer}.self_attn.{name}_proj": (kv, hidden) for name in "kv"}
        shapes |= {f"{layer}.mlp.{name}_proj": (intermediate, hidden) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (hidden, intermediate)}
    one = numpy.float32(0.02)
    tensors = {
        f"{name}.weight": numpy.ones(shape, "f4") if len(shape) == 1 else one * rng.standard_normal(shape, "f4")
        for name, shape in shapes.items()
    }
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "vocab_size": vocabulary,
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers, "head_dim": 64,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 8192, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    for file in [*tokenizer.glob("tokenizer*"), *tokenizer.glob("*.jinja")] if tokenizer else []:
        shutil.copy(file, folder)
    return folder


def synthetic_groups(
    prompts: int, size: int, seed: int = 0, prompt: int = 130, completion: int = 118, vary: bool = True
) -> list[RolloutGroup]:
    """Random ids in GSM8K's lengths: normal around `prompt` (sd 30 %), gamma around `completion` (sd 45 %)."""
    rng = random.Random(seed)

    def length(mean: int, gamma: bool) -> int:
        drawn = rng.gammavariate(5, mean / 5) if gamma else rng.gauss(mean, 0.3 * mean)
        return min(max(round(drawn), 4), 3 * mean) if vary else mean

    ids = lambda count: [rng.randrange(5, 4000) for _ in range(count)]  # noqa: E731
    return [
        _group(index, ids(length(prompt, False)), [ids(length(completion, True)) for _ in range(size)], rng)
        for index in range(prompts)
    ]


def gsm8k_groups(path: Path, model: Path, prompts: int, size: int, seed: int = 0) -> list[RolloutGroup]:
    """Real questions under the chat template; their completions are the answers of `size` other rows: real lengths."""
    from grpo_lab.hub import load_tokenizer
    from grpo_lab.rollout.collect import render_prompt
    from grpo_lab.tasks import load_task, problems_for_step

    tokenizer, rng = load_tokenizer(model), random.Random(seed)
    task = load_task(DataConfig(task="gsm8k", path=str(path), train_problems=None, heldout_problems=1))
    file = path / "train.jsonl" if path.is_dir() else path
    answers = [json.loads(line)["answer"] for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [
        _group(
            index,
            render_prompt(tokenizer, problem, 4096),
            [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in rng.sample(answers, size)],
            rng,
        )
        for index, problem in enumerate(problems_for_step(task.train, seed, 0, prompts))
    ]


def _group(index: int, prompt: Sequence[int], texts: Sequence[Sequence[int]], rng: random.Random) -> RolloutGroup:
    from grpo_lab.types import Completion, Grade, Problem, RolloutGroup

    completions = [Completion(tuple(ids), (-2.0,) * len(ids), "", "stop", 0) for ids in texts]
    grades = [Grade(float(rng.random() < 0.3), "wrong") for _ in texts]
    return RolloutGroup(Problem(str(index), (), ""), tuple(prompt), tuple(completions), tuple(grades))


def make_learner(
    model: Path, prompts: int, size: int, dtype: str, budget: int, share_prompt: bool
) -> tuple[Learner, Objective]:
    """A dapo learner of one update a step; the rate is so small that the model stays where it is."""
    from grpo_lab.learner.learner import Learner
    from grpo_lab.objective.axes import resolve

    learner = {"learning_rate": 1e-9, "mini_batches": 1, "microbatch_tokens": budget, "share_prompt": share_prompt}
    config = Config(
        method="dapo",
        prompts_per_step=prompts,
        group_size=size,
        total_rollouts=1_000 * prompts * size,
        checkpoint_every=prompts * size,
        model=ModelConfig(name=str(model), dtype=dtype),  # type: ignore[arg-type]
        rollout=RolloutConfig(max_new_tokens=512),
        learner=LearnerConfig(**learner),  # type: ignore[arg-type]
    )
    return Learner(config, resolve(config), model), resolve(config)


def step_times(learner: Learner, objective: Objective, tokens: TokenBatch, once: bool = True) -> dict[str, float]:
    """One step of a learner: seconds of the log-probs and of `update` (advantages included), and the gradient's norm.

    `once` takes the old log-probs from the update's own forward, whose time counts as the log-probs' then.
    """
    from grpo_lab.objective.advantages import batch_advantages

    done: dict[str, Any] = {}

    def update() -> None:
        done["report"] = learner.update(done["batch"], batch_advantages(done["batch"], objective), 0)

    measure = learner.prepare if once else learner.annotate
    annotate = seconds(lambda: done.update(batch=measure(tokens)))
    spent = seconds(update)
    return {"annotate": annotate, "update": spent, "grad_norm": done["report"].metrics["policy/grad_norm"]}


def plain_logprobs(model: Any, tokens: TokenBatch, lean: bool) -> torch.Tensor:
    """[n, C] as most loops compute them: padded rows, full logits in fp32, log-softmax, gather.

    `lean` asks the model for the logits from the shortest prompt's end on, else for all of them.
    """
    import torch

    start = int(tokens.prompt_lengths.min()) - 1 if lean else 0
    device = model.device
    inputs, attention = tokens.input_ids.to(device), tokens.attention_mask.to(device)
    logits = model(inputs, attention_mask=attention, use_cache=False, logits_to_keep=inputs.shape[1] - start).logits
    mask = tokens.completion_mask.to(device).bool()
    where = (tokens.predict_from.to(device) - start)[mask]
    targets = torch.zeros(logits.shape[:2], dtype=torch.long, device=device)
    targets[mask.nonzero()[:, 0], where] = tokens.completion_ids.to(device)[mask]
    rows = torch.log_softmax(logits.float(), dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return rows.gather(1, (tokens.predict_from.to(device) - start).clamp(min=0)) * mask
