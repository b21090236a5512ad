"""vLLM in the learner's own process: the default. Deterministic: same weights, requests and seeds give the same tokens.

On CPU the engine runs eagerly with unchunked prompts (a seeded request with chunked prefill crashes the CPU worker);
on GPU it sleeps between calls so that the learner has the memory.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_lab.errors import ConfigError, RunError
from grpo_lab.rollout.engines import EngineSpec
from grpo_lab.rollout.vllm_options import in_process_options, sampling_options
from grpo_lab.types import Completion, GenerationRequest, Sampling


class EngineImpl:
    """See the Engine protocol. ConfigError when vLLM is not installed, RunError when it cannot start."""

    def __init__(self, spec: EngineSpec) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        self._on_gpu = torch.cuda.is_available()
        self._version = 0
        self._adapter: Any = None
        with _output_kept() as log:
            try:
                from vllm import LLM
            except ImportError as error:
                raise ConfigError(
                    f"rollout.engine=vllm, but vLLM cannot be imported ({error}): install it with `make setup` (CPU) or "
                    "`make setup CUDA=1`, or choose --set rollout.engine=hf"
                ) from None
            try:
                self._llm: Any = LLM(**in_process_options(spec, self._on_gpu), use_tqdm_on_load=False)
            except (RuntimeError, ValueError) as error:
                reason = " ".join(str(error).split())[:400]
                raise RunError(
                    f"vLLM could not start for {spec.model_path}: {reason}; its output is in {log}"
                ) from None
        self._sleep()

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> list[Completion]:
        """One completion a request, in order."""
        from vllm import SamplingParams, TokensPrompt

        self._wake()
        self._llm.reset_prefix_cache()
        prompts = [TokensPrompt(prompt_token_ids=list(request.prompt_ids)) for request in requests]
        parameters = [SamplingParams(**sampling_options(request, sampling)) for request in requests]
        outputs = self._llm.generate(prompts, parameters, use_tqdm=False, lora_request=self._adapter)
        self._sleep()
        return [self._completion(output.outputs[0]) for output in outputs]

    def _completion(self, output: Any) -> Completion:
        logprobs = [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]
        return Completion(
            token_ids=tuple(output.token_ids),
            logprobs=tuple(logprobs),
            text="",
            finish_reason="stop" if output.finish_reason == "stop" else "length",
            weight_version=self._version,
        )

    def load_weights(self, folder: Path, version: int) -> None:
        """Reload in place. `folder` holds every tensor by name, the output head too when it is tied; or a LoRA adapter."""
        self._wake()
        if (folder / "adapter_config.json").is_file():
            self._load_adapter(folder, version)
        else:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        self._llm.reset_prefix_cache()
        self._version = version
        self._sleep()

    def _load_adapter(self, folder: Path, version: int) -> None:
        from vllm.lora.request import LoRARequest

        if self._adapter is not None:
            self._llm.llm_engine.remove_lora(self._adapter.lora_int_id)
        self._adapter = LoRARequest(f"policy-{version}", version + 1, str(folder))
        self._llm.llm_engine.add_lora(self._adapter)

    def _sleep(self) -> None:
        if self._on_gpu:
            self._llm.sleep(level=1)

    def _wake(self) -> None:
        if self._on_gpu and self._llm.llm_engine.is_sleeping():
            self._llm.wake_up()

    def close(self) -> None:
        """Drop the engine; in process there is nothing else to stop."""
        with contextlib.suppress(AttributeError):
            self._llm.llm_engine.engine_core.shutdown()
            del self._llm


@contextlib.contextmanager
def _output_kept() -> Iterator[str]:
    """Send what is printed inside, by C++ too, to a file; it is removed unless something raises."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor, path = tempfile.mkstemp(prefix="grpo_lab-vllm-", suffix=".log")
    saved = [os.dup(1), os.dup(2)]
    try:
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        yield path
        os.unlink(path)
    except BaseException as error:
        # a stop signal came, or vLLM is missing: nothing went wrong that it would tell
        if isinstance(error, ConfigError) or not isinstance(error, Exception):
            os.unlink(path)
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        os.close(descriptor)
