"""What dividing by a group's standard deviation does to the reward's gradient, for a binary reward."""

from __future__ import annotations

import math

import numpy as np


def std_gain(success: float, group_size: int, ddof: int = 1, eps: float = 1e-4) -> float:
    """c_G(q): the expected group update of A = (r - mean) / (std + eps) is c_G(q) grad q, for success rate q.

    With an exact KL in the loss the equilibrium is the Gibbs policy of beta / c_G(q). c_G lies between 1 / sqrt(q (1 - q)) (G to
    infinity) and (G - 1) / sqrt(G) (q to 0 or 1, ddof 1). Source: Davis & Recht 2510.13651 for the limit; the finite sum by
    enumeration of the groups.
    """
    k = np.arange(1, group_size)
    share = k / group_size * (1 - k / group_size)
    log_choose = np.array([math.log(math.comb(group_size, n)) for n in k.tolist()])
    q = min(max(success, 1e-12), 1 - 1e-12)
    weight = np.exp(log_choose + (k - 1) * math.log(q) + (group_size - k - 1) * math.log1p(-q))
    return float(np.sum(weight * share / (np.sqrt(share * group_size / (group_size - ddof)) + eps)))
