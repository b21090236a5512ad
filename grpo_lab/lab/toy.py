"""A toy language model small enough to enumerate: three tokens, at most three of them a sequence, 15 sequences in all.

Token 2 ends a sequence; the reward is 1 for sequences with exactly one token 1. Every expectation is a sum over the
15 sequences in float64, so what an objective converges to carries no sampling error.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_TOKENS = 3
PREFIXES = [p for n in range(MAX_TOKENS) for p in itertools.product((0, 1), repeat=n)]
SEQUENCES = [(*p, 2) for p in PREFIXES] + list(itertools.product((0, 1), repeat=MAX_TOKENS))
REWARDS = torch.tensor([float(sequence.count(1) == 1) for sequence in SEQUENCES], dtype=torch.float64)
REFERENCE = torch.tensor(
    [
        [0.05, 0.45, -0.49],
        [-1.05, 0.55, 0.51],
        [0.74, -0.09, -0.64],
        [0.90, -0.50, -0.40],
        [-0.55, 1.14, -0.60],
        [-0.43, 0.38, 0.06],
        [-0.69, 0.01, 0.68],
    ],
    dtype=torch.float64,
)
"""Logits of the reference policy, [prefixes, tokens]; it earns E[r] = 0.272."""

_PLACES = [(s, t) for s, sequence in enumerate(SEQUENCES) for t in range(len(sequence))]
_ROWS = torch.tensor([PREFIXES.index(SEQUENCES[s][:t]) for s, t in _PLACES])
_TOKENS = torch.tensor([SEQUENCES[s][t] for s, t in _PLACES])
_FLAT = torch.tensor([s * MAX_TOKENS + t for s, t in _PLACES])
MASK = torch.zeros(len(SEQUENCES) * MAX_TOKENS, dtype=torch.float64).scatter(0, _FLAT, 1.0).view(-1, MAX_TOKENS)


@dataclass(frozen=True)
class ToyState:
    """Exact expectations of a policy at one beta; KL and gap in nats and reward units."""

    reward: float
    kl: float
    free_energy: float
    floor: float
    beta_eff: float

    @property
    def gap(self) -> float:
        return self.free_energy - self.floor


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads, and far slower beside another busy process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def token_logprobs(logits: Tensor) -> Tensor:
    """Log-probs of every sequence's tokens under logits [prefixes, 3]: [15, 3], 0 off the mask, differentiable."""
    chosen = torch.log_softmax(logits, dim=1)[_ROWS, _TOKENS]
    return torch.zeros(MASK.numel(), dtype=torch.float64).scatter(0, _FLAT, chosen).view_as(MASK)


def occupancy(probability: Tensor) -> Tensor:
    """How often each token is taken at each prefix, [prefixes, 3], for sequence probabilities [15]."""
    visits = torch.zeros(len(PREFIXES) * 3, dtype=torch.float64)
    return visits.index_add(0, _ROWS * 3 + _TOKENS, probability.repeat_interleave(MASK.sum(dim=1).long())).view(-1, 3)


def gibbs_logits(beta: float) -> Tensor:
    """The Gibbs policy of `beta` as logits [prefixes, 3], by the soft Bellman equation from the leaves up."""
    log_ref = torch.log_softmax(REFERENCE, dim=1)
    logits, value = torch.zeros_like(REFERENCE), dict(zip(SEQUENCES, REWARDS.tolist(), strict=True))
    for prefix in reversed(PREFIXES):
        row = PREFIXES.index(prefix)
        following = torch.tensor([value[(*prefix, token)] for token in range(3)], dtype=torch.float64)
        logits[row] = log_ref[row] + following / beta
        value[prefix] = beta * float(torch.logsumexp(logits[row], dim=0))
    return logits


def measure(logits: Tensor, beta: float) -> ToyState:
    """E[r], KL, F, the Gibbs floor and the temperature at which a Gibbs policy has this reward (infinite at the reference)."""
    log_pi, log_ref = token_logprobs(logits).sum(dim=1), token_logprobs(REFERENCE).sum(dim=1)
    pi = log_pi.exp()
    reward, kl = float((pi * REWARDS).sum()), float((pi * (log_pi - log_ref)).sum())
    floor = -beta * float(torch.logsumexp(log_ref + REWARDS / beta, dim=0))
    odds = _log_odds(log_pi) - _log_odds(log_ref)
    return ToyState(reward, kl, beta * kl - reward, floor, 1 / odds if abs(odds) > 1e-12 else float("inf"))


def _log_odds(log_probability: Tensor) -> float:
    right = REWARDS == 1
    return float(torch.logsumexp(log_probability[right], dim=0) - torch.logsumexp(log_probability[~right], dim=0))
