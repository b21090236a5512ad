"""Stop signals: where work can be given up they end it at once, elsewhere they wait for it."""

import os
import signal
import time

import pytest

from grpo_lab.signals import Interrupted, stop_signals


def test_a_signal_ends_what_can_be_given_up(capfd: pytest.CaptureFixture[str]) -> None:
    with stop_signals() as stop:
        with pytest.raises(Interrupted), stop.interrupts():
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(5)
        assert stop.name == "SIGUSR1" and not stop.interrupting
    assert "SIGUSR1: saving; once more exits at once" in capfd.readouterr().err


def test_a_signal_waits_for_what_must_be_finished(capfd: pytest.CaptureFixture[str]) -> None:
    reached = False
    with stop_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        reached = True
        assert stop.name == "SIGTERM"
        with pytest.raises(Interrupted), stop.interrupts():
            pytest.fail("entered after the signal")
    assert reached and "finishing this step" in capfd.readouterr().err


def test_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
