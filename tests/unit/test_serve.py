"""Workers by hand: their ports, the files that announce them, how they end. The servers are plain commands here."""

import os
import socket
import sys
import time
from pathlib import Path

import pytest

from grpo_lab.cluster.serve import Announced, Place, _Server
from grpo_lab.errors import ConfigError
from grpo_lab.rollout.server import gpu_shares


def taken() -> socket.socket:
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    held.listen()
    return held


def test_ports_follow_each_other_or_are_free_ones() -> None:
    free = Place(port=0, count=3).ports()
    assert len(set(free)) == 3 and min(free) > 1023
    with taken() as held:
        after = held.getsockname()[1]
    assert Place(port=after, count=1).ports() == [after]


def test_a_taken_port_is_refused_by_its_number() -> None:
    with taken() as held:
        port = held.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port ({port}|{port - 1}): cannot listen there"):
            Place(port=port - 1, count=2).ports()
    with pytest.raises(ConfigError, match="address of this machine"):
        Place(host="192.0.2.1", port=0).ports()


def test_addresses_come_and_go_whole(tmp_path: Path) -> None:
    with Announced(tmp_path) as announced:
        announced.add("http://node1:8000")
        announced.add("http://node1:8001")
        assert {file.read_text() for file in tmp_path.glob("*.url")} == {"http://node1:8000\n", "http://node1:8001\n"}
        announced.withdraw("http://node1:8000")
        assert [file.name for file in tmp_path.iterdir()] == ["node1-8001.url"]
    assert not list(tmp_path.iterdir())
    with Announced(None) as nowhere:
        nowhere.add("http://node1:8000")


def test_a_server_that_is_not_up_ends_at_once(tmp_path: Path) -> None:
    patient = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(99)"
    )
    server = _Server([sys.executable, "-c", patient], os.environ, "http://127.0.0.1:9", tmp_path / "log")
    deadline = time.monotonic() + 20
    while "on" not in (tmp_path / "log").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.status is None and not server.comes_up()
    start = time.monotonic()
    server.ask_to_end()
    server.wait()
    assert server.status is not None and time.monotonic() - start < 5


def test_a_server_that_ends_keeps_its_status_and_output(tmp_path: Path) -> None:
    server = _Server(
        [sys.executable, "-c", "print('why'); exit(3)"], os.environ, "http://127.0.0.1:9", tmp_path / "log"
    )
    server.wait()
    assert server.status == 3 and (tmp_path / "log").read_text() == "why\n"
    server.ask_to_end()


def test_too_few_gpus_for_workers_alone() -> None:
    assert gpu_shares(["0", "1"], 0, 2, 1) == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    with pytest.raises(ConfigError, match=r"--count 3 workers of rollout.worker_gpus=1 need 3 GPUs, 2 are visible"):
        gpu_shares(["0", "1"], 0, 3, 1)
