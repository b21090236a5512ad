"""A pool of rollout workers over stand-ins for vLLM's server: servers with faults, requests, and what must come back."""

import asyncio
import os
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import stand_in_server
from stand_in_server import GENERATE, StandIn

from grpo_lab.config import RolloutConfig
from grpo_lab.rollout import crew, worker
from grpo_lab.rollout.client import WorkerClient
from grpo_lab.rollout.pool import Pool
from grpo_lab.rollout.server import ServerProcess
from grpo_lab.rollout.worker import Worker
from grpo_lab.types import Canary, Completion, GenerationRequest, Sampling

SAMPLING = Sampling(4)
HANGS_S, PATIENT_S = 0.5, 10.0  # without an answer of a server that hangs, and of others on a busy machine
RELOAD, ADAPTER, CHECKSUMS = "/collective_rpc", "/v1/load_lora_adapter", "/weight_checker"
Scenario = Coroutine[Any, Any, None]


def run(scenario: Scenario) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))


def requests(prompts: int = 4, siblings: int = 2) -> list[GenerationRequest]:
    return [GenerationRequest((p, p + 1), 100 * p + i) for p in range(prompts) for i in range(siblings)]


def seeds(asked: Sequence[GenerationRequest]) -> list[int]:
    return [request.seed for request in asked]


def assert_answers(completions: list[Completion], asked: Sequence[GenerationRequest], version: int) -> None:
    """Every request has its own answer, at its place, of one version."""
    expected = [stand_in_server.sample(request.seed, SAMPLING.max_new_tokens) for request in asked]
    assert [(list(c.token_ids), list(c.logprobs)) for c in completions] == expected
    assert {(c.weight_version, c.weight_version_end) for c in completions} == {(version, None)}


def canary(version: int, value: float, **digests: str) -> Canary:
    score = lambda prompt, completion: (value,) * len(completion)  # noqa: E731
    return Canary(version, (5, 6, 7), (value, value), 0.1, score, lambda: digests)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch often; and no certificates, which would be read twice for every client though none is used here."""
    monkeypatch.setattr(crew, "_BEAT_S", 0.1)
    monkeypatch.setattr(worker, "_AGAIN_S", 0.1)
    monkeypatch.setattr("httpx._transports.default.create_ssl_context", lambda **_: ssl.SSLContext())


async def give(
    pool: Pool, weights: Callable[[float], Path], value: float, version: int, is_adapter: bool
) -> dict[str, float]:
    """Push the weights of a value and have them proven."""
    await pool.push(weights(value), version, is_adapter)
    return await pool.verify(canary(version, value))


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@pytest.fixture
def stand_in() -> Iterator[Callable[..., StandIn]]:
    """Start a stand-in with faults."""
    started: list[StandIn] = []

    def start(*faults: str) -> StandIn:
        started.append(StandIn(*faults))
        return started[-1]

    yield start
    for server in started:
        if not server.stopped:
            server.stop()


@pytest.fixture
def weights(tmp_path: Path) -> Callable[[float], Path]:
    """A folder of weights with this value."""

    def write(value: float) -> Path:
        folder = tmp_path / f"weights {value}"
        folder.mkdir(exist_ok=True)
        (folder / "value.txt").write_text(str(value))
        return folder

    return write


class Started:
    """A server that a worker starts here; the n-th start has the n-th faults, later ones none. A string is its program."""

    def __init__(self, folder: Path, *faults: Sequence[str] | str) -> None:
        self.starts, self._faults = 0, list(faults)
        self.server = ServerProcess(self._command, folder / "logs" / "worker.log", os.environ)
        self.server.log.parent.mkdir()

    def _command(self, socket: str) -> list[str]:
        self.starts += 1
        faults = self._faults.pop(0) if self._faults else ()
        if isinstance(faults, str):
            return [sys.executable, "-c", faults]
        return [sys.executable, "-S", str(stand_in_server.__file__), socket, *faults]

    def state(self) -> Any:
        """Process id, label of the weights, and requests of the newest server."""
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.server.socket), verify=False)) as http:
            return http.get("http://worker/stand_in").json()

    def kill(self) -> None:
        os.kill(self.state()["pid"], signal.SIGKILL)

    @property
    def paths(self) -> list[str]:
        """What the newest server was asked that is not about its state."""
        return [path for path, _ in self.state()["requests"] if path in (RELOAD, ADAPTER, GENERATE)]


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@asynccontextmanager
async def pool_of(
    *servers: Started | StandIn, longest: int = 64, hanging: StandIn | None = None, closes: bool = True, **settings: Any
) -> AsyncIterator[tuple[Pool, list[str]]]:
    """A started pool, which the scenario itself may close, and the lines it says; one of its servers may be going to hang."""
    lines: list[str] = []
    rollout = RolloutConfig(**{"worker_timeout_s": HANGS_S if hanging else PATIENT_S, **settings})
    own = [
        worker_of(server, i, PATIENT_S if hanging and server is not hanging else rollout.worker_timeout_s)
        for i, server in enumerate(servers)
    ]
    pool = Pool(own, rollout, lines.append)
    try:
        await pool.start(longest)
        yield pool, lines
    finally:
        if closes:
            await pool.close()


def worker_of(server: Started | StandIn, index: int, timeout: float) -> Worker:
    if isinstance(server, Started):
        return Worker(f"worker {index}", timeout, server=server.server)
    return Worker(f"stand-in {index}", timeout, WorkerClient(server.url))


async def other_run_pushes(server: StandIn, folder: Path) -> None:
    """Another run uses the same server; its requests in flight stay."""
    other = WorkerClient(server.url)
    await other.pause("keep")
    await other.reload(folder)
    await other.set_version("other-1")
    await other.resume()
    await other.close()


def warnings(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("warning")]


def version_of(adapter: str) -> int:
    return int(adapter.split("-")[-2])


def by_version(server: StandIn) -> dict[int, float]:
    return {version_of(name): weights for name, weights in list(server.adapters.items())}
