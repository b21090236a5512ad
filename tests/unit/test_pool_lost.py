"""Workers that die, hang or never come: others make their completions, servers are restarted, nothing outlives the pool."""

import asyncio
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from pool_cases import (
    ADAPTER,
    PATIENT_S,
    RELOAD,
    SAMPLING,
    Started,
    assert_answers,
    by_version,
    canary,
    lives,
    pool_of,
    requests,
    run,
    seeds,
    until,
    warnings,
    worker_of,
)
from stand_in_server import GENERATE, StandIn

from grpo_lab.config import ModelConfig, RolloutConfig
from grpo_lab.errors import RunError
from grpo_lab.rollout.client import WorkerClient
from grpo_lab.rollout.engines import EngineSpec

pytestmark = pytest.mark.usefixtures("quick")


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
    (logs / "worker-0.log").touch()
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
