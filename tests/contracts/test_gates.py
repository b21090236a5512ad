"""What holds for every file of grpo_lab/objective/gates. A new file is found by itself."""

import sys
from pathlib import Path

import pytest
import torch

from grpo_lab import plugins
from grpo_lab.errors import ConfigError
from grpo_lab.objective.gates import PACKAGE, GateProtocol, build_gate

NAMES = [*plugins.names(PACKAGE), "configs.examples.own_gate:Gate"]
LOG_RATIOS = torch.tensor([-20.0, -3.0, -1.3, -0.5, -0.21, -0.1, 0.0, 0.1, 0.19, 0.24, 1.0, 1.7, 3.0, 20.0])
OLD_PROBS = [1e-9, 0.004, 0.3, 0.97]


@pytest.fixture(params=NAMES)
def gate(request: pytest.FixtureRequest) -> GateProtocol:
    return build_gate(request.param, {})


def test_the_shipped_gates_are_found() -> None:
    assert {
        "clip",
        "double_sided",
        "sigmoid",
        "truncated",
        "dual_clip",
        "total_variation",
        "probability_window",
        "none",
    } <= set(NAMES)
    assert {"erf", "arctan", "softsign"} <= set(NAMES)


@pytest.mark.parametrize("old_prob", OLD_PROBS)
@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
def test_df_is_the_derivative_of_f(gate: GateProtocol, sign: float, old_prob: float) -> None:
    ratio = LOG_RATIOS.double().exp().requires_grad_()
    advantages, old_probs = torch.full_like(ratio, sign), torch.full_like(ratio, old_prob)
    (slope,) = torch.autograd.grad(gate.f(ratio, advantages, old_probs).sum(), ratio)
    assert torch.allclose(slope, gate.df(ratio, advantages, old_probs).detach(), atol=1e-12)


@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
def test_df_is_the_slope_of_f(gate: GateProtocol, sign: float) -> None:
    """By finite differences, which autograd cannot fool; ratios that lie on a gate's edge are left out."""
    ratio = LOG_RATIOS[2:-1].double().exp()
    advantages, old_probs, h = torch.full_like(ratio, sign), torch.full_like(ratio, 0.3), 1e-6
    slope = (gate.f(ratio + h, advantages, old_probs) - gate.f(ratio - h, advantages, old_probs)) / (2 * h)
    assert torch.allclose(slope, gate.df(ratio, advantages, old_probs), atol=1e-5)


@pytest.mark.parametrize("old_prob", OLD_PROBS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_open_at_ratio_one(gate: GateProtocol, sign: float, old_prob: float) -> None:
    ones = torch.ones(2, 3)
    assert torch.equal(gate.df(ones, sign * ones, old_prob * ones), ones)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_shaped_and_without_side_effects(gate: GateProtocol, dtype: torch.dtype) -> None:
    ratio = LOG_RATIOS.exp().to(dtype)
    advantages = torch.linspace(-2, 2, len(ratio)).to(dtype)
    old_probs = torch.linspace(0, 1, len(ratio)).to(dtype)
    before = [value.clone() for value in (ratio, advantages, old_probs)]
    for value in (gate.f(ratio, advantages, old_probs), gate.df(ratio, advantages, old_probs)):
        assert value.shape == ratio.shape and torch.isfinite(value).all()
    assert all(map(torch.equal, (ratio, advantages, old_probs), before))
    assert ((gate.f(ratio, torch.zeros_like(ratio), old_probs) * 0) == 0).all()


def test_unknown_names_and_options_are_one_line() -> None:
    with pytest.raises(ConfigError, match="did you mean 'clip'"):
        build_gate("clp", {})
    with pytest.raises(ConfigError, match="clip_low, clip_high"):
        build_gate("clip", {"clip_hgh": 0.3})
    with pytest.raises(ConfigError, match="it allows level token or sequence or sequence_token"):
        build_gate("double_sided", {}, "geometric_mean")


@pytest.mark.parametrize("body, message", [
    ("def f(self, ratio, advantages, old_probs): return ratio", "has no method df"),
    ("def f(self, ratio, advantages): return ratio\n    def df(self, ratio, advantages): return ratio", "failed: TypeError"),
    ("def f(self, r, a, p): return r\n    def df(self, r, a, p): return 2 * r", "must be 1"),
])  # fmt: skip
def test_a_broken_gate_is_refused_before_anything_loads(tmp_path, monkeypatch, body: str, message: str) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "broken_gate.py").write_text(f"class Gate:\n    {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_gate", raising=False)
    with pytest.raises(ConfigError, match=message) as caught:
        build_gate("broken_gate:Gate", {})
    assert "\n" not in str(caught.value)


def test_parameters_that_close_a_gate_at_ratio_one_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"clip_high.*must be 1"):
        build_gate("clip", {"clip_high": -3.0})


def test_a_gate_from_outside_the_package(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "mygates.py").write_text(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Gate:\n"
        "    def f(self, ratio, advantages, old_probs): return ratio\n"
        "    def df(self, ratio, advantages, old_probs): return ratio * 0 + 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert build_gate("mygates:Gate", {}).df(torch.ones(1), torch.ones(1), torch.ones(1)).item() == 1
    with pytest.raises(ConfigError, match="PYTHONPATH"):
        build_gate("nowhere.gates", {})


OUTSIDE = """
import torch
class Right:
    def f(self, ratio, advantages, old_probs): return ratio.clamp(max=1.25)
    def df(self, ratio, advantages, old_probs): return (ratio <= 1.25).to(ratio.dtype)
class Wrong(Right):
    def df(self, ratio, advantages, old_probs): return (ratio <= 1.5).to(ratio.dtype)
class Shape(Right):
    def df(self, ratio, advantages, old_probs): return torch.ones(3)
class Upside(Right):
    def df(self, ratio, advantages, old_probs): return torch.where(advantages < 0, 2 - ratio, (ratio <= 1.25).to(ratio.dtype))
"""


def test_a_gate_from_outside_has_its_derivative_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gates_outside.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    build_gate("gates_outside:Right", {})  # a kink, at one of the ratios looked at
    with pytest.raises(ConfigError, match=r"ratio 1\.25 and A = 1 df is 1, but the slope of f is 0\.5"):
        build_gate("gates_outside:Wrong", {})
    with pytest.raises(ConfigError, match=r"ratio 0\.3 and A = -1 df is 1\.7, but the slope of f is 1"):
        build_gate("gates_outside:Upside", {})
    with pytest.raises(ConfigError, match="it defines Right, Wrong, Shape, Upside: write gates_outside:Right"):
        build_gate("gates_outside:Gate", {})
    with pytest.raises(ConfigError, match=r"df gave \[3\] for ratios of shape \[2\]"):
        build_gate("gates_outside:Shape", {})
