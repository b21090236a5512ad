"""The pool of rollout workers over stand-ins for vLLM's server: whoever dies, hangs or lies, no request is lost or doubled."""

import asyncio
import os
import re
import shutil
import signal
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import stand_in_server
from stand_in_server import GENERATE, StandIn, digest

from grpo_lab.config import ModelConfig, RolloutConfig
from grpo_lab.errors import RunError
from grpo_lab.rollout import client as client_module
from grpo_lab.rollout import crew, worker
from grpo_lab.rollout.checksums import comparable, differing
from grpo_lab.rollout.client import WorkerClient
from grpo_lab.rollout.engines import EngineSpec
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


@pytest.fixture(autouse=True)
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


# -- sampling --------------------------------------------------------------------------------------------------------


def test_siblings_stay_together_and_workers_share_evenly(stand_in: Callable[..., StandIn]) -> None:
    a, b = stand_in(), stand_in()

    async def scenario() -> None:
        async with pool_of(a, b) as (pool, _):
            await pool.generate(requests(4, 4), SAMPLING)
        prompts = [{given["token_ids"][0] for given in server.asked(GENERATE)} for server in (a, b)]
        assert [len(server.seeds) for server in (a, b)] == [8, 8]
        assert [len(own) for own in prompts] == [2, 2]

    run(scenario())


def test_one_prompt_is_divided_where_a_worker_would_get_more_than_its_share(stand_in: Callable[..., StandIn]) -> None:
    a, b = stand_in(), stand_in()

    async def scenario() -> None:
        async with pool_of(a, b) as (pool, _):
            assert_answers(await pool.generate(requests(1, 6), SAMPLING), requests(1, 6), 0)
        assert [len(server.seeds) for server in (a, b)] == [3, 3]

    run(scenario())


def test_answers_come_in_the_order_of_requests(stand_in: Callable[..., StandIn]) -> None:
    late, quick = stand_in("slow"), stand_in()

    async def scenario() -> None:
        async with pool_of(late, quick) as (pool, _):
            assert_answers(await pool.generate(requests(), SAMPLING), requests(), 0)
        assert sorted(late.seeds + quick.seeds) == seeds(requests())

    run(scenario())


def test_a_refused_request_fails_at_once_with_the_servers_words(stand_in: Callable[..., StandIn]) -> None:
    server = stand_in("refuse")

    async def scenario() -> None:
        async with pool_of(server) as (pool, _):
            with pytest.raises(RunError, match=r"stand-in 0 cannot answer.*400 the prompt is not to my taste"):
                await pool.generate(requests(1, 1), SAMPLING)
            await asyncio.sleep(0.1)
        assert len(server.seeds) == 1

    run(scenario())


def test_an_error_is_asked_again_and_counted(stand_in: Callable[..., StandIn]) -> None:
    server = stand_in("break once")

    async def scenario() -> None:
        async with pool_of(server) as (pool, lines):
            assert_answers(await pool.generate(requests(1, 2), SAMPLING), requests(1, 2), 0)
            assert pool.resent == 1 and not warnings(lines)
        assert len(server.seeds) == 3

    run(scenario())


def test_three_errors_of_one_request_fail(stand_in: Callable[..., StandIn]) -> None:
    server = stand_in("break always")

    async def scenario() -> None:
        async with pool_of(server) as (pool, _):
            with pytest.raises(RunError, match=r"cannot answer.*500 out of luck"):
                await pool.generate(requests(1, 1), SAMPLING)
        assert len(server.seeds) == 3

    run(scenario())


def test_an_aborted_completion_is_asked_again(stand_in: Callable[..., StandIn]) -> None:
    server = stand_in("abort once")

    async def scenario() -> None:
        async with pool_of(server) as (pool, _):
            assert_answers(await pool.generate(requests(1, 2), SAMPLING), requests(1, 2), 0)
        assert len(server.seeds) == 3

    run(scenario())


def test_a_cancelled_call_asks_no_more(stand_in: Callable[..., StandIn]) -> None:
    server = stand_in("stall")

    async def scenario() -> None:
        async with pool_of(server) as (pool, _):
            asked = asyncio.create_task(pool.generate(requests(), SAMPLING))
            await until(lambda: len(server.seeds) == len(requests()))
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            await asyncio.sleep(0.1)
            assert len(server.seeds) == len(requests()) and not pool.resent

    run(scenario())


