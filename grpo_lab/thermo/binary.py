"""Closed forms for a binary reward: everything about the Gibbs policy follows from the reference's success rate p."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def log_partition(p: ArrayLike, beta: float) -> Array:
    """log Z = log(1 - p + p e^{1/beta}), elementwise, stable for beta down to 1e-3 and at p = 0 and 1."""
    with np.errstate(divide="ignore"):
        return np.logaddexp(np.log1p(-_checked(p)), np.log(_checked(p)) + 1 / beta)


def floor(p: ArrayLike, beta: float) -> Array:
    """The Gibbs floor F* = -beta log Z per prompt; 0 at p = 0, -1 at p = 1."""
    return -beta * log_partition(p, beta)


def gibbs_success(p: ArrayLike, beta: float) -> Array:
    """q* = sigmoid(logit p + 1 / beta): the Gibbs policy's success rate."""
    with np.errstate(divide="ignore"):
        return np.exp(np.log(_checked(p)) + 1 / beta - log_partition(p, beta))


def gibbs_kl(p: ArrayLike, beta: float) -> Array:
    """KL* = q* / beta - log Z in nats: the KL of the Gibbs policy to the reference, equal to d(q* || p)."""
    return np.maximum(gibbs_success(p, beta) / beta - log_partition(p, beta), 0.0)


def heat_capacity(p: ArrayLike, beta: float) -> Array:
    """Var(r) / beta^2 = q* (1 - q*) / beta^2 under the Gibbs policy; equals -dE*/dbeta."""
    with np.errstate(divide="ignore"):
        failure = np.exp(np.log1p(-_checked(p)) - log_partition(p, beta))
    return gibbs_success(p, beta) * failure / beta**2


def bernoulli_kl(q: ArrayLike, p: ArrayLike) -> Array:
    """d(q || p) in nats, elementwise, with 0 log 0 = 0; infinite where q leaves the support of p."""
    q, p = _checked(q), _checked(p)
    with np.errstate(divide="ignore", invalid="ignore"):
        success = np.where(q > 0, q * (np.log(q) - np.log(p)), 0.0)
        failure = np.where(q < 1, (1 - q) * (np.log1p(-q) - np.log1p(-p)), 0.0)
    return success + failure


def kl_to_gibbs(q: ArrayLike, p: ArrayLike, beta: float) -> Array:
    """d(q || q*) in nats, elementwise, from log q* and log(1 - q*), since q* itself rounds to 1 below beta = 0.03.

    log q* = log p + 1/beta - log Z and log(1 - q*) = log(1 - p) - log Z; infinite only where q leaves the support of p.
    """
    q, p = _checked(q), _checked(p)
    with np.errstate(divide="ignore", invalid="ignore"):
        success = np.where(q > 0, q * (np.log(q) - np.log(p) - 1 / beta), 0.0)
        failure = np.where(q < 1, (1 - q) * (np.log1p(-q) - np.log1p(-p)), 0.0)
    return np.maximum(success + failure + log_partition(p, beta), 0.0)


def _checked(p: ArrayLike) -> Array:
    values = np.asarray(p, dtype=np.float64)
    assert ((values >= 0) & (values <= 1)).all(), "success rates lie in [0, 1]"
    return values
