"""Everything about a run before it starts: where each setting comes from, the batches, the memory, the commands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from grpo_lab.config import Config, expand_path
from grpo_lab.console import Console, describe_config
from grpo_lab.environment.limits import cores_fact, space
from grpo_lab.errors import ConfigError, counted
from grpo_lab.objective.axes import Objective
from grpo_lab.planning.memory import full_length, learner_memory, planned_machine, running_at_once, shares_prompt
from grpo_lab.planning.memory_lines import gib, memory_lines
from grpo_lab.planning.model_shape import ModelShape, model_shape
from grpo_lab.planning.origins import annotated_yaml
from grpo_lab.planning.roles import Launch, role_lines
from grpo_lab.storage.rotation import most_at_once

_LISTED = 3  # checkpoints named before the last


def print_plan(
    console: Console, config: Config, objective: Objective, origins: Mapping[str, str], launch: Launch
) -> None:
    """The resolved configuration with its origins, `---`, then lines; nothing is loaded, fetched or written."""
    shape = model_shape(config.model)
    console.say(annotated_yaml(config, objective, origins))
    console.say("---")
    for line in describe_config(config, objective):
        console.say(line)
    for line in batch_lines(config, objective, shape, launch.learners):
        console.say(line)
    for line in memory_lines(config, shape, planned_machine(launch.gpu_memory), launch):
        console.say(line)
    for fact in cores_fact(config) if launch.gpu_memory is None else ():  # the cores of another machine are not known
        console.say(f"{'cores' if fact.state == 'pass' else 'warning':10} {fact.text}")
    try:
        lines = role_lines(config, launch)
    except ConfigError as error:
        lines = [f"warning    {error}"]
    for line in lines:
        console.say(line)


def batch_lines(config: Config, objective: Objective, shape: ModelShape | None, processes: int) -> list[str]:
    """Every count of the run that the short form leaves out."""
    rollout, step = config.rollout, config.rollouts_per_step
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    groups = config.prompts_per_step // config.learner.mini_batches
    return [
        f"step       {step:,} rollouts = {config.prompts_per_step} groups of {config.group_size}, each at most "
        f"{rollout.max_prompt_tokens:,} + {rollout.max_new_tokens:,} = {longest:,} tokens: {step * longest:,} a step, "
        f"{config.total_rollouts * longest:,} in all",
        f"sampling   {_sampling(config, objective)}",
        f"mini-batch {groups} groups = {groups * config.group_size} sequences, one optimizer step",
        *_forward_lines(config, shape, processes),
        *_process_lines(groups, processes),
        f"rate       {_rate(config)}",
        f"saved      {_saves(config, shape)}",
        *_evaluation_lines(config),
    ]  # fmt: skip


def _sampling(config: Config, objective: Objective) -> str:
    rollout = config.rollout
    count = rollout.started_workers + len(rollout.urls)
    where = "in the learner's process"
    if rollout.has_workers:
        where = f"over {counted(count, 'worker')}, {-(-config.rollouts_per_step // count):,} each"
    text = f"{config.rollouts_per_step:,} rollouts a step {where}"
    if rollout.engine_name in ("vllm", "vllm_server"):
        text += f"; at most {running_at_once(config)} run at once{' in a worker' if rollout.has_workers else ''}"
    if rollout.max_staleness:
        text += f"; up to {rollout.max_staleness + 1} steps' batches are being sampled"
    if objective.dynamic_sampling:
        rounds = config.objective.max_regenerations
        text += f"; dynamic sampling: up to {rounds} more rounds, at most {(1 + rounds) * config.rollouts_per_step:,} rollouts"
    return text


def _forward_lines(config: Config, shape: ModelShape | None, processes: int) -> list[str]:
    """Micro-batches of sequences that all have full length: most have less, so more of them fit."""
    budget, used = config.learner.microbatch_tokens, shares_prompt(config, shape)
    prompt, rest = (
        config.rollout.max_prompt_tokens,
        max(1, config.rollout.max_new_tokens - 1),
    )  # the last token predicts none
    plan = full_length(config, used, processes)
    of = "a process's part of a full-length mini-batch" if processes > 1 else "a full-length mini-batch"
    lines = [
        f"forward    {budget:,} tokens fit in a micro-batch: {max(1, (budget - prompt) // rest):,} full-length siblings with "
        f"their prompt shared, {max(1, budget // (prompt + rest)):,} without",
        f"           here the prompt is {'' if used else 'not '}shared: {of} runs in {counted(plan.count, 'micro-batch')}, the "
        f"largest of {plan.sequences:,} sequences, {plan.tokens:,} tokens",
    ]
    if plan.tokens > budget:
        lines.append(
            f"warning    a full-length sequence is {plan.tokens:,} tokens, more than learner.microbatch_tokens={budget:,}; it "
            f"runs alone, over the budget: raise it to {plan.tokens:,}, or lower rollout.max_prompt_tokens or max_new_tokens"
        )
    return lines


def _process_lines(groups: int, processes: int) -> list[str]:
    if processes == 1:
        return []
    lines = [
        f"processes  {processes}: the {groups} groups of a mini-batch are dealt whole, by completion tokens, about "
        f"{groups / processes:.3g} to each"
    ]
    if groups < processes:
        lines.append(
            f"warning    {processes - groups} of {processes} learner processes have no group of a mini-batch: lower "
            "learner.mini_batches or --processes, or raise prompts_per_step"
        )
    return lines


def _rate(config: Config) -> str:
    settings, updates = config.learner, config.learner.passes * config.learner.mini_batches
    steps = config.total_rollouts // config.rollouts_per_step
    text, warm = f"learning rate {settings.learning_rate:g}", settings.warmup_updates
    if warm:
        text += (
            f", rising from 0 over {warm:,} updates (full from update {warm + 1:,}, in step {warm // updates + 1:,})"
        )
    if settings.schedule == "constant":
        return f"{text}, constant to the end (update {steps * updates:,})"
    return f"{text}, then {settings.schedule} to 0 after update {steps * updates:,} (the end of step {steps:,})"


def checkpoint_steps(config: Config) -> list[int]:
    """The steps after which a checkpoint is saved."""
    every, steps = (count // config.rollouts_per_step for count in (config.checkpoint_every, config.total_rollouts))
    return [*range(every, steps, every), steps]


def _saves(config: Config, shape: ModelShape | None) -> str:
    steps = checkpoint_steps(config)
    named = [f"{step:,}" for step in steps]
    if len(steps) > _LISTED + 1:
        named = [*named[:_LISTED], "...", named[-1]]
    text = f"after step{'s' if len(steps) > 1 else ''} {', '.join(named)}"
    if shape is None:
        return text
    found = learner_memory(config, shape)
    each = found.masters + found.moments + (0 if config.model.lora_rank else found.weights)
    free = space(Path(expand_path(config.output_dir))).free
    most = most_at_once(config)
    kept = "in all" if most == len(steps) else f"for the {most} that are kept at once"
    text += f"; {gib(each)} GiB each with the training state, {gib(each * most)} {kept}, {gib(free)} free"
    return text + (
        "" if each * most < free else " - TOO MUCH: set keep_last, raise checkpoint_every or change output_dir"
    )


def _evaluation_lines(config: Config) -> list[str]:
    settings, times = config.evaluation, len(checkpoint_steps(config)) + 1
    if not settings.enabled:
        return []
    each = settings.problems * settings.samples
    return [
        f"evaluated  at step 0 and at every checkpoint: {settings.problems} problems x {settings.samples} samples = {each:,} "
        f"completions, {times * each:,} in all (those of step 0 are the reference's, for the floor)"
    ]
