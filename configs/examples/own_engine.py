"""An engine of your own: sampling in a plain torch loop, the siblings of a prompt side by side over one cache.

    grpo-lab rollout --config configs/examples/own_engine.yaml --num 2

What an engine promises: the same requests give the same completions, each request's seed decides its completion, and
`logprobs` are those of the distribution that was sampled from. The contract tests run this file as they run the shipped ones.
"""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from grpo_lab.errors import ConfigError, RunError
from grpo_lab.rollout.engines import EngineSpec
from grpo_lab.types import Completion, GenerationRequest, Sampling


class EngineImpl:
    """See grpo_lab.rollout.engines.Engine."""

    def __init__(self, spec: EngineSpec) -> None:
        if spec.rollout.top_p != 1:
            raise ConfigError(f"rollout.top_p={spec.rollout.top_p:g}: this engine samples from all tokens; set it to 1")
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            spec.model_path, dtype=getattr(torch, spec.model.dtype), use_safetensors=True
        ).eval()
        self._version = 0

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> list[Completion]:
        """One completion a request, in order; neighbours with one prompt run together."""
        groups = [list(group) for _, group in groupby(requests, key=lambda request: request.prompt_ids)]
        return [completion for group in groups for completion in self._siblings(group, sampling)]

    @torch.no_grad()
    def _siblings(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> list[Completion]:
        generators = [torch.Generator().manual_seed(request.seed) for request in requests]
        cache = DynamicCache(config=self._model.config)
        inputs = torch.tensor([request.prompt_ids for request in requests])
        stops = torch.tensor(sampling.stop_token_ids)
        tokens, logprobs = [], []
        running = torch.ones(len(requests), dtype=torch.bool)
        while running.any() and len(tokens) < sampling.max_new_tokens:
            logits = self._model(inputs, past_key_values=cache).logits[:, -1].double()
            rows = torch.log_softmax(logits / sampling.temperature, dim=-1)
            drawn = [torch.multinomial(row.exp(), 1, generator=g) for row, g in zip(rows, generators, strict=True)]
            inputs = torch.stack(drawn)
            tokens.append(inputs[:, 0])
            logprobs.append(rows.gather(1, inputs)[:, 0])
            running &= ~torch.isin(tokens[-1], stops)
        columns = zip(torch.stack(tokens, dim=1), torch.stack(logprobs, dim=1), strict=True)
        return [self._completion(ids, values, stops) for ids, values in columns]

    def _completion(self, ids: Tensor, logprobs: Tensor, stops: Tensor) -> Completion:
        ends = torch.isin(ids, stops).nonzero()
        length = int(ends[0]) + 1 if len(ends) else len(ids)
        reason = "stop" if len(ends) else "length"
        values = tuple(logprobs[:length].tolist())
        return Completion(tuple(ids[:length].tolist()), values, "", reason, self._version)

    def load_weights(self, folder: Path, version: int) -> None:
        """The learner's tensors, by their names in the model; a tied head follows its embedding."""
        _, unknown = self._model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
        if unknown:
            raise RunError(f"pushed weights do not fit the model: it has no {unknown[0]!r}")
        self._version = version

    def close(self) -> None:
        """Drop the model."""
        self._model = None
