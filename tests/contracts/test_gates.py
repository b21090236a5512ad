"""What holds for every file of grpo_lab/objective/gates. A new file is found by itself."""

import pytest
import torch

from grpo_lab import plugins
from grpo_lab.errors import ConfigError
from grpo_lab.objective.gates import GateProtocol, build_gate

NAMES = plugins.names("grpo_lab.objective.gates")
LOG_RATIOS = torch.tensor([-20.0, -3.0, -1.3, -0.5, -0.21, -0.1, 0.0, 0.1, 0.19, 0.24, 1.0, 1.7, 3.0, 20.0])


@pytest.fixture(params=NAMES)
def gate(request: pytest.FixtureRequest) -> GateProtocol:
    return build_gate(request.param, {})


def test_the_shipped_gates_are_found() -> None:
    assert {"clip", "double_sided", "sigmoid"} <= set(NAMES)


@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
def test_df_is_the_derivative_of_f(gate: GateProtocol, sign: float) -> None:
    ratio = LOG_RATIOS.double().exp().requires_grad_()
    advantages = torch.full_like(ratio, sign)
    (slope,) = torch.autograd.grad(gate.f(ratio, advantages).sum(), ratio)
    assert torch.allclose(slope, gate.df(ratio, advantages).detach(), atol=1e-12)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_open_at_ratio_one(gate: GateProtocol, sign: float) -> None:
    assert gate.df(torch.ones(2, 3), torch.full((2, 3), sign)).tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_shaped_and_without_side_effects(gate: GateProtocol, dtype: torch.dtype) -> None:
    ratio = LOG_RATIOS.exp().to(dtype)
    advantages = torch.linspace(-2, 2, len(ratio)).to(dtype)
    before = ratio.clone(), advantages.clone()
    for value in (gate.f(ratio, advantages), gate.df(ratio, advantages)):
        assert value.shape == ratio.shape and torch.isfinite(value).all()
    assert torch.equal(ratio, before[0]) and torch.equal(advantages, before[1])
    assert ((gate.f(ratio, torch.zeros_like(ratio)) * 0) == 0).all()


def test_unknown_names_and_options_are_one_line(gate: GateProtocol) -> None:
    with pytest.raises(ConfigError, match="did you mean 'clip'"):
        build_gate("clp", {})
    with pytest.raises(ConfigError, match="clip_low, clip_high"):
        build_gate("clip", {"clip_hgh": 0.3})


def test_a_gate_from_outside_the_package(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "mygates.py").write_text(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Gate:\n"
        "    def f(self, ratio, advantages): return ratio\n    def df(self, ratio, advantages): return ratio * 0 + 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert build_gate("mygates:Gate", {}).df(torch.ones(1), torch.ones(1)).item() == 1
    with pytest.raises(ConfigError, match="PYTHONPATH"):
        build_gate("nowhere.gates", {})
