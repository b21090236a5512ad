"""How vLLM is started, in process and as a server alike: the same numbers come out of both."""

from typing import Any

from grpo_lab.rollout.engines import EngineSpec
from grpo_lab.types import GenerationRequest, Sampling

MAX_SEQUENCES = 256


def engine_options(spec: EngineSpec, on_gpu: bool) -> dict[str, Any]:
    """vLLM's engine arguments by name. On CPU: eager, prompts unchunked (a seed with chunked prefill crashes the worker)."""
    options: dict[str, Any] = {
        "model": str(spec.model_path),
        "dtype": spec.model.dtype,
        "trust_remote_code": spec.model.trust_remote_code,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": MAX_SEQUENCES,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "seed": 0,
    }
    if spec.model.lora_rank:
        loras = (
            2 + spec.rollout.max_staleness if spec.rollout.has_workers else 1
        )  # in use at once: of every version in flight
        slots = _lora_slots(spec.model.lora_rank)
        options |= {"enable_lora": True, "max_lora_rank": slots, "max_loras": loras, "max_cpu_loras": loras}
    if on_gpu:
        return options
    return options | {
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(8192, spec.max_model_len),
        "kv_cache_memory_bytes": spec.rollout.cpu_kv_cache_gb << 30,
    }


def in_process_options(spec: EngineSpec, on_gpu: bool) -> dict[str, Any]:
    """The same for the learner's process: on a GPU it takes a part of the memory, and sleeps between calls."""
    shared = {"gpu_memory_utilization": spec.rollout.gpu_memory_utilization, "enable_sleep_mode": True}
    return engine_options(spec, on_gpu) | (shared if on_gpu else {})


def sampling_options(request: GenerationRequest, sampling: Sampling) -> dict[str, Any]:
    """vLLM's SamplingParams of one request, every one that changes the distribution given explicitly."""
    return {
        "n": 1,
        "seed": request.seed,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": False,
        "logprobs": 0,
        "detokenize": False,
    }


def command_line(options: dict[str, Any]) -> list[str]:
    """Engine arguments as vLLM's server takes them."""
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words += [f"--{flag}" if value else f"--no-{flag}"]
        else:
            words += [f"--{flag}", str(value)]
    return words


def _lora_slots(rank: int) -> int:
    """The smallest adapter size vLLM is built for that holds `rank`."""
    return next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)
