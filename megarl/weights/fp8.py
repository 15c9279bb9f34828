"""Block quantization to FP8, on the way from the trainer to engines that hold their linear layers so.

The form is that of DeepSeek-V3's and Qwen3-FP8's checkpoints, which SGLang calls `quant_method: fp8` with
`weight_block_size: [128, 128]`: an e4m3 matrix, and next to it `weight_scale_inv`, a float32 factor for each block of
128 x 128. `hf.dequantize` is the inverse. Neither the trainer nor what is written to disk ever becomes FP8.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor
from torch.nn import functional

from megarl.weights.parameter import Parameter

BLOCK = 128
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # below it float32 loses digits, and at last divides by zero


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The e4m3 elements of a matrix and the scales of its blocks; those at the right and lower edge may be smaller.

    An element is off by at most 2^-4 of itself, or by 2^-10 of its block's scale. A block of zeros has the scale 1.

    Raises ValueError: an element is infinite or not a number.
    """
    rows, columns = weight.shape
    right, lower = -columns % BLOCK, -rows % BLOCK
    padded = functional.pad(weight, (0, right, 0, lower)) if right or lower else weight
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    largest = blocks.abs().amax(dim=(1, 3), keepdim=True).float()
    scales = torch.where(largest == 0, 1.0, (largest / _LARGEST).clamp(min=_SMALLEST_SCALE))
    if not scales.isfinite().all():
        raise ValueError(f"a weight of {rows} x {columns} is not finite, so it has no FP8 form; training has diverged")
    # divided in float32: the quotient exceeds the largest by less than half a step, so that it cannot become NaN
    elements = (blocks / scales).to(torch.float8_e4m3fn).reshape(padded.shape)
    return elements[:rows, :columns].contiguous(), scales[:, 0, :, 0].contiguous()


def is_quantised(parameter: Parameter) -> bool:
    """Whether an FP8 engine holds the parameter's Hugging Face tensors quantized.

    SGLang 0.5.23 quantizes the weights of its linear layers and experts, and no embeddings, output layers, norms,
    routers, biases and sinks. In Megatron just the first have names with `linear_`.

    Raises ValueError: all experts are one tensor on disk (GPT-OSS), of which SGLang has no such form.
    """
    if not re.search(r"\.linear_\w+\.weight(\[\d+\])?$", parameter.megatron):
        return False
    if not all(name.endswith(".weight") for name in parameter.hf):
        raise ValueError(f"{parameter.hf[0]}: SGLang has no FP8 form of stacked experts; serve this model in bfloat16")
    return True
