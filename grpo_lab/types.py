"""The values handed from stage to stage of one batch. Each stage makes a new frozen type; nothing is filled in later.

Problem -> Completion -> RolloutGroup -> TokenBatch -> TrainBatch -> UpdateReport (the README's numbered steps).
N = sequences, G = group size, C = longest completion, T = longest prompt + completion - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length"]
Outcome = Literal["correct", "partial", "wrong", "unparsable", "truncated"]


class Message(TypedDict):
    """One turn of a conversation, as chat templates take it."""

    role: str
    content: str


@dataclass(frozen=True)
class Problem:
    """One prompt with its ground truth. `id` is unique within a task; `data` is the task's own business."""

    id: str
    messages: tuple[Message, ...]
    answer: str
    data: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Grade:
    """What a reward function says of one completion: the reward, the answer it found, and the kind of outcome.

    "partial" is for graded rewards: more than nothing, less than all.
    """

    reward: float
    outcome: Outcome
    extracted: str | None = None


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled. Engines pass every field explicitly: a model's generation_config never applies."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class GenerationRequest:
    """One completion to sample: prompt token ids and the seed of this very sibling."""

    prompt_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Completion:
    """One sampled completion.

    `token_ids` are the sampled ids, the stop token included when `finish_reason` is "stop".
    `logprobs[t]` is the natural-log probability of `token_ids[t]` under the distribution actually sampled from.
    `weight_version` counts the weight pushes the engine had received when it sampled; where pushes came in between, it is the
    first token's (the oldest), and `weight_version_end` the last token's.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    weight_version: int
    weight_version_end: int | None = None

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True)
class Canary:
    """What the learner thinks of a fixed text at weight version `version`: log-probs of token_ids[1:], nats.

    A sampler that holds the same weights agrees to within `limit` per token on average. `digests()` are the sha256 sums of
    the learner's tensors by name. `score(prompt, completion)` gives the learner's log-probs of any
    other completion.
    """

    version: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    limit: float
    score: Callable[[tuple[int, ...], tuple[int, ...]], tuple[float, ...]]
    digests: Callable[[], Mapping[str, str]]


@dataclass(frozen=True)
class RolloutGroup:
    """G siblings of one problem, graded. `completions[i]` belongs to `grades[i]`."""

    problem: Problem
    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    grades: tuple[Grade, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(grade.reward for grade in self.grades)

    @property
    def weight_version(self) -> int:
        """The oldest weights that sampled any of its tokens."""
        return min(completion.weight_version for completion in self.completions)


@dataclass(frozen=True)
class TokenBatch:
    """Groups as CPU tensors; every [N, C] tensor is completion-aligned (column t = t-th sampled token).

    `input_ids` [N, T] holds prompt + completion without its last token, right-padded; `attention_mask` [N, T] marks it.
    `predict_from` [N, C] is the row position whose logits predict completion token t: the shift by one, done once.
    Rows of a group are neighbours, G of them each; `group_ids` [N] is the group's number in the whole step (over all
    ranks), `prompt_lengths` [N] counts prompt tokens, `truncated` [N] marks completions that met the length limit, and
    `weight_versions` [N] are the oldest weights that sampled them.
    """

    input_ids: Tensor
    attention_mask: Tensor
    predict_from: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    rollout_logprobs: Tensor
    rewards: Tensor
    truncated: Tensor
    group_ids: Tensor
    prompt_lengths: Tensor
    weight_versions: Tensor

    @property
    def num_sequences(self) -> int:
        return int(self.completion_ids.shape[0])

    @property
    def group_size(self) -> int:
        return int((self.group_ids == self.group_ids[0]).sum())


@dataclass(frozen=True)
class TrainBatch:
    """A TokenBatch with the learner's own log-probabilities, fp32 log-softmax, no gradient: both [N, C], 0 off the mask."""

    tokens: TokenBatch
    old_logprobs: Tensor
    ref_logprobs: Tensor


@dataclass(frozen=True)
class UpdateReport:
    """What the updates on one rollout batch did: flat metrics by their logged name.

    `trained_logprobs` [N, C] are the learner's log-probs when each token was last trained on: against the old ones, the
    log-ratios its gate saw.
    """

    metrics: Mapping[str, float]
    trained_logprobs: Tensor
