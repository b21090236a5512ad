"""transformers generate, for machines without vLLM: slow, and chosen explicitly.

Sampling is Gumbel-max: argmax over log-probs plus noise seeded per request and position, which samples exactly from the
processed distribution and makes a completion independent of what else is in its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from grpo_lab.errors import RunError
from grpo_lab.rollout.engines import EngineSpec
from grpo_lab.types import Completion, GenerationRequest, Sampling

_BATCH = 64


class EngineImpl:
    """See the Engine protocol."""

    def __init__(self, spec: EngineSpec) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            spec.model_path,
            dtype=getattr(torch, spec.model.dtype),
            trust_remote_code=spec.model.trust_remote_code,
            use_safetensors=True,
        )
        self._model.to(self._device).eval()
        self._version = 0

    @torch.no_grad()
    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> list[Completion]:
        """One completion a request, in order."""
        starts = range(0, len(requests), _BATCH)
        return [c for start in starts for c in self._batch(requests[start : start + _BATCH], sampling)]

    def _batch(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> list[Completion]:
        width = max(len(request.prompt_ids) for request in requests)
        padding = [width - len(request.prompt_ids) for request in requests]
        inputs = torch.tensor([[0] * pad + list(r.prompt_ids) for pad, r in zip(padding, requests, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding])
        sampler = _SeededSampler([request.seed for request in requests], sampling)
        settings = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            do_sample=False,
            eos_token_id=list(sampling.stop_token_ids) or None,
            pad_token_id=0,
        )
        output = self._model.generate(
            inputs.to(self._device),
            attention_mask=mask.to(self._device),
            generation_config=settings,
            logits_processor=LogitsProcessorList([sampler]),
        )
        chosen = output[:, width:].cpu()
        logprobs = torch.stack(sampler.logprobs, dim=1).cpu()
        return [self._completion(ids, row, sampling) for ids, row in zip(chosen, logprobs, strict=True)]

    def _completion(self, ids: Tensor, logprobs: Tensor, sampling: Sampling) -> Completion:
        stops = torch.isin(ids, torch.tensor(sampling.stop_token_ids, dtype=ids.dtype)).nonzero()
        length = int(stops[0]) + 1 if len(stops) else len(ids)
        reason = "stop" if len(stops) else "length"
        return Completion(
            tuple(ids[:length].tolist()), tuple(logprobs[:length].tolist()), "", reason, self._version  # type: ignore[arg-type]
        )  # fmt: skip

    def load_weights(self, folder: Path, version: int) -> None:
        """Copy the tensors of `folder`/model.safetensors into the model, or put its LoRA adapter in place of the last."""
        if (folder / "adapter_config.json").is_file():
            if getattr(self._model, "peft_config", None):
                self._model.delete_adapter("policy")
            self._model.load_adapter(str(folder), adapter_name="policy")
            self._model.eval()
        else:
            missing, unexpected = self._model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
            tied = set(getattr(self._model, "_tied_weights_keys", None) or ()) | {"lm_head.weight"}
            if unexpected or set(missing) - tied or (missing and not self._model.config.tie_word_embeddings):
                raise RunError(
                    f"pushed weights do not fit the model: missing {missing[:3]}, unexpected {unexpected[:3]}"
                )
        self._version = version

    def close(self) -> None:
        """Drop the model."""
        self._model = None


class _SeededSampler(LogitsProcessor):  # type: ignore[misc]
    """Turns logits into log-probs of the processed distribution plus seeded Gumbel noise, so that argmax samples."""

    def __init__(self, seeds: Sequence[int], sampling: Sampling) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._warpers = LogitsProcessorList()
        if sampling.repetition_penalty != 1:
            self._warpers.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        self._warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k > 0:
            self._warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._warpers.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p > 0:
            self._warpers.append(MinPLogitsWarper(sampling.min_p))
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logprobs = torch.log_softmax(self._warpers(input_ids, scores.float()), dim=-1)
        uniform = torch.stack([torch.rand(scores.shape[1], generator=g, dtype=torch.float64) for g in self._generators])
        gumbel = -torch.log(-torch.log(uniform.clamp(min=1e-300)))
        noisy = logprobs.double() + gumbel.to(scores.device)
        self.logprobs.append(logprobs.gather(1, noisy.argmax(dim=1, keepdim=True)).squeeze(1))
        return noisy
