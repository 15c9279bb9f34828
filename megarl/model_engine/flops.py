"""Floating-point operations of a training pass, as the model's configuration gives them."""

from __future__ import annotations

from megarl.config import ModelShape


def training_flops(shape: ModelShape, length: int) -> float:
    """Operations of forward and backward pass over a sequence of `length` tokens.

    Six for each weight and token, and for causal attention six for each head element and pair of tokens (two matrix
    products of length^2 / 2 pairs, three times: Narayanan et al. 2021, arXiv 2104.04473, appendix).
    """
    attention = 6.0 * shape.layers * shape.heads * shape.head_dim * length**2
    return 6.0 * shape.active_parameters * length + attention
