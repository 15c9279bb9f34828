"""What one token's loss counts in the loss of the global batch."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from megarl.config import ConstantDivisor, SequenceMean, TokenMean


def token_weights(
    lengths: Int[Tensor, " N"], normalizer: TokenMean | SequenceMean | ConstantDivisor
) -> Float[Tensor, " N"]:
    """Weight of each token of N sequences with `lengths` response tokens each: the loss is the weighted sum.

    Computed over the global batch, so that its loss is the same however it is divided. A sequence without response
    tokens has weight 0 and is no sequence to the mean over sequences.
    """
    ones = (lengths > 0).double()
    match normalizer:
        case TokenMean():
            weights = ones / lengths.sum().clamp_min(1)
        case SequenceMean():
            weights = ones / lengths.clamp_min(1) / ones.sum().clamp_min(1)
        case ConstantDivisor():
            weights = ones / (normalizer.tokens * len(lengths))
    return weights.float()
