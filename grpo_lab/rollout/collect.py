"""Problems -> graded groups: render the prompt, generate G siblings each, grade their text.

What an engine or a task gives is looked at here, once for all of them: nothing that is no number goes further.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from threading import Lock
from typing import Any, get_args

from jinja2 import TemplateError

from grpo_lab.errors import ConfigError, RunError, UserError, in_words, spelled
from grpo_lab.rollout.engines import Engine
from grpo_lab.seeding import derive_seed
from grpo_lab.types import Completion, GenerationRequest, Grade, Outcome, Problem, RolloutGroup, Sampling

_LEAST_LOGPROB = -1e6  # nats of one token; vLLM writes -9999 for minus infinity
_ROUNDING = 1e-3  # nats; a log-prob may be this much above 0
_LARGEST_REWARD = 1e6  # of either sign; beyond it float32 loses the digits that tell siblings apart


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
        a problem that comes twice in one call (where two epochs meet) has occurrences 0 and 1.

        RunError names the step and what is wrong when the engine's completions or the task's grades cannot be trained on."""
        what, *numbers = purpose
        when = f"step {numbers[0] + 1}" if numbers else f"sampling for {what}"
        with self._one_at_a_time:
            prompts = [render_prompt(self.tokenizer, problem, self.max_prompt_tokens) for problem in problems]
        ids = [problem.id for problem in problems]
        requests = [
            GenerationRequest(prompt, derive_seed(self.seed, *purpose, ids[i], ids[:i].count(ids[i]), sibling))
            for i, prompt in enumerate(prompts)
            for sibling in range(group_size)
        ]
        completions = self.engine.generate(requests, sampling)
        _refuse_broken(completions, len(requests), sampling, when)
        with self._one_at_a_time:
            texts = self.tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
            named = [replace(completion, text=text) for completion, text in zip(completions, texts, strict=True)]
            return [
                self._group(problem, prompt, named[i * group_size : (i + 1) * group_size], when)
                for i, (problem, prompt) in enumerate(zip(problems, prompts, strict=True))
            ]

    def _group(
        self, problem: Problem, prompt: tuple[int, ...], completions: list[Completion], when: str
    ) -> RolloutGroup:
        try:
            grades = tuple(self.graded(problem, completion) for completion in completions)
        except UserError as error:
            raise RunError(f"{when}: {error}") from None
        return RolloutGroup(problem, prompt, tuple(completions), grades)

    def graded(self, problem: Problem, completion: Completion) -> Grade:
        """The task's grade; RunError when it fails or gives none that can be trained on."""
        name = getattr(self.grade, "__qualname__", "grade")
        try:
            grade = self.grade(problem, completion.text, completion.truncated)
        except UserError:
            raise
        except Exception as error:
            raise RunError(f"{name} failed on a completion of problem {problem.id!r}: {in_words(error)}") from None
        is_grade = isinstance(grade, Grade) and isinstance(grade.reward, Real) and grade.outcome in get_args(Outcome)
        if not is_grade or not abs(grade.reward) <= _LARGEST_REWARD:
            raise RunError(
                f"{name} gave {spelled(grade)} for problem {problem.id!r}; it must give a Grade whose reward is a number "
                f"between -{_LARGEST_REWARD:g} and {_LARGEST_REWARD:g} and whose outcome is {', '.join(get_args(Outcome))}"
            )
        return replace(grade, reward=float(grade.reward))


def _refuse_broken(completions: Sequence[Completion], requested: int, sampling: Sampling, when: str) -> None:
    """RunError when an engine's answer is none: too few, empty, going on after a stop token, or without log-probs."""
    if len(completions) != requested:
        raise RunError(
            f"{when}: the engine answered {len(completions)} of {requested} requests; it must answer each, in order"
        )
    stops = set(sampling.stop_token_ids)
    for completion in completions:
        tokens, logprobs = completion.token_ids, completion.logprobs
        if not tokens or len(tokens) != len(logprobs):
            raise RunError(
                f"{when}: the engine gave a completion of {len(tokens)} tokens and {len(logprobs)} log-probs; it must have at "
                "least one token, the stop token included, and a log-prob for each"
            )
        if not stops.isdisjoint(tokens[:-1]):
            raise RunError(
                f"{when}: the engine went on after a stop token (one of {sorted(stops)}); a completion ends "
                "with the first it has"
            )
    values = [value for completion in completions for value in completion.logprobs]
    broken = [value for value in values if not _LEAST_LOGPROB <= value <= _ROUNDING]
    if broken:
        raise RunError(
            f"{when}: {len(broken)} of {len(values)} log-probs the engine gave for its tokens are no log-probs, for example "
            f"{broken[0]:g}: the weights that sample are broken, or overflow model.dtype; check the model, or start again with "
            "a lower learner.learning_rate or model.dtype=float32"
        )


def render_prompt(tokenizer: Any, problem: Problem, max_tokens: int) -> tuple[int, ...]:
    """Token ids of a problem's messages under the chat template, or their plain text where the tokenizer has none.

    Raises ConfigError when the template refuses them, and when the prompt is empty or longer than `max_tokens`.
    """
    messages = [{"role": message["role"], "content": message["content"]} for message in problem.messages]
    if tokenizer.chat_template:
        try:
            rendered = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except (TemplateError, ValueError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(
                f"problem {problem.id!r}: the model's chat template refuses its messages (roles: {roles}): "
                f"{' '.join(str(error).split())[:200]}; change data.options.system or the problem's messages"
            ) from None
        ids = rendered["input_ids"]
    else:
        ids = tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
    if not ids:
        raise ConfigError(f"problem {problem.id!r}: its prompt has no tokens; give its messages some text")
    if len(ids) > max_tokens:
        raise ConfigError(
            f"problem {problem.id!r}: its prompt has {len(ids)} tokens, rollout.max_prompt_tokens={max_tokens} are allowed; "
            f"raise rollout.max_prompt_tokens to at least {len(ids)}"
        )
    return tuple(ids)
