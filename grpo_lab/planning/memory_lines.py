"""The estimated memory of a run beside what the machine has, as lines, and what to change where it does not fit."""

from __future__ import annotations

from grpo_lab.config import Config
from grpo_lab.planning.memory import (
    GIB,
    LearnerMemory,
    Machine,
    activation_bytes,
    full_length,
    learner_memory,
    logit_bytes,
    logit_rows,
    running_at_once,
    sampler_memory,
    shares_prompt,
    token_values,
)
from grpo_lab.planning.model_shape import ModelShape
from grpo_lab.planning.roles import Launch


def gib(size: float) -> str:
    """Bytes as GiB, to two digits where they are few."""
    return f"{size / GIB:.1f}" if size >= 0.95 * GIB else f"{size / GIB:.2g}"


def memory_lines(config: Config, shape: ModelShape | None, machine: Machine, launch: Launch) -> list[str]:
    """Learner and sampler against the machine; one line says what is missing where the model is not here."""
    if shape is None:
        name = config.model.place
        return [
            f"memory     unknown: model not here ({name}); its config is enough: `hf download {name} "
            "config.json`, or model.name=FOLDER with a config.json"
        ]
    learner = learner_memory(config, shape, launch.learners)
    lines = [
        *_learner_lines(config, shape, machine, learner, launch.learners),
        *_sampler_lines(config, shape, machine),
    ]
    if machine.kind == "RAM":
        return lines + _in_one_memory(config, shape, machine, learner, launch.processes)
    return lines + _on_gpus(config, machine, learner)


def _learner_lines(
    config: Config, shape: ModelShape, machine: Machine, learner: LearnerMemory, processes: int
) -> list[str]:
    each = f" (each of {processes})" if processes > 1 else ""
    backward = {
        "gradients of a micro-batch": learner.casts,
        "gathered layers about": learner.gathered,
        "activations about": learner.activations,
        "logits about": learner.logits,
    }
    at_step = {"copy of the masters at a step": learner.step_copy}
    parts = {
        "weights": learner.weights,
        "masters": learner.masters,
        "gradients": learner.gradients,
        "moments": learner.moments,
        "reference": learner.reference,
        **(backward if sum(backward.values()) >= learner.step_copy else at_step),
    }
    sum_ = " + ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
    return [
        f"memory     learner {machine.kind}{each}: {sum_} = {gib(learner.peak)} GiB of {gib(machine.total)}",
        f"           {shape.parameters:,} parameters, {shape.trainable:,} trained: exact; {_forward(config, shape, processes)}",
    ]


def _forward(config: Config, shape: ModelShape, processes: int) -> str:
    """How the activations and logits were estimated."""
    micro = full_length(config, shares_prompt(config, shape), processes)
    size = 4 if config.model.dtype == "float32" else 2
    kept = f"{shape.layers} layers x {micro.tokens:,} tokens x {token_values(shape):,} values"
    if config.model.gradient_checkpointing:
        kept = f"{micro.tokens:,} tokens x ({shape.layers} layers x {shape.hidden:,} + {token_values(shape):,}) values"
    elif micro.prompts < micro.sequences:
        kept += " and the prompts' keys and values for each sibling,"
    return (
        f"about, for the largest full-length micro-batch: {kept} x {size} bytes = "
        f"{gib(activation_bytes(config, shape, micro))}; {logit_rows(shape, micro):,} tokens x {shape.vocabulary:,} logits x "
        f"{logit_bytes(config.model.dtype)} bytes"
    )


def _sampler_lines(config: Config, shape: ModelShape, machine: Machine) -> list[str]:
    rollout = config.rollout
    if rollout.engine_name not in ("vllm", "vllm_server"):
        return []
    found = sampler_memory(config, shape, machine)
    length = rollout.max_prompt_tokens + rollout.max_new_tokens
    fitting, wanted = found.cache // (found.token * length), running_at_once(config)
    who = "worker" if rollout.has_workers else "vLLM"
    taken = f"weights {gib(found.weights)} + cache {gib(max(0, found.cache))} = {gib(found.total)} GiB of {gib(machine.total)}"
    lines = [
        f"memory     {who} {machine.kind}{' each' if rollout.has_workers else ''}: {taken}",
        f"           about: vLLM's own working memory comes out of the cache, which holds {max(0, fitting):,} full-length "
        f"sequences; {wanted} run at once, {gib(wanted * length * found.token)} GiB at full length",
    ]
    key = "worker_gpu_memory" if rollout.has_workers else "gpu_memory_utilization"
    key = "cpu_kv_cache_gb" if machine.kind == "RAM" else key
    if fitting < 1:
        lines.append(
            f"warning    {who}: no full-length sequence fits, vLLM will refuse to start: raise rollout.{key}, or lower "
            "rollout.max_prompt_tokens or max_new_tokens"
        )
    elif fitting < wanted:
        lines.append(
            f"           fewer than that: where completions are long, sequences wait; a larger rollout.{key} makes room"
        )
    return lines


def _on_gpus(config: Config, machine: Machine, learner: LearnerMemory) -> list[str]:
    """Whether the learner fits, and beside it vLLM in its process, which sleeps while the learner trains."""
    lines = []
    if learner.peak > machine.total:
        lines.append(
            f"warning    the learner needs about {gib(learner.peak)} GiB of {gib(machine.total)}: {_smaller(learner)}"
        )
    if config.rollout.engine_name == "vllm":
        both = learner.resident + int(config.rollout.gpu_memory_utilization * machine.total)
        lines.append(
            f"           together while vLLM samples: learner {gib(learner.resident)} + vLLM = {gib(both)} GiB; it sleeps "
            "while the learner trains"
        )
        if both > machine.total:
            lines.append(
                f"warning    learner and vLLM need {gib(both)} GiB of {gib(machine.total)} while it samples: lower "
                "rollout.gpu_memory_utilization, or give it a GPU of its own with rollout.workers=1"
            )
    return lines


def _in_one_memory(
    config: Config, shape: ModelShape, machine: Machine, learner: LearnerMemory, processes: int
) -> list[str]:
    """On a CPU all of them share the memory."""
    rollout, sampler = config.rollout, 0
    if rollout.engine_name in ("vllm", "vllm_server"):
        count = rollout.started_workers if rollout.has_workers else 1
        sampler = count * sampler_memory(config, shape, machine).total
    elif rollout.engine_name == "hf":
        sampler = sampler_memory(config, shape, machine).weights
    total = processes * learner.peak + sampler
    lines = [
        f"           together: learner {gib(processes * learner.peak)} + sampler {gib(sampler)} = about {gib(total)} GiB of "
        f"{gib(machine.total)}"
    ]
    if total > machine.total:
        lines.append(f"warning    this run needs about {gib(total)} GiB of {gib(machine.total)}: {_smaller(learner)}")
    return lines


def _smaller(learner: LearnerMemory) -> str:
    """What to change, by what takes the most."""
    if learner.activations + learner.logits > learner.resident + learner.gradients:
        return "lower learner.microbatch_tokens or set model.gradient_checkpointing=true"
    return "train an adapter (model.lora_rank=16), or spread the state with --processes and learner.shard=true"