def test_completions_share_connections_and_health_and_pushes_have_their_own(
    stand_in: Callable[..., StandIn], weights: Callable[[float], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client_module._CONNECTIONS == 512
    monkeypatch.setattr(client_module, "_CONNECTIONS", 3)
    server = stand_in("stall")

    async def scenario() -> None:
        async with pool_of(server, worker_timeout_s=1.5) as (pool, lines):
            asked = asyncio.create_task(pool.generate(requests(), SAMPLING))
            await until(lambda: server.running == 3)
            known = len(server.asked("/weight_info"))
            await until(lambda: len(server.asked("/weight_info")) > known)  # the engine is asked how it is
            assert server.running == len(server.seeds) == 3 and not warnings(lines)
            await asyncio.wait_for(pool.push(weights(-1.0), 1, False), 2)  # for which the three end
            server.faults.discard("stall")
            completions = await asked
            assert sorted(c.weight_version for c in completions) == [0] * 3 + [1] * 5
            assert_answers([replace(c, weight_version=0) for c in completions], requests(), 0)
        assert sorted(server.seeds) == seeds(requests())

    run(scenario())


# -- workers that go -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stops", "hangs"])
def test_the_requests_of_a_lost_worker_are_answered_by_the_other_once(
    how: str, stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    lost, other = stand_in(), stand_in()

    async def scenario() -> None:
        async with pool_of(lost, other, hanging=lost) as (pool, lines):
            await pool.push(weights(-1.0), 1, False)
            lost.faults.add("hang")
            asked = asyncio.create_task(pool.generate(requests(), SAMPLING))
            await until(lambda: len(lost.seeds) == 4)
            if how == "stops":
                lost.stop()
            assert_answers(await asked, requests(), 1)
            assert sorted(other.seeds) == seeds(requests())
            metrics = await pool.verify(canary(1, -1.0))
            assert (metrics["rollout/requests_resent"], metrics["rollout/workers"]) == (4, 1)
            assert not pool.has_failed
            (warning,) = warnings(lines)
            assert "stand-in 0 does not answer" in warning and "dropped, 1 left" in warning
            assert_answers(await pool.generate(requests(), SAMPLING), requests(), 1)

    run(scenario())


def test_losing_the_last_worker_fails_with_its_reason(stand_in: Callable[..., StandIn]) -> None:
    server = stand_in("stall")

    async def scenario() -> None:
        async with pool_of(server) as (pool, _):
            asked = asyncio.create_task(pool.generate(requests(), SAMPLING))
            await until(lambda: server.seeds)
            server.stop()
            with pytest.raises(RunError, match=r"no rollout worker is left: stand-in 0 does not answer \(/weight_info"):
                await asked
            with pytest.raises(RunError, match="no rollout worker is left"):
                await pool.generate(requests(), SAMPLING)
            assert pool.has_failed

    run(scenario())


@pytest.mark.parametrize("is_adapter", [False, True])
def test_a_killed_server_comes_back_with_the_newest_weights(
    is_adapter: bool, tmp_path: Path, weights: Callable[[float], Path]
) -> None:
    started = Started(tmp_path, ["stall"])

    async def scenario() -> None:
        async with pool_of(started) as (pool, lines):
            await pool.push(weights(-1.0), 1, is_adapter)
            await pool.push(weights(-2.0), 2, is_adapter)
            await pool.verify(canary(2, -2.0))
            asked = asyncio.create_task(pool.generate(requests(), SAMPLING))
            await until(lambda: started.paths.count(GENERATE) == 1 + len(requests()))  # the first is the canary
            started.kill()
            assert_answers(await asked, requests(), 2)
            loaded = ADAPTER if is_adapter else RELOAD
            assert started.paths == [loaded, GENERATE, *[GENERATE] * len(requests())]
            metrics = await pool.verify(canary(2, -2.0))
            assert (metrics["rollout/worker_restarts"], metrics["rollout/requests_resent"]) == (1, len(requests()))
            assert len(warnings(lines)) == 1 and any("worker 0 is back" in line for line in lines)

    run(scenario())


def test_an_idle_server_that_was_killed_comes_back(tmp_path: Path) -> None:
    started = Started(tmp_path)

    async def scenario() -> None:
        async with pool_of(started, worker_timeout_s=60) as (_, lines):
            label = started.state()["version"]
            assert label.endswith("-0")
            started.kill()
            await until(lambda: any("worker 0 is back" in line for line in lines))
            assert started.starts == 2
            assert started.state()["version"] == label
            assert "/resume" in [path for path, _ in started.state()["requests"]]

    run(scenario())


def test_a_server_that_cannot_be_restarted_fails_with_its_own_words(tmp_path: Path) -> None:
    started = Started(tmp_path, [], "raise SystemExit('error: no memory')", "raise SystemExit('error: still none')")

    async def scenario() -> None:
        async with pool_of(started, worker_restarts=2) as (pool, _):
            started.kill()
            with pytest.raises(RunError, match=r"error: still none.*worker\.log, after 2 restarts"):
                await pool.generate(requests(), SAMPLING)
            assert started.starts == 3

    run(scenario())


def test_without_restarts_a_killed_server_is_the_end(tmp_path: Path) -> None:
    started = Started(tmp_path)

    async def scenario() -> None:
        async with pool_of(started, worker_restarts=0) as (pool, _):
            started.kill()
            with pytest.raises(
                RunError, match=r"no rollout worker is left.*after 0 restarts; its output is in .*\.log"
            ):
                await pool.generate(requests(), SAMPLING)
            assert started.starts == 1

    run(scenario())


def test_a_server_that_cannot_start_fails_the_start(tmp_path: Path) -> None:
    started = Started(tmp_path, "raise RuntimeError('no such model')")

    async def scenario() -> None:
        async with pool_of(started):
            pass

    with pytest.raises(RunError, match="worker 0 could not start: RuntimeError: no such model; its output is in"):
        run(scenario())


def test_close_ends_started_servers_and_spares_attached_ones(tmp_path: Path, stand_in: Callable[..., StandIn]) -> None:
    started, attached = Started(tmp_path), stand_in()

    async def scenario() -> None:
        async with pool_of(started, attached):
            assert started.server.is_running
        assert not started.server.is_running
        with pytest.raises(httpx.ConnectError):
            started.paths  # noqa: B018
        assert await WorkerClient(attached.url).is_healthy()

    run(scenario())


def test_close_during_the_start_of_a_server_anew_leaves_no_process(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    mute = f"import os, pathlib, time; pathlib.Path({str(noted)!r}).write_text(str(os.getpid())); time.sleep(60)"
    started = Started(tmp_path, [], mute)

    async def scenario() -> None:
        async with pool_of(started):
            started.kill()
            await until(lambda: noted.exists() and noted.read_text())
        assert not started.server.is_running and not lives(int(noted.read_text()))
        await asyncio.sleep(0.5)
        assert started.starts == 2 and not started.server.is_running

    run(scenario())


def test_close_before_a_server_is_started_anew_waits_for_the_end_of_the_old_one(tmp_path: Path) -> None:
    started = Started(tmp_path)

    async def scenario() -> None:
        async with pool_of(started, closes=False) as (pool, lines):
            pid, guard = started.state()["pid"], started.server._process
            assert guard
            os.kill(guard.pid, signal.SIGSTOP)  # an end that takes its time
            try:
                await pool._crew.lose(pool._crew.up[0], "went")
                await until(lambda: any("restarting it" in line for line in lines))
                closing = asyncio.create_task(pool.close())
                await asyncio.sleep(0.2)
                early = closing.done() and lives(pid)
            finally:
                os.kill(guard.pid, signal.SIGCONT)
            await closing
            assert not early and not lives(pid)
            await asyncio.sleep(0.2)
            assert started.starts == 1 and not started.server.is_running

    run(scenario())


def test_close_ends_what_is_sampled_and_asks_nobody_else(stand_in: Callable[..., StandIn]) -> None:
    servers = stand_in("stall"), stand_in("stall")

    async def scenario() -> None:
        async with pool_of(*servers, closes=False) as (pool, lines):
            asked = asyncio.create_task(pool.generate(requests(), SAMPLING))
            await until(lambda: sum(server.running for server in servers) == len(requests()))
            await asyncio.wait_for(pool.close(), 2)
            with pytest.raises(RunError, match="the rollout workers were closed"):
                await asked
            assert not warnings(lines)
        assert sorted(servers[0].seeds + servers[1].seeds) == seeds(requests())

    run(scenario())


def test_a_paused_server_is_resumed_at_the_start_and_at_the_end(stand_in: Callable[..., StandIn]) -> None:
    server = stand_in()
    server.mode = "keep"

    async def scenario() -> None:
        async with pool_of(server) as (pool, _):
            assert_answers(await asyncio.wait_for(pool.generate(requests(), SAMPLING), 5), requests(), 0)
            server.mode = "wait"
        assert server.mode == ""

    run(scenario())


def test_a_dropped_server_is_left_resumed_and_without_adapters(
    stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    dropped, good = stand_in(), stand_in()

    async def scenario() -> None:
        async with pool_of(dropped, good) as (pool, lines):
            await pool.push(weights(-1.0), 1, True)
            dropped.mode = "keep"
            dropped.faults.add("ignore reloads")
            await pool.push(weights(-2.0), 2, True)
            dropped.mode, dropped.adapters[next(iter(dropped.adapters))] = "", -9.0
            assert (await pool.verify(canary(2, -2.0)))["rollout/workers"] == 1
            assert "dropped, 1 left" in warnings(lines)[-1]
            assert not dropped.mode and not dropped.adapters and by_version(good) == {2: -2.0}

    run(scenario())


@pytest.mark.parametrize("fails", [False, True])
def test_the_engine_keeps_its_logs_when_the_pool_failed(
    fails: bool, tmp_path: Path, stand_in: Callable[..., StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpo_lab.rollout.engines import vllm_server

    server, logs = stand_in(), tmp_path / "logs"
    logs.mkdir()
    settings = RolloutConfig(max_prompt_tokens=32, max_new_tokens=32)
    monkeypatch.setattr(vllm_server, "scratch_folder", lambda purpose: logs)
    monkeypatch.setattr(vllm_server, "_workers", lambda spec, logs: [worker_of(server, 0, PATIENT_S)])
    engine = vllm_server.EngineImpl(EngineSpec(tmp_path, ModelConfig(), settings))
    try:
        assert_answers(engine.generate(requests(), SAMPLING), requests(), 0)
        if fails:
            server.stop()
            with pytest.raises(RunError, match="no rollout worker is left"):
                engine.generate(requests(), SAMPLING)
    finally:
        engine.close()
    assert logs.exists() is fails


def test_an_attached_server_for_shorter_sequences_is_not_used(stand_in: Callable[..., StandIn]) -> None:
    async def alone() -> None:
        async with pool_of(stand_in(), longest=65):
            pass

    with pytest.raises(RunError, match="takes sequences of 64 tokens, this run needs 65"):
        run(alone())


def test_a_run_starts_with_the_attached_servers_that_answer(stand_in: Callable[..., StandIn]) -> None:
    dead, alive = stand_in(), stand_in()
    dead.stop()

    async def scenario() -> None:
        async with pool_of(dead, alive, worker_timeout_s=1) as (pool, lines):
            assert "stand-in 0 does not answer" in warnings(lines)[0]
            assert_answers(await pool.generate(requests(), SAMPLING), requests(), 0)

    run(scenario())


def test_a_run_waits_for_an_attached_server_that_is_not_up_yet(stand_in: Callable[..., StandIn]) -> None:
    late = stand_in()
    late.stop()
    port = int(late.url.rpartition(":")[2])
    up: list[StandIn] = []
    start = threading.Timer(0.5, lambda: up.append(StandIn(address=port)))

    async def scenario() -> None:
        start.start()
        async with pool_of(late) as (pool, lines):
            assert "waiting for it" in lines[0] and "1 of 1 up" in lines[-1] and not warnings(lines)
            assert_answers(await pool.generate(requests(), SAMPLING), requests(), 0)

    run(scenario())
    up[0].stop()


def test_no_attached_server_that_ever_answered_says_so(stand_in: Callable[..., StandIn]) -> None:
    dead = stand_in()
    dead.stop()

    async def alone() -> None:
        async with pool_of(dead, worker_timeout_s=0.5):
            pass

    with pytest.raises(RunError, match="no rollout worker can be used: stand-in 0 does not answer"):
        run(alone())


def test_an_attached_server_that_is_not_for_rollouts_says_what_to_start(stand_in: Callable[..., StandIn]) -> None:
    async def alone() -> None:
        async with pool_of(stand_in("plain")):
            pass

    with pytest.raises(RunError, match=r"stand-in 0 is no server for rollouts .*404 Not Found.*grpo-lab worker"):
        run(alone())


# -- weights ---------------------------------------------------------------------------------------------------------


def test_ignored_weights_are_pushed_again(stand_in: Callable[..., StandIn], weights: Callable[[float], Path]) -> None:
    deaf, good = stand_in("ignore next reload"), stand_in()

    async def scenario() -> None:
        async with pool_of(deaf, good) as (pool, lines):
            await pool.push(weights(-1.0), 1, False)
            metrics = await pool.verify(canary(1, -1.05))
            assert (
                "stand-in 0 differs from the learner by 1.05 nats per token (limit 0.1); giving it"
                in warnings(lines)[0]
            )
            assert metrics["rollout/workers"] == 2
            assert metrics["rollout/canary_mean"] == pytest.approx(0.05)
        assert (len(deaf.asked(RELOAD)), len(good.asked(RELOAD))) == (2, 1)

    run(scenario())


@pytest.mark.parametrize("fault", ["ignore reloads", "nan"])
def test_a_worker_that_never_agrees_is_dropped(
    fault: str, stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    deaf, good = stand_in(fault), stand_in()

    async def scenario() -> None:
        async with pool_of(deaf, good) as (pool, lines):
            await pool.push(weights(-1.0), 1, False)
            metrics = await pool.verify(canary(1, -1.0))
            assert all("stand-in 0 differs from the learner" in warning for warning in warnings(lines))
            assert len(warnings(lines)) == 2 and "dropped, 1 left" in warnings(lines)[1]
            assert (metrics["rollout/workers"], metrics["rollout/canary_max"]) == (1, 0)
            await pool.generate(requests(), SAMPLING)
        assert len(deaf.asked(RELOAD)) == 2 and not deaf.seeds

    run(scenario())


@pytest.mark.parametrize(("fault", "gap"), [("ignore reloads", "1"), ("nan", "inf")])
def test_when_no_worker_agrees_the_run_fails(
    fault: str, gap: str, stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    async def scenario() -> None:
        async with pool_of(stand_in(fault)) as (pool, _):
            await pool.push(weights(-1.0), 1, False)
            with pytest.raises(RunError, match=rf"differs from the learner by {gap} nats per token \(limit 0.1\)"):
                await pool.verify(canary(1, -1.0))

    run(scenario())


def test_a_started_worker_that_never_agrees_is_restarted_and_proven(
    tmp_path: Path, weights: Callable[[float], Path]
) -> None:
    started = Started(tmp_path, ["ignore reloads"], ["ignore reloads"])

    async def scenario() -> None:
        async with pool_of(started) as (pool, lines):
            await pool.push(weights(-1.0), 1, False)
            metrics = await pool.verify(canary(1, -1.0))
            assert (metrics["rollout/worker_restarts"], metrics["rollout/workers"]) == (2, 1)
            assert len(warnings(lines)) == 3  # pushed again, then two restarts
            assert_answers(await pool.generate(requests(), SAMPLING), requests(), 1)

    run(scenario())


def test_a_version_that_is_not_taken_is_pushed_twice_and_the_worker_lost(
    stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    deaf, good = stand_in("ignore versions"), stand_in()

    async def scenario() -> None:
        async with pool_of(deaf, good) as (pool, lines):
            await pool.push(weights(-1.0), 3, False)
            assert "stand-in 0 did not take weight version 3 twice: holds weights" in warnings(lines)[0]
            assert re.search(r"holds weights 'default' after '\w+-3' was pushed", warnings(lines)[0])
            assert_answers(await pool.generate(requests(), SAMPLING), requests(), 3)
        assert len(deaf.asked(RELOAD)) == 2 and not deaf.seeds

    run(scenario())


def test_a_push_that_was_missed_within_the_limit_is_found_and_pushed_again(
    stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    deaf, good = stand_in(), stand_in()

    async def scenario() -> None:
        async with pool_of(deaf, good) as (pool, lines):
            await give(pool, weights, -1.0, 1, is_adapter=False)
            deaf.faults.add("ignore next reload")
            await pool.push(weights(-1.01), 2, False)
            metrics = await pool.verify(canary(2, -1.01))
            (warning,) = warnings(lines)
            assert "stand-in 0 gives the very log-probs it gave before the push" in warning
            assert (metrics["rollout/workers"], metrics["rollout/canary_max"], deaf.value) == (2, 0, -1.01)
        assert (len(deaf.asked(RELOAD)), len(good.asked(RELOAD))) == (3, 2)

    run(scenario())


def test_a_worker_whose_log_probs_never_move_is_dropped(
    stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    server = stand_in()

    async def scenario() -> None:
        async with pool_of(server) as (pool, _):
            await give(pool, weights, -1.0, 1, is_adapter=False)
            server.faults.add("ignore reloads")
            await pool.push(weights(-1.01), 2, False)
            with pytest.raises(RunError, match="gives the very log-probs it gave before the push"):
                await pool.verify(canary(2, -1.01))

    run(scenario())


def test_log_probs_need_not_move_where_the_learners_did_not(
    stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    server = stand_in()

    async def scenario() -> None:
        async with pool_of(server) as (pool, lines):
            for version in (1, 2):
                await pool.push(weights(-1.0), version, False)
                await pool.verify(canary(version, -1.0))
            assert not warnings(lines)
        assert len(server.asked(RELOAD)) == 2

    run(scenario())


def test_the_canary_goes_before_completions(stand_in: Callable[..., StandIn], weights: Callable[[float], Path]) -> None:
    server = stand_in()

    async def scenario() -> None:
        async with pool_of(server) as (pool, _):
            await give(pool, weights, -1.0, 1, is_adapter=False)
            await pool.generate(requests(1, 1), SAMPLING)
        assert [given.get("priority", 0) for given in server.asked(GENERATE)] == [-1, 0]

    run(scenario())


def test_a_folder_that_an_attached_server_cannot_read_is_named(
    stand_in: Callable[..., StandIn], tmp_path: Path
) -> None:
    server = stand_in()

    async def scenario() -> None:
        async with pool_of(server) as (pool, _):
            with pytest.raises(
                RunError, match=r"twice: cannot load .*/none: .*can it read that folder\? rollout.weights"
            ):
                await pool.push(tmp_path / "none", 1, False)
            assert not server.mode  # others can use it

    run(scenario())


def test_different_bytes_behind_equal_logprobs_fail(
    stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    async def scenario() -> None:
        async with pool_of(stand_in(), stand_in("other checksums")) as (pool, _):
            await pool.push(weights(-1.0), 1, False)
            with pytest.raises(
                RunError, match=r"stand-in 0 and stand-in 1 hold different weights.*1 tensors, first rank 0:layer"
            ):
                await pool.verify(canary(1, -1.0))

    run(scenario())


@pytest.mark.parametrize(
    ("in_flight", "versions", "asked_again"), [("wait", (1, None), 0), ("keep", (1, 2), 0), ("abort", (2, None), 8)]
)
def test_requests_running_at_a_push(
    in_flight: str,
    versions: tuple[int, int | None],
    asked_again: int,
    stand_in: Callable[..., StandIn],
    weights: Callable[[float], Path],
) -> None:
    server = stand_in("stall")

    async def scenario() -> None:
        async with pool_of(server, in_flight=in_flight) as (pool, _):
            await pool.push(weights(-1.0), 1, False)
            asked = asyncio.create_task(pool.generate(requests(), SAMPLING))
            await until(lambda: server.running == len(requests()))
            await pool.push(weights(-2.0), 2, False)
            server.faults.discard("stall")
            assert {(c.weight_version, c.weight_version_end) for c in await asked} == {versions}
        assert len(server.seeds) == len(requests()) + asked_again

    run(scenario())


@pytest.mark.parametrize("faults", [(), ("sharded",), ("packed",)])
@pytest.mark.parametrize("held", [-1.0, -2.0])
def test_bytes_that_are_not_the_learners_fail_where_they_can_be_compared(
    faults: Sequence[str], held: float, stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    server = stand_in(*faults)

    async def scenario() -> None:
        async with pool_of(server) as (pool, lines):
            await pool.push(weights(-1.0), 1, False)
            proof = canary(1, -1.0, layer=digest(held), other=digest("of no worker"))
            if held != -1 and not faults:
                with pytest.raises(
                    RunError, match=r"stand-in 0 does not hold the learner's bytes \(1 tensors, first la"
                ):
                    await pool.verify(proof)
            else:
                assert (await pool.verify(proof))["rollout/workers"] == 1
                await pool.push(weights(-1.5), 2, False)
                await pool.verify(canary(2, -1.5, layer=digest("once a run is enough")))
                assert not warnings(lines)
        assert len(server.asked(CHECKSUMS)) == 1

    run(scenario())


def test_a_worker_that_hangs_at_a_push_is_dropped(
    stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    lost, good = stand_in(), stand_in()

    async def scenario() -> None:
        async with pool_of(lost, good, hanging=lost) as (pool, lines):
            lost.faults.add("hang")
            asked = asyncio.create_task(pool.generate(requests(), SAMPLING))
            await until(lambda: lost.running == 4)
            await pool.push(weights(-1.0), 1, False)  # which waits for running requests
            assert "stand-in 0 did not take weight version 1 twice: does not answer" in warnings(lines)[0]
            assert len(await asked) == len(requests())
            assert_answers(await pool.generate(requests(), SAMPLING), requests(), 1)
        assert not lost.asked(RELOAD)

    run(scenario())


def test_a_server_killed_at_a_push_comes_back_with_its_weights(
    tmp_path: Path, stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    started, other = Started(tmp_path, ["slow push"]), stand_in()

    async def scenario() -> None:
        async with pool_of(started, other) as (pool, lines):
            push = asyncio.create_task(pool.push(weights(-1.0), 1, False))
            await until(lambda: RELOAD in started.paths)
            started.kill()
            await push
            assert_answers(await pool.generate(requests(), SAMPLING), requests(), 1)
            await until(lambda: any("worker 0 is back" in line for line in lines))
            assert started.paths == [RELOAD]
            assert (await pool.verify(canary(1, -1.0)))["rollout/workers"] == 2

    run(scenario())


# -- weights of others -----------------------------------------------------------------------------------------------


def test_requests_that_another_runs_push_reached_are_asked_again_with_this_runs_weights(
    stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    server, other = stand_in("stall"), stand_in("stall")

    async def scenario() -> None:
        async with pool_of(server, other) as (pool, lines):
            await give(pool, weights, -1.0, 1, is_adapter=False)
            asked = asyncio.create_task(pool.generate(requests(4, 4), SAMPLING))
            await until(lambda: server.running == 8 and other.running == 8)
            await other_run_pushes(server, weights(-9.0))  # between the first and the last token of eight
            server.faults.discard("stall")
            other.faults.discard("stall")
            assert_answers(await asked, requests(4, 4), 1)
            (warning,) = warnings(lines)
            assert "stand-in 0 answers with weights 'other-1', which this run did not push; giving it" in warning
            assert (server.value, pool.resent, len(pool._crew.up)) == (-1.0, 8, 2)
            assert [worker.load for worker in pool._crew.up] == [0, 0]
        loaded = [given["kwargs"]["weights_path"] for given in server.asked(RELOAD)]
        assert loaded == [str(weights(value)) for value in (-1.0, -9.0, -1.0)]
        assert len(other.asked(RELOAD)) == 1

    run(scenario())


@pytest.mark.parametrize(
    ("who", "in_flight"), [("another run", "keep"), ("another run", "abort"), ("its supervisor", "wait")]
)
def test_a_server_that_has_others_weights_gets_this_runs_again_once(
    who: str, in_flight: str, stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    server = stand_in("slow")

    async def scenario() -> None:
        async with pool_of(server, in_flight=in_flight) as (pool, lines):
            await pool.push(weights(-1.0), 1, False)
            await give(pool, weights, -2.0, 2, is_adapter=False)
            if who == "another run":
                await other_run_pushes(server, weights(-9.0))
            else:
                server.restart()
            pushes = len(server.asked(RELOAD))
            assert_answers(await pool.generate(requests(), SAMPLING), requests(), 2)
            assert len(server.asked(RELOAD)) == pushes + 1 and server.value == -2
            (warning,) = warnings(lines)
            foreign = "other-1" if who == "another run" else "default"
            assert f"stand-in 0 answers with weights '{foreign}', which this run did not push" in warning
            proofs = [given for given in server.asked(GENERATE) if "prompt_logprobs" in given["sampling_params"]]
            assert len(proofs) == 2  # of the push, and of the weights given again

    run(scenario())


def test_another_runs_label_of_the_same_version_is_foreign(
    stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    server = stand_in()

    async def scenario() -> None:
        async with pool_of(server) as (first, _), pool_of(server) as (second, _):
            await first.push(weights(-1.0), 1, False)
            await second.push(weights(-2.0), 1, False)
            assert_answers(await first.generate(requests(), SAMPLING), requests(), 1)
            assert server.value == -1 and first.resent == len(requests())
            assert_answers(await second.generate(requests(), SAMPLING), requests(), 1)
            assert server.value == -2

    run(scenario())


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("ignore versions", "holds weights 'other-1'"), ("ignore reloads", "differs from the learner by 8")],
)
def test_a_worker_that_does_not_take_this_runs_weights_again_is_lost(
    fault: str, reason: str, stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    lost, good = stand_in("slow"), stand_in("slow")

    async def scenario() -> None:
        async with pool_of(lost, good) as (pool, lines):
            await give(pool, weights, -1.0, 1, is_adapter=False)
            await other_run_pushes(lost, weights(-9.0))
            lost.faults.add(fault)
            assert_answers(await pool.generate(requests(), SAMPLING), requests(), 1)
            assert "does not take them again" in warnings(lines)[-1] and reason in warnings(lines)[-1]
            assert len(lost.asked(RELOAD)) == 3 and len(pool._crew.up) == 1
        assert sorted(good.seeds) == seeds(requests())

    run(scenario())


def test_a_started_server_that_does_not_take_this_runs_weights_again_is_restarted(
    tmp_path: Path, weights: Callable[[float], Path]
) -> None:
    started = Started(tmp_path)

    async def scenario() -> None:
        async with pool_of(started) as (pool, lines):
            await give(pool, weights, -1.0, 1, is_adapter=False)
            stranger = WorkerClient("http://worker", started.server.socket)
            await stranger.set_version("other-1")
            await stranger.close()
            shutil.rmtree(weights(-1.0))
            asked = asyncio.create_task(pool.generate(requests(), SAMPLING))
            await until(lambda: any("restarting it" in line for line in lines))
            weights(-1.0)
            assert_answers(await asked, requests(), 1)
            assert started.starts == 2

    run(scenario())


def test_an_adapter_that_its_supervisor_made_a_server_forget_is_loaded_again(
    stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    server = stand_in()

    async def scenario() -> None:
        async with pool_of(server) as (pool, _):
            await give(pool, weights, -1.0, 1, is_adapter=True)
            server.restart()
            assert_answers(await pool.generate(requests(), SAMPLING), requests(), 1)
            assert by_version(server) == {1: -1.0}

    run(scenario())


def test_a_forgotten_adapter_does_not_keep_a_server_from_the_next(
    stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    server = stand_in()

    async def scenario() -> None:
        async with pool_of(server) as (pool, _):
            await pool.push(weights(-1.0), 1, True)
            server.restart()
            await pool.push(weights(-2.0), 2, True)
            assert (await pool.verify(canary(2, -2.0)))["rollout/workers"] == 1
            assert_answers(await pool.generate(requests(), SAMPLING), requests(), 2)
            assert by_version(server) == {2: -2.0}

    run(scenario())


# -- checksums -------------------------------------------------------------------------------------------------------


def test_equal_checksums_do_not_differ() -> None:
    sums = {"rank 0:a": digest(1), "rank 0:b": digest(2)}
    assert differing({}, {"a": digest(1)}) == []
    assert differing({"one": sums, "two": dict(sums)}, {"a": digest(1), "b": digest(2), "c": digest(3)}) == []
    assert differing({"one": sums}, {}) == []


def test_checksums_of_two_workers_differ_by_value_and_by_name() -> None:
    sums = {"rank 0:a": digest(1), "rank 0:b": digest(2)}
    workers = {"one": sums, "two": sums | {"rank 0:b": digest(3)}, "three": {"rank 0:a": digest(1)}, "four": sums}
    assert differing(workers, {}) == [
        "one and two hold different weights after the same push (1 tensors, first rank 0:b)",
        "one and three hold different weights after the same push (1 tensors, first rank 0:b)",
    ]
    assert len(differing({"one": {"rank 0:a": digest(1)}, "two": sums}, {})) == 1


def test_checksums_that_are_not_the_learners_name_the_worker() -> None:
    sums = {"rank 0:b": digest(1), "rank 0:a": digest(2)}
    assert differing({"one": sums}, {"a": digest(0), "b": digest(0)}) == [
        "one does not hold the learner's bytes (2 tensors, first a)"
    ]


def test_only_whole_unpacked_tensors_of_the_learners_name_are_comparable() -> None:
    learner = {"norm": digest(1), "head": digest(2), "q": digest(3)}
    sums = {"rank 0:norm": digest(9), "rank 0:head": digest(""), "rank 0:qkv": digest(4)}
    assert comparable(sums, learner) == {"norm": digest(9)}
    assert comparable(sums | {"rank 1:norm": digest(1)}, learner) == {}
    assert comparable({}, learner) == {}


# -- adapters --------------------------------------------------------------------------------------------------------


def version_of(adapter: str) -> int:
    return int(adapter.split("-")[-2])


def by_version(server: StandIn) -> dict[int, float]:
    return {version_of(name): weights for name, weights in list(server.adapters.items())}


def test_an_adapter_stays_as_long_as_a_request_uses_it(
    stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    server = stand_in("stall")

    async def scenario() -> None:
        async with pool_of(server) as (pool, _):
            await pool.push(weights(-1.0), 1, True)
            asked = asyncio.create_task(pool.generate(requests(1, 1), SAMPLING))
            await until(lambda: server.running)
            await pool.push(weights(-2.0), 2, True)
            assert server.running
            assert by_version(server) == {1: -1.0, 2: -2.0}
            server.faults.discard("stall")
            assert_answers(await asked, requests(1, 1), 1)  # though the server holds version 2 when it ends
            assert_answers(await pool.generate(requests(1, 1), SAMPLING), requests(1, 1), 2)
            await pool.push(weights(-3.0), 3, True)
            assert by_version(server) == {3: -3.0}
            assert (await pool.verify(canary(3, -3.0)))["rollout/canary_max"] == 0
        assert [version_of(given["model"]) for given in server.asked(GENERATE)] == [1, 2, 3]
        assert not server.asked("/pause")

    run(scenario())


def test_requests_that_come_during_the_push_of_an_adapter_are_answered(
    stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    quick, late = stand_in(), stand_in()

    async def scenario() -> None:
        async with pool_of(quick, late) as (pool, _):
            await pool.push(weights(-1.0), 1, True)
            late.faults.add("hold push")
            push = asyncio.create_task(pool.push(weights(-2.0), 2, True))
            await until(lambda: set(by_version(quick)) == {2})
            completions = await pool.generate(requests(), SAMPLING)
            assert not push.done()
            assert_answers([replace(c, weight_version=0) for c in completions], requests(), 0)
            assert sorted(c.weight_version for c in completions) == [1] * 4 + [2] * 4
            late.faults.discard("hold push")
            await push
        assert {version_of(given["model"]) for given in late.asked(GENERATE)} == {1}

    run(scenario())


def test_an_ignored_adapter_is_pushed_again(stand_in: Callable[..., StandIn], weights: Callable[[float], Path]) -> None:
    server = stand_in("ignore next reload")

    async def scenario() -> None:
        async with pool_of(server) as (pool, _):
            await pool.push(weights(-1.0), 1, True)
            assert (await pool.verify(canary(1, -1.0)))["rollout/workers"] == 1
            assert by_version(server) == {1: -1.0}
        first, second = [given["lora_name"] for given in server.asked(ADAPTER)]
        assert first != second

    run(scenario())


def test_a_second_run_can_push_adapters_to_the_same_server(
    stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    server = stand_in()

    async def scenario() -> None:
        for value in (-1.0, -2.0):
            async with pool_of(server) as (pool, _):
                await pool.push(weights(value), 1, True)
                assert (await pool.verify(canary(1, value)))["rollout/workers"] == 1
            assert not server.adapters  # it is let go without them

    run(scenario())


def test_a_worker_that_hangs_at_the_canary_is_dropped(
    stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    lost, good = stand_in(), stand_in()

    async def scenario() -> None:
        async with pool_of(lost, good, hanging=lost) as (pool, lines):
            await pool.push(weights(-1.0), 1, False)
            lost.faults.add("hang")
            metrics = await asyncio.wait_for(pool.verify(canary(1, -1.0)), 5)
            assert metrics["rollout/workers"] == 1 and "does not answer" in warnings(lines)[-1]

    run(scenario())


def test_a_worker_that_cannot_sum_its_weights_does_not_end_the_run(
    stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    async def scenario() -> None:
        async with pool_of(stand_in("broken checksums"), stand_in()) as (pool, _):
            await pool.push(weights(-1.0), 1, False)
            assert (await pool.verify(canary(1, -1.0)))["rollout/workers"] >= 1

    run(scenario())


def test_a_request_is_not_sent_to_a_worker_lost_a_moment_before(stand_in: Callable[..., StandIn]) -> None:
    lost, good = stand_in(), stand_in()

    async def scenario() -> None:
        async with pool_of(lost, good) as (pool, _):
            lost.faults.add("hang")
            asked = asyncio.create_task(pool.generate(requests(), SAMPLING))
            await asyncio.gather(asyncio.sleep(0), pool._crew.lose(pool._crew.up[0], "went"))
            assert_answers(await asyncio.wait_for(asked, 0.7), requests(), 0)

    run(scenario())


def test_a_restart_that_fails_unexpectedly_fails_the_run(tmp_path: Path) -> None:
    started = Started(tmp_path)

    async def scenario() -> None:
        async with pool_of(started) as (pool, _):
            pid = started.state()["pid"]
            shutil.rmtree(started.server.log.parent)
            started.server.log.parent.write_text("in the way")
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(RunError, match="no rollout worker is left"):
                await asyncio.wait_for(pool.generate(requests(), SAMPLING), 1.5)

    run(scenario())


def test_numbers_that_are_none_are_told_as_such() -> None:
    answer = httpx.Response(400, json={"error": {"message": "Out of range float values are not JSON compliant"}})
    assert client_module._reason(answer).startswith("its log-probs are not finite")
