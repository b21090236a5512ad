"""The pool of rollout workers over stand-ins for vLLM's server: whoever dies, hangs or lies, no request is lost or doubled."""

import asyncio
import json
import os
import shutil
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import stand_in_server
from stand_in_server import GENERATE, StandIn

from grpo_lab.config import RolloutConfig
from grpo_lab.errors import RunError
from grpo_lab.rollout.client import WorkerClient
from grpo_lab.rollout.pool import Pool
from grpo_lab.rollout.server import ServerProcess
from grpo_lab.rollout.worker import Worker
from grpo_lab.types import Canary, Completion, GenerationRequest, Sampling

SAMPLING = Sampling(4)
RELOAD, ADAPTER = "/collective_rpc", "/v1/load_lora_adapter"
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


def canary(version: int, value: float) -> Canary:
    return Canary(version, (5, 6, 7), (value, value), 0.1)


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
    """A worker whose server is started here; the n-th start has the n-th faults, later ones none. A string is its program."""

    def __init__(self, folder: Path, *faults: Sequence[str] | str) -> None:
        self.ports, self._faults = list[int](), list(faults)
        self.server = ServerProcess(self._command, folder / "logs" / "worker.log", os.environ)
        self.server.log.parent.mkdir()
        self.worker = Worker("worker 0", server=self.server)

    def _command(self, port: int) -> list[str]:
        self.ports.append(port)
        faults = self._faults.pop(0) if self._faults else ()
        if isinstance(faults, str):
            return [sys.executable, "-c", faults]
        return [sys.executable, str(stand_in_server.__file__), str(port), *faults]

    def _state(self) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[-1]}/stand_in") as answer:
            return json.load(answer)

    def kill(self) -> None:
        os.kill(self._state()["pid"], signal.SIGKILL)

    @property
    def paths(self) -> list[str]:
        """What the newest server was asked that is not about its state."""
        return [path for path, _ in self._state()["requests"] if path in (RELOAD, ADAPTER, GENERATE)]


@asynccontextmanager
async def pool_of(
    *workers: Worker | StandIn, longest: int = 64, **settings: Any
) -> AsyncIterator[tuple[Pool, list[str]]]:
    """A started pool and the lines it says."""
    lines: list[str] = []
    own = [w if isinstance(w, Worker) else Worker(f"stand-in {i}", WorkerClient(w.url)) for i, w in enumerate(workers)]
    pool = Pool(own, RolloutConfig(**{"worker_timeout_s": 0.5, **settings}), lines.append)
    try:
        await pool.start(longest)
        yield pool, lines
    finally:
        await pool.close()


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


