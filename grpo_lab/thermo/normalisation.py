"""What dividing by a group's standard deviation does to the reward's gradient, for a binary reward."""

from __future__ import annotations

import math

import numpy as np


def std_gain(success: float, group_size: int, ddof: int = 1, eps: float = 1e-4) -> float:
    """c_G(q): the expected group update of A = (r - mean) / (std + eps) is c_G(q) grad q, for success rate q.

    With an exact KL in the loss the equilibrium is the Gibbs policy of beta / c_G(q). c_G lies between
    1 / sqrt(q (1 - q)) (G to infinity) and (G - 1) / sqrt(G) (q to 0 or 1, ddof 1). Source:
    Davis & Recht 2510.13651 for the limit; the finite sum is the expectation over the number of right answers.
    """
    k = np.arange(1, group_size)
    share = k / group_size * (1 - k / group_size)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, group_size + 1)))])
    log_choose = log_factorial[-1] - log_factorial[k] - log_factorial[group_size - k]
    q = min(max(success, 1e-12), 1 - 1e-12)
    weight = np.exp(log_choose + (k - 1) * math.log(q) + (group_size - k - 1) * math.log1p(-q))
    return float(np.sum(weight * share / (np.sqrt(share * group_size / (group_size - ddof)) + eps)))
