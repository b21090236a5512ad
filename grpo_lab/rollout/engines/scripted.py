"""Canned completions without a model, for tests and dry rehearsals: seeded random token ids that end at a stop token."""

import random
from collections.abc import Sequence
from pathlib import Path

from grpo_lab.rollout.engines import EngineSpec
from grpo_lab.types import Completion, GenerationRequest, Sampling


class EngineImpl:
    """Each request's seed decides length and tokens; log-probs are constant. Weights are counted, not read."""

    def __init__(self, spec: EngineSpec) -> None:
        self._version = 0

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> list[Completion]:
        """One completion a request, in order."""
        return [self._completion(request, sampling) for request in requests]

    def _completion(self, request: GenerationRequest, sampling: Sampling) -> Completion:
        rng = random.Random(request.seed)
        length = rng.randint(1, sampling.max_new_tokens)
        ids = [rng.randint(3, 255) for _ in range(length)]
        stopped = length < sampling.max_new_tokens and bool(sampling.stop_token_ids)
        if stopped:
            ids[-1] = sampling.stop_token_ids[0]
        return Completion(tuple(ids), (-1.0,) * length, "", "stop" if stopped else "length", self._version)

    def load_weights(self, folder: Path, version: int) -> None:
        """Remember the version."""
        self._version = version

    def close(self) -> None:
        """Nothing to release."""
