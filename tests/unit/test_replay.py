"""Agreement of replayed gradients."""

import torch

from grpo_lab.lab.replay import Replayed, cosines, table


def test_a_zero_gradient_has_no_cosine() -> None:
    keys = ("open_fraction", "open_fraction_positive", "open_fraction_negative", "mean", "ess")
    record = {f"gate/{key}": 1.0 for key in (*keys, "signal_beyond_0.1", "signal_beyond_0.5")}
    results = [Replayed(n, 0.0, torch.tensor(g), record) for n, g in (("one", [1.0, 1.0]), ("none", [0.0, 0.0]))]
    ((first, second), third) = cosines(results)
    assert abs(first - 1) < 1e-6 and second is None and third == [None, None]
    assert table(results)[-1].split() == ["none", "-", "-"] and table(results)[-2].split() == ["one", "1.0000", "-"]
