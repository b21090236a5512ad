"""The HTTP interface of one vLLM server, as far as rollouts need it: vLLM's own routes, nothing of ours."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx

from grpo_lab.types import Completion

_GENERATE = "/inference/v1/generate"
_CONNECTIONS = 512  # completions asked of one server at once: what it runs, and as many waiting
_CONNECT_S = 30.0
InFlight = Literal["wait", "keep", "abort"]


class WorkerError(Exception):
    """A server did not do what it was asked. `status`: the error it answered with, 0 for no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @property
    def refused(self) -> bool:
        """Whether it answered that the request itself is wrong."""
        return 400 <= self.status < 500


class ForeignWeightsError(WorkerError):
    """A completion came from weights that this run did not push: somebody else pushed, or the server was restarted."""


class WorkerClient:
    """One server at `url`, or at the Unix socket `socket`.

    Every method raises WorkerError when the server is unreachable or answers with an error. Completions share a bounded number
    of connections; health and pushes have their own, so that they never wait for completions.
    """

    def __init__(self, url: str, socket: Path | None = None) -> None:
        self._completions = self._connect(url, socket, _CONNECTIONS)
        self._control = self._connect(url, socket, None)

    @staticmethod
    def _connect(url: str, socket: Path | None, connections: int | None) -> httpx.AsyncClient:
        key = os.environ.get("VLLM_API_KEY")
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=0)
        return httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            transport=httpx.AsyncHTTPTransport(uds=str(socket) if socket else None, limits=limits),
            headers={"Authorization": f"Bearer {key}"} if key else None,
            trust_env=False,  # a proxy is for the internet, not for workers
        )

    async def _call(self, method: str, path: str, timeout: float | None = None, **arguments: Any) -> Any:
        limit = httpx.USE_CLIENT_DEFAULT if timeout is None else httpx.Timeout(timeout)
        http = self._completions if path == _GENERATE else self._control
        try:
            answer = await http.request(method, path, timeout=limit, **arguments)
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client has been closed
            raise WorkerError(f"{path}: {type(error).__name__} {error}".rstrip()) from None
        if answer.status_code >= 400:
            raise WorkerError(f"{path}: {_reason(answer)}", answer.status_code)
        if answer.headers.get("content-type", "").startswith("application/json"):
            with _read(path):
                return answer.json()
        return None

    # -- sampling ----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Mapping[str, Any],
        model: str | None = None,
        versions: Mapping[str, int] | None = None,
        priority: int = 0,
    ) -> Completion | None:
        """One completion of a prompt under vLLM's sampling parameters; None when a weight push aborted it.

        `model` names the adapter, None is the base model. `versions` are the numbers of the labels this run gave to weights:
        `weight_version` is that of the first token, `weight_version_end` of the last one where a push came in between, and
        another label is a ForeignWeightsError. Without `versions` nothing is looked up and the version is 0. A lower
        `priority` goes first.
        """
        body = {"token_ids": list(token_ids), "sampling_params": dict(sampling), "model": model, "priority": priority}
        answer = await self._call("POST", _GENERATE, json=body)
        with _read(_GENERATE):
            choice = answer["choices"][0]
            if choice["finish_reason"] not in ("stop", "length"):
                return None
            labels = [span["version"] for span in choice["weight_versions"]] if versions is not None else []
            token_ids, content = choice["token_ids"], choice["logprobs"]["content"]
            logprobs = tuple(step["logprob"] for step in content)
        known = versions or {}
        foreign = [label for label in labels if label not in known]
        if foreign:
            raise ForeignWeightsError(f"answers with weights {foreign[0]!r}, which this run did not push")
        spans = [known[label] for label in labels] or [0]
        last = max(spans) if len(spans) > 1 else None
        return Completion(tuple(token_ids), logprobs, "", choice["finish_reason"], min(spans), last)

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Natural-log probabilities of token_ids[1:], each given what stands before it, at temperature 1; with priority."""
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
        body = {"token_ids": list(token_ids), "sampling_params": sampling, "priority": -1}
        answer = await self._call("POST", _GENERATE, json=body)
        with _read(_GENERATE):
            steps = answer["prompt_logprobs"][1:]
            return [float(step[str(token)]["logprob"]) for token, step in zip(token_ids[1:], steps, strict=True)]

    # -- state -------------------------------------------------------------------------------------------------------

    async def is_healthy(self) -> bool:
        """Whether the server answers and its engine lives."""
        try:
            await self._call("GET", "/health", timeout=5)
        except WorkerError:
            return False
        return True

    async def max_model_len(self) -> int:
        """The longest prompt + completion the server takes, in tokens."""
        answer = await self._call("GET", "/v1/models", timeout=10)
        with _read("/v1/models"):
            return int(answer["data"][0]["max_model_len"])

    async def version(self, timeout: float) -> str:
        """The label of the weights the engine holds. It goes through the engine's own loop, so a hanging engine is found."""
        answer = await self._call("GET", "/weight_info", timeout=timeout)
        with _read("/weight_info"):
            return str(answer["weight_version"])

    async def checksums(self) -> dict[str, str]:
        """sha256 of every parameter as the engine holds it. On CPU, packed matrices have none left to sum."""
        answer = await self._call("POST", "/weight_checker", json={"action": "checksum"})
        with _read("/weight_checker"):
            return dict(answer["checksums"])

    # -- weights -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: InFlight) -> None:
        """Stop generating: `wait` for running requests, `keep` them frozen, or `abort` them. New ones queue."""
        await self._call("POST", "/pause", params={"mode": mode})

    async def resume(self) -> None:
        await self._call("POST", "/resume", timeout=_CONNECT_S)

    async def reload(self, folder: Path) -> None:
        """Load the safetensors of `folder`, a path as the server sees it."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._call("POST", "/collective_rpc", json=body)

    async def set_version(self, label: str) -> None:
        await self._call("POST", "/update_weight_version", timeout=_CONNECT_S, json={"new_version": label})

    async def reset_prefix_cache(self, recompute_running: bool) -> None:
        """Forget cached prompts of the old weights; requests frozen in `keep` compute theirs again."""
        query = {"reset_running_requests": str(recompute_running).lower()}
        answer = await self._call("POST", "/reset_prefix_cache", params=query)
        with _read("/reset_prefix_cache"):
            success = bool(answer["success"])
        if not success:
            raise WorkerError("/reset_prefix_cache: the cache is still held by requests")

    async def load_adapter(self, name: str, folder: Path) -> None:
        await self._call("POST", "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)})

    async def unload_adapter(self, name: str) -> None:
        await self._call("POST", "/v1/unload_lora_adapter", json={"lora_name": name})

    async def close(self) -> None:
        await self._completions.aclose()
        await self._control.aclose()


@contextmanager
def _read(path: str) -> Iterator[None]:
    """WorkerError when an answer is not what vLLM gives there."""
    try:
        yield
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise WorkerError(
            f"{path}: the answer is not vLLM's ({type(error).__name__} {error}); is it vLLM 0.32 or newer?"
        ) from None


def _reason(answer: httpx.Response) -> str:
    try:
        body = answer.json()
        error = body.get("error")
        text = error["message"] if isinstance(error, dict) else body.get("detail") or error
    except (ValueError, KeyError, AttributeError):
        text = answer.text
    if "not JSON compliant" in str(text):  # how the server puts NaN
        return "its log-probs are not finite: the weights it holds are broken"
    return f"{answer.status_code} {' '.join(str(text).split())[:300]}"
