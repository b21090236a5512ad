"""Sampling with a pool of workers: every request gets its own answer, errors are asked again, none is lost or doubled."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from pool_cases import SAMPLING, assert_answers, pool_of, requests, run, seeds, until, warnings
from stand_in_server import GENERATE, StandIn

from grpo_lab.errors import RunError
from grpo_lab.rollout import client as client_module

pytestmark = pytest.mark.usefixtures("quick")


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


def test_numbers_that_are_none_are_told_as_such() -> None:
    answer = httpx.Response(400, json={"error": {"message": "Out of range float values are not JSON compliant"}})
    assert client_module._reason(answer).startswith("its log-probs are not finite")
