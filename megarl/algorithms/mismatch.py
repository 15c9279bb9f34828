"""What a token counts that another distribution sampled: the engine's, or an older policy's.

w is the ratio of the trainer's probability, before its update, to that with which the token was sampled.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from megarl.algorithms.losses import PolicyTokens

Level = Literal["token", "sequence", "geometric"]
Action = Literal["truncate", "mask", "reject"]


@torch.no_grad()
def importance_weights(
    tokens: PolicyTokens,
    sampled_logprobs: Float[Tensor, " T"],
    *,
    level: Level,
    action: Action,
    low: float = 0.0,
    high: float = 2.0,
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Weights of the tokens' losses, and 1 where w is outside [low, high].

    `level`: w of the token alone, the product over its sequence, or the geometric mean over it. `action` outside of the
    bounds: `truncate` (w at most high, as in TIS), `mask` (0 there, w within: IcePop, arXiv 2510.18855, and MIS by
    sequence), `reject` (0 there, 1 within). With an older policy's samples it is the weight of decoupled PPO
    (2505.24298).
    """
    own = (tokens.old_logprobs - sampled_logprobs) * tokens.mask
    match level:
        case "token":
            logs = own
        case "sequence":
            logs = tokens.sequence_sum(own)
        case "geometric":
            logs = tokens.sequence_mean(own)
    ratio = logs.exp()
    outside = (ratio < low) | (ratio > high)
    match action:
        case "truncate":
            weights = ratio.clamp(max=high)
            outside = ratio > high
        case "mask":
            weights = ratio.masked_fill(outside, 0.0)
        case "reject":
            weights = (~outside).to(ratio.dtype)
    return weights * tokens.mask, outside.to(ratio.dtype) * tokens.mask
