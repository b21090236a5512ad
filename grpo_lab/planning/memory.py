"""What a run takes of a machine's memory: exact bytes of the weights and their training state, about those of a forward."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from grpo_lab.config import Config
from grpo_lab.environment.cgroups import memory_limit
from grpo_lab.learner.logprobs import CHUNK_LOGITS
from grpo_lab.learner.packing import count_tokens, plan_microbatches
from grpo_lab.planning.model_shape import ModelShape
from grpo_lab.rollout.vllm_options import MAX_SEQUENCES
from grpo_lab.types import TokenBatch

GIB = 2**30
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MASTER = 4  # bytes of an fp32 number: masters, their gradients and both moments


@dataclass(frozen=True)
class Machine:
    """Where the run would be: its kind of memory, "GPU" or "RAM", and the bytes of one GPU, or of this container."""

    kind: str
    total: int


@dataclass(frozen=True)
class FullLength:
    """A process's part of a mini-batch whose sequences all have full length, as the learner packs it into micro-batches.

    `sequences`, `prompts` and `tokens` (as run) are those of the largest micro-batch, `count` is how many there are.
    """

    count: int
    sequences: int
    prompts: int
    tokens: int


@dataclass(frozen=True)
class LearnerMemory:
    """Bytes on one learner process's device. `casts`: a micro-batch's gradients before they are added to the fp32 ones.

    `step_copy`: the masters before an optimizer step; it and what a forward holds are never there together.
    """

    weights: int
    reference: int
    masters: int
    moments: int
    gradients: int
    casts: int
    step_copy: int
    gathered: int
    activations: int
    logits: int

    @property
    def resident(self) -> int:
        """What stays between two steps, while completions are sampled."""
        return self.weights + self.reference + self.masters + self.moments

    @property
    def peak(self) -> int:
        backward = self.casts + self.gathered + self.activations + self.logits
        return self.resident + self.gradients + max(backward, self.step_copy)


@dataclass(frozen=True)
class SamplerMemory:
    """Bytes of one of vLLM's workers (or of the engine in process) per GPU: weights, what is left for its cache, a token of it.

    vLLM's own working memory is not counted.
    """

    weights: int
    cache: int
    token: int

    @property
    def total(self) -> int:
        return self.weights + self.cache


def planned_machine(gpu_memory: int | None) -> Machine:
    """A GPU of so many GiB where they are given, else the first visible one, else the memory of the machine or container."""
    if gpu_memory:
        return Machine("GPU", gpu_memory * GIB)
    if torch.cuda.is_available():
        return Machine("GPU", int(torch.cuda.get_device_properties(0).total_memory))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine("RAM", int(min(total, memory_limit())))


def shares_prompt(config: Config, shape: ModelShape | None) -> bool:
    """Whether the learner runs a prompt once for its siblings; a model that is not here is taken to allow it."""
    allowed = shape is None or shape.is_full_attention
    return config.learner.share_prompt and allowed and not config.model.gradient_checkpointing


def full_length(config: Config, share_prompt: bool, processes: int = 1) -> FullLength:
    """How the learner packs a mini-batch when every prompt and every completion meets its limit."""
    groups = -(-config.prompts_per_step // config.learner.mini_batches // processes)
    batch = _full_batch(groups, config.group_size, config.rollout.max_prompt_tokens, config.rollout.max_new_tokens)
    rows = torch.arange(batch.num_sequences)
    parts = plan_microbatches(batch, rows, config.learner.microbatch_tokens, share_prompt)
    run = [(count_tokens(batch, part, share_prompt).run, part) for part in parts]
    tokens, largest = max(run, key=lambda pair: pair[0])
    prompts = len(batch.group_ids[largest].unique()) if share_prompt else len(largest)
    return FullLength(len(parts), len(largest), prompts, tokens)


def _full_batch(groups: int, group_size: int, prompt: int, completion: int) -> TokenBatch:
    """Groups of full-length rows; no tokens are stored."""
    rows = groups * group_size
    ids, ones = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1)
    aligned = ids.expand(rows, completion)
    whole = ids.expand(rows, prompt + completion - 1)
    counts = torch.zeros(rows, dtype=torch.long)
    return TokenBatch(
        input_ids=whole,
        attention_mask=whole,
        predict_from=aligned,
        completion_ids=aligned,
        completion_mask=ones.expand(rows, completion),
        rollout_logprobs=ones.expand(rows, completion),
        rewards=counts.float(),
        truncated=counts.bool(),
        group_ids=torch.arange(groups).repeat_interleave(group_size),
        prompt_lengths=counts + prompt,
        weight_versions=counts,
    )


def learner_memory(config: Config, shape: ModelShape, processes: int = 1) -> LearnerMemory:
    """One of the learner's `processes`; exact up to the forward's part (see `activation_bytes`)."""
    each, exact = _BYTES[config.model.dtype], config.model.dtype == "float32"
    sharded = config.learner.shard and processes > 1
    parts = processes if sharded else 1
    full = config.model.lora_rank == 0
    frozen = 0 if full else shape.parameters * each
    trained_in_model = 0 if sharded and not exact else shape.trainable * each  # sharded: the masters are the model
    state = shape.trainable * _MASTER // parts
    micro = full_length(config, shares_prompt(config, shape), processes)
    outside = shape.parameters - shape.layers * shape.layer_parameters
    return LearnerMemory(
        weights=(frozen + trained_in_model) // parts,
        reference=shape.parameters * each // parts if full else 0,
        masters=0 if exact else state,
        moments=2 * state,
        gradients=state,
        casts=0 if exact or sharded else shape.trainable * each,
        step_copy=0 if exact else state,
        gathered=2 * (outside + 2 * shape.layer_parameters) * each if sharded else 0,  # weights and their gradients
        activations=activation_bytes(config, shape, micro),
        logits=logit_rows(shape, micro) * shape.vocabulary * logit_bytes(config.model.dtype),
    )


def activation_bytes(config: Config, shape: ModelShape, micro: FullLength) -> int:
    """About what the forward of `micro` keeps for its backward: layers x (tokens x values of a token) in the compute dtype.

    A decoder layer keeps 8 hidden + 5 attention + 4 intermediate values of a token (two norms with their fp32 inputs; queries,
    repeated keys and values, the attention's output twice; gate, up, their activation and product), and of a shared prompt
    the keys and values again for every sibling. With gradient checkpointing a layer keeps its input; one is run again.
    """
    token, each = token_values(shape), _BYTES[config.model.dtype]
    if config.model.gradient_checkpointing:
        return each * micro.tokens * (shape.layers * shape.hidden + token)
    repeated = micro.sequences * config.rollout.max_prompt_tokens if micro.prompts < micro.sequences else 0
    return each * shape.layers * (micro.tokens * token + repeated * 2 * (shape.attention + shape.key_values))


def token_values(shape: ModelShape) -> int:
    """What a decoder layer keeps of a token, in numbers of the compute dtype."""
    return 8 * shape.hidden + 5 * shape.attention + 4 * shape.intermediate


def logit_rows(shape: ModelShape, micro: FullLength) -> int:
    """Tokens whose logits are there at once."""
    return min(micro.tokens, max(1, CHUNK_LOGITS // shape.vocabulary))


def logit_bytes(dtype: str) -> int:
    """Of one logit: below fp32 an fp32 copy beside it."""
    return 4 if dtype == "float32" else _BYTES[dtype] + 4


def sampler_memory(config: Config, shape: ModelShape, machine: Machine) -> SamplerMemory:
    """One worker of the run, or vLLM in the learner's process, on one of its GPUs (on a CPU: in all)."""
    rollout, each = config.rollout, _BYTES[config.model.dtype]
    on_gpu = machine.kind == "GPU"
    gpus = rollout.worker_gpus if on_gpu and rollout.has_workers else 1
    heads = -(-shape.key_value_heads // gpus)
    token = 2 * shape.layers * heads * (shape.key_values // shape.key_value_heads) * each
    weights = shape.parameters * each // gpus
    share = rollout.worker_gpu_memory if rollout.has_workers else rollout.gpu_memory_utilization
    cache = int(share * machine.total) - weights if on_gpu else rollout.cpu_kv_cache_gb << 30
    return SamplerMemory(weights, cache, token)


def running_at_once(config: Config) -> int:
    """The most sequences one worker runs at a time."""
    rollout = config.rollout
    workers = max(1, rollout.started_workers + len(rollout.urls)) if rollout.has_workers else 1
    return min(MAX_SEQUENCES, -(-config.rollouts_per_step * (1 + rollout.max_staleness) // workers))
