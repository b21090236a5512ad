"""Problems -> graded groups: render the prompt, generate G siblings each, grade their text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

from grpo_lab.errors import ConfigError
from grpo_lab.rollout.engines import Engine
from grpo_lab.seeding import derive_seed
from grpo_lab.types import Completion, GenerationRequest, Grade, Problem, RolloutGroup, Sampling


@dataclass(frozen=True)
class Collector:
    """Everything that turns problems into groups; `seed` is the run's. `grade(problem, text, truncated)` is the task's."""

    engine: Engine
    tokenizer: Any
    grade: Callable[[Problem, str, bool], Grade]
    seed: int
    max_prompt_tokens: int
    _one_at_a_time: Lock = field(default_factory=Lock, repr=False)  # tokenizers and tasks need not be thread-safe

    def collect(
        self, problems: Sequence[Problem], group_size: int, sampling: Sampling, purpose: tuple[str, *tuple[int, ...]]
    ) -> list[RolloutGroup]:
        """One group a problem. Sibling j is seeded by (run seed, *purpose, problem id, occurrence, j) and nothing else;
        a problem that comes twice in one call (where two epochs meet) has occurrences 0 and 1."""
        with self._one_at_a_time:
            prompts = [render_prompt(self.tokenizer, problem, self.max_prompt_tokens) for problem in problems]
        ids = [problem.id for problem in problems]
        requests = [
            GenerationRequest(prompt, derive_seed(self.seed, *purpose, ids[i], ids[:i].count(ids[i]), sibling))
            for i, prompt in enumerate(prompts)
            for sibling in range(group_size)
        ]
        completions = self.engine.generate(requests, sampling)
        assert len(completions) == len(requests), "an engine answers every request"
        with self._one_at_a_time:
            texts = self.tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
            named = [replace(completion, text=text) for completion, text in zip(completions, texts, strict=True)]
            return [
                self._group(problem, prompt, named[i * group_size : (i + 1) * group_size])
                for i, (problem, prompt) in enumerate(zip(problems, prompts, strict=True))
            ]

    def _group(self, problem: Problem, prompt: tuple[int, ...], completions: list[Completion]) -> RolloutGroup:
        grades = tuple(self.grade(problem, completion.text, completion.truncated) for completion in completions)
        return RolloutGroup(problem, prompt, tuple(completions), grades)


def render_prompt(tokenizer: Any, problem: Problem, max_tokens: int) -> tuple[int, ...]:
    """Token ids of a problem's messages under the chat template, or their plain text where the tokenizer has none.

    Raises ConfigError when the prompt is longer than `max_tokens`.
    """
    messages = [{"role": message["role"], "content": message["content"]} for message in problem.messages]
    if tokenizer.chat_template:
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
        ids = rendered["input_ids"]
    else:
        ids = tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
    if len(ids) > max_tokens:
        raise ConfigError(
            f"problem {problem.id!r}: its prompt has {len(ids)} tokens, rollout.max_prompt_tokens={max_tokens} are allowed; "
            f"raise rollout.max_prompt_tokens to at least {len(ids)}"
        )
    return tuple(ids)