# -- workers that go -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stops", "hangs"])
def test_the_requests_of_a_lost_worker_are_answered_by_the_other_once(
    how: str, stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    lost, other = stand_in(), stand_in()

    async def scenario() -> None:
        async with pool_of(lost, other) as (pool, lines):
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

    run(scenario())


@pytest.mark.parametrize("is_adapter", [False, True])
def test_a_killed_server_comes_back_with_the_newest_weights(
    is_adapter: bool, tmp_path: Path, weights: Callable[[float], Path]
) -> None:
    started = Started(tmp_path, ["stall"])

    async def scenario() -> None:
        async with pool_of(started.worker) as (pool, lines):
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
        async with pool_of(started.worker, worker_timeout_s=60) as (_, lines):
            started.kill()
            await until(lambda: any("worker 0 is back" in line for line in lines))
            assert len(started.ports) == 2

    run(scenario())


def test_a_server_that_cannot_be_restarted_fails_with_its_own_words(tmp_path: Path) -> None:
    started = Started(tmp_path, [], "raise SystemExit('error: no memory')", "raise SystemExit('error: still none')")

    async def scenario() -> None:
        async with pool_of(started.worker, worker_restarts=2) as (pool, _):
            started.kill()
            with pytest.raises(RunError, match=r"error: still none.*worker\.log, after 2 restarts"):
                await pool.generate(requests(), SAMPLING)
            assert len(started.ports) == 3

    run(scenario())


def test_without_restarts_a_killed_server_is_the_end(tmp_path: Path) -> None:
    started = Started(tmp_path)

    async def scenario() -> None:
        async with pool_of(started.worker, worker_restarts=0) as (pool, _):
            started.kill()
            with pytest.raises(
                RunError, match=r"no rollout worker is left.*after 0 restarts; its output is in .*\.log"
            ):
                await pool.generate(requests(), SAMPLING)
            assert len(started.ports) == 1

    run(scenario())


def test_a_server_that_cannot_start_fails_the_start(tmp_path: Path) -> None:
    started = Started(tmp_path, "raise RuntimeError('no such model')")

    async def scenario() -> None:
        async with pool_of(started.worker):
            pass

    with pytest.raises(RunError, match="worker 0 could not start: RuntimeError: no such model; its output is in"):
        run(scenario())


def test_close_ends_started_servers_and_spares_attached_ones(tmp_path: Path, stand_in: Callable[..., StandIn]) -> None:
    started, attached = Started(tmp_path), stand_in()

    async def scenario() -> None:
        async with pool_of(started.worker, attached):
            assert started.server.is_running
        assert not started.server.is_running
        with pytest.raises(OSError):
            started.paths  # noqa: B018
        assert await WorkerClient(attached.url).is_healthy()

    run(scenario())


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
        async with pool_of(dead, alive) as (pool, lines):
            assert "stand-in 0 does not answer" in warnings(lines)[0]
            assert_answers(await pool.generate(requests(), SAMPLING), requests(), 0)

    run(scenario())


# -- weights ---------------------------------------------------------------------------------------------------------


def test_ignored_weights_are_pushed_again(stand_in: Callable[..., StandIn], weights: Callable[[float], Path]) -> None:
    deaf, good = stand_in("ignore next reload"), stand_in()

    async def scenario() -> None:
        async with pool_of(deaf, good) as (pool, lines):
            await pool.push(weights(-1.0), 1, False)
            metrics = await pool.verify(canary(1, -1.05))
            assert "stand-in 0: its log-probs are not the learner's" in warnings(lines)[0]
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
            assert "differs from the learner" in warnings(lines)[1]
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
        async with pool_of(started.worker) as (pool, lines):
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
            assert "did not take weight version 3 twice: holds weight version 0" in warnings(lines)[0]
            assert_answers(await pool.generate(requests(), SAMPLING), requests(), 3)
        assert len(deaf.asked(RELOAD)) == 2 and not deaf.seeds

    run(scenario())


def test_different_bytes_behind_equal_logprobs_fail(
    stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    async def scenario() -> None:
        async with pool_of(stand_in(), stand_in("other checksums")) as (pool, _):
            await pool.push(weights(-1.0), 1, False)
            with pytest.raises(
                RunError, match=r"stand-in 0 and stand-in 1 hold different weights.*1 tensors, first layer"
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


def test_a_worker_that_hangs_at_a_push_is_dropped(
    stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    lost, good = stand_in(), stand_in()

    async def scenario() -> None:
        async with pool_of(lost, good) as (pool, lines):
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
        async with pool_of(started.worker, other) as (pool, lines):
            push = asyncio.create_task(pool.push(weights(-1.0), 1, False))
            await until(lambda: RELOAD in started.paths)
            started.kill()
            await push
            assert_answers(await pool.generate(requests(), SAMPLING), requests(), 1)
            await until(lambda: any("worker 0 is back" in line for line in lines))
            assert started.paths == [RELOAD]
            assert (await pool.verify(canary(1, -1.0)))["rollout/workers"] == 2

    run(scenario())


def by_version(server: StandIn) -> dict[int, float]:
    return {int(name.rsplit("-")[-1]): weights for name, weights in server.adapters.items()}


# -- adapters --------------------------------------------------------------------------------------------------------


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
        assert [given["model"].rsplit("-")[-1] for given in server.asked(GENERATE)] == ["1", "2", "3"]
        assert not server.asked("/pause")

    run(scenario())


def test_requests_that_come_during_the_push_of_an_adapter_are_answered(
    stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    quick, late = stand_in(), stand_in("slow push")

    async def scenario() -> None:
        async with pool_of(quick, late) as (pool, _):
            await pool.push(weights(-1.0), 1, True)
            push = asyncio.create_task(pool.push(weights(-2.0), 2, True))
            await until(lambda: quick.version == "2" and len(by_version(quick)) == 2)
            assert len(await pool.generate(requests(), SAMPLING)) == len(requests())
            await push

    run(scenario())


def test_an_ignored_adapter_is_pushed_again(stand_in: Callable[..., StandIn], weights: Callable[[float], Path]) -> None:
    server = stand_in("ignore next reload")

    async def scenario() -> None:
        async with pool_of(server) as (pool, _):
            await pool.push(weights(-1.0), 1, True)
            assert (await pool.verify(canary(1, -1.0)))["rollout/workers"] == 1

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

    run(scenario())


def test_a_worker_that_hangs_at_the_canary_is_dropped(
    stand_in: Callable[..., StandIn], weights: Callable[[float], Path]
) -> None:
    lost, good = stand_in(), stand_in()

    async def scenario() -> None:
        async with pool_of(lost, good) as (pool, lines):
            await pool.push(weights(-1.0), 1, False)
            lost.faults.add("hang")
            metrics = await asyncio.wait_for(pool.verify(canary(1, -1.0)), 2.5)
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
        async with pool_of(started.worker) as (pool, _):
            shutil.rmtree(started.server.log.parent)
            started.kill()
            with pytest.raises(RunError, match="no rollout worker is left"):
                await asyncio.wait_for(pool.generate(requests(), SAMPLING), 1.5)

    run(scenario())
