"""How token terms become one number: as weights, computed once over the whole batch, so that splits cannot matter."""

from dataclasses import dataclass

from torch import Tensor

from grpo_lab.config import AggregateName


@dataclass(frozen=True)
class BatchTotals:
    """Sizes of the GLOBAL batch (all micro-batches, all ranks): what losses are divided by."""

    sequences: float
    tokens: float


def token_weights(name: AggregateName, mask: Tensor, totals: BatchTotals, max_tokens: int) -> Tensor:
    """Weights w [n, C] such that sum(w * x), summed over all rows of the global batch, aggregates x.

    token_mean: 1 / all tokens (DAPO, 2503.14476). sequence_mean: 1 / (N |y_i|) (GRPO, 2402.03300). sequence_sum: 1 / N
    (LUSPO, 2602.05261). constant_length: 1 / (N L) with L = `max_tokens` (Dr. GRPO, 2503.20783). The last two keep the
    gradient of F.
    """
    if name == "token_mean":
        return mask / max(totals.tokens, 1)
    if name == "sequence_mean":
        return mask / (totals.sequences * mask.sum(dim=1, keepdim=True).clamp(min=1))
    return mask / (totals.sequences * (max_tokens if name == "constant_length" else 1))
