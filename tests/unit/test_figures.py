"""Every figure of a run is written, as an image and as a drawing that names its axes."""

from pathlib import Path
from typing import Any

import pytest

from grpo_lab.evaluation.figures import draw_curves

NAMES = ("free_energy", "frontier", "gap_split", "landscape", "reward_kl")


LANDSCAPE = {
    "beta": [0.02, 0.2, 2.0], "floor_lower": [-0.96, -0.7, -0.2], "floor_upper": [-0.9, -0.65, -0.19],
    "kl": [1.8, 1.0, 0.0], "reward": [1.0, 0.8, 0.17], "heat_capacity": [0.0, 0.8, 0.1],
}  # fmt: skip


def estimate(mean: float) -> dict[str, float]:
    return {"mean": mean, "se": 0.02}


def row(rollouts: int, reward: float, kl: float, binary: bool = True) -> dict[str, Any]:
    return {
        "rollouts": rollouts,
        "beta": 0.05,
        "reward": estimate(reward),
        "kl": estimate(kl),
        "kl_rao_blackwell": estimate(kl),
        "free_energy": estimate(0.05 * kl - reward),
        "reference_reward": estimate(0.17),
        "floor": {"lower": estimate(-0.93), "upper": estimate(-0.86)},
        "landscape": LANDSCAPE,
        "gap_split": {"wasted": 0.04 * kl, "tilt": 0.9 - reward} if binary else None,
    }


def size(png: Path) -> tuple[int, int]:
    """Width and height from the file's own header."""
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_every_figure_is_written(tmp_path: Path) -> None:
    rows = [row(0, 0.17, 0.0), row(1024, 0.7, 1.9), row(2048, 0.85, 2.4)]
    paths = draw_curves(rows, tmp_path / "figures")
    assert sorted(paths) == sorted(tmp_path / "figures" / f"{name}.{kind}" for name in NAMES for kind in ("png", "svg"))
    for path in paths:
        if path.suffix == ".png":
            assert min(size(path)) > 500
        else:
            assert "nats" in path.read_text() or "rollouts" in path.read_text()


def test_rewards_that_are_not_binary_have_no_gap_split(tmp_path: Path) -> None:
    stems = {path.stem for path in draw_curves([row(0, 0.2, 0.0), row(64, 1.4, 1.0, binary=False)], tmp_path)}
    assert stems == {*NAMES} - {"gap_split"}


@pytest.mark.parametrize("count", [1, 2, 40])
def test_any_number_of_evaluations_can_be_drawn(tmp_path: Path, count: int) -> None:
    paths = draw_curves([row(i * 64, 0.5, 0.01 * i) for i in range(count)], tmp_path)
    assert len(paths) == 10


def test_crowded_checkpoints_keep_the_last_label(tmp_path: Path) -> None:
    """Checkpoints on one spot: their labels would lie over each other, so only the last is written."""
    draw_curves([row(1111, 0.5, 1.0), row(2222, 0.5, 1.0), row(3333, 0.5, 1.0)], tmp_path)
    drawing = (tmp_path / "frontier.svg").read_text()
    assert "<!-- 3,333 -->" in drawing
    assert "<!-- 1,111 -->" not in drawing and "<!-- 2,222 -->" not in drawing
