"""A push of weights is proven by log-probs and checksums; a worker that disagrees is pushed again, restarted, dropped."""

import asyncio
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from pool_cases import (
    CHECKSUMS,
    RELOAD,
    SAMPLING,
    Started,
    assert_answers,
    canary,
    give,
    pool_of,
    requests,
    run,
    until,
    warnings,
)
from stand_in_server import GENERATE, StandIn, digest

from grpo_lab.errors import RunError
from grpo_lab.rollout.checksums import comparable, differing

pytestmark = pytest.mark.usefixtures("quick")


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
