"""Completions of another run's weights are never used, and this run's are pushed again."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pool_cases import (
    RELOAD,
    SAMPLING,
    Started,
    assert_answers,
    by_version,
    canary,
    give,
    other_run_pushes,
    pool_of,
    requests,
    run,
    seeds,
    until,
    warnings,
)
from stand_in_server import GENERATE, StandIn

from grpo_lab.rollout.client import WorkerClient

pytestmark = pytest.mark.usefixtures("quick")


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
