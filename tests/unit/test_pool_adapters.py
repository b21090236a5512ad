"""Adapters on a pool of workers: each lives as long as a request uses it, and several runs can push theirs."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pool_cases import ADAPTER, SAMPLING, assert_answers, by_version, canary, pool_of, requests, run, until, version_of
from stand_in_server import GENERATE, StandIn

pytestmark = pytest.mark.usefixtures("quick")


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
