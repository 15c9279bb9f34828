"""FP8 blocks: each element within half a step, each scale the largest of its block, and only linear layers."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megarl.config import read_model_shape
from megarl.weights import model_parameters
from megarl.weights.fp8 import BLOCK, is_quantised, quantise
from megarl.weights.hf import dequantize
from tests.families import FAMILIES, write_model

SIZES = [(128, 128), (256, 384), (1, 1), (127, 129), (130, 5), (7, 300), (576, 256), (0, 128), (128, 0)]
STEP = 2.0**-9  # the smallest above zero in e4m3
either_type = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])


def random(rows: int, columns: int, dtype: torch.dtype, spread: float = 3.0) -> Tensor:
    """Of many magnitudes, so that a block reaches from its largest element into its subnormals."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    values = torch.randn(rows, columns, generator=generator)
    return (values * torch.exp(spread * torch.randn(rows, columns, generator=generator))).to(dtype)


def nearest(value: float) -> float:
    """The e4m3 number nearest to `value`, the even one of two; found by trying all of them."""
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # the positive ones but NaN
    distance = (every - abs(value)).abs()
    best = (distance == distance.min()).nonzero().flatten().tolist()
    even = next((code for code in best if code % 2 == 0), best[0])
    return float(every[even]) * (-1 if value < 0 else 1)


def by_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Elements times scales, and scales, in float64 and one block after the other."""
    rows, columns = weight.shape
    result = torch.zeros(rows, columns, dtype=torch.float64)
    scales = torch.zeros(-(-rows // BLOCK), -(-columns // BLOCK), dtype=torch.float64)
    for i, j in product(range(scales.shape[0]), range(scales.shape[1])):
        at = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
        block = weight[at].double()
        scales[i, j] = block.abs().max() / 448
        quotients = (block / scales[i, j]).clamp(-448, 448)
        result[at] = quotients.to(torch.float8_e4m3fn).double() * scales[i, j]
    return result, scales


def values(elements: Tensor, scales: Tensor) -> Tensor:
    wide = scales.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return elements.double() * wide[: elements.shape[0], : elements.shape[1]]


def assert_close_enough(weight: Tensor) -> None:
    """Half a step of e4m3: 2^-4 of the element, or half the smallest step times the block's scale."""
    elements, scales = quantise(weight)
    assert (elements.dtype, elements.shape) == (torch.float8_e4m3fn, weight.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, tuple(-(-size // BLOCK) for size in weight.shape))
    assert elements.is_contiguous()
    assert scales.is_contiguous()
    assert elements.float().isfinite().all()
    assert scales.isfinite().all()
    assert (scales > 0).all()
    wide = values(torch.ones_like(elements), scales)
    allowed = torch.maximum(weight.double().abs() * 2**-4, STEP / 2 * wide) * (1 + 2**-20)
    assert ((values(elements, scales) - weight.double()).abs() <= allowed).all()


@either_type
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_element_is_within_half_a_step(size: tuple[int, int], dtype: torch.dtype) -> None:
    assert_close_enough(random(*size, dtype))


@either_type
@pytest.mark.parametrize("size", SIZES[:-2], ids=str)
def test_equals_a_loop_over_blocks_in_float64(size: tuple[int, int], dtype: torch.dtype) -> None:
    weight = random(*size, dtype)
    elements, scales = quantise(weight)
    expected, expected_scales = by_blocks(weight)
    torch.testing.assert_close(scales.double(), expected_scales, rtol=2**-23, atol=0)
    got = values(elements, scales)
    # a quotient halfway between two may go either way, as the scale is rounded
    differing = (got - expected).abs() > expected.abs() * 2**-22
    assert differing.float().mean() < 1e-3


def test_elements_are_rounded_to_the_nearest_and_halves_to_even() -> None:
    weight = torch.linspace(-448, 448, 1025).repeat(2, 1)[:, :1000]
    weight[:, 0] = 448.0  # in every block, so that the scales are 1
    weight[:, ::BLOCK] = 448.0
    elements, scales = quantise(weight)
    assert (scales == 1).all()
    assert elements[0].double().tolist() == [nearest(value) for value in weight[0].tolist()]


@either_type
@pytest.mark.parametrize("factor", [1e-38, 1e-30, 1e-4, 1e4, 1e30])
def test_huge_and_tiny_blocks(factor: float, dtype: torch.dtype) -> None:
    assert_close_enough((random(130, 260, torch.float32, spread=0.5).double() * factor).to(dtype))


def test_the_extremes_of_float32() -> None:
    ends = torch.tensor([torch.finfo(torch.float32).max, torch.finfo(torch.float32).smallest_normal, 1e-45, 0.0])
    weight = ends.repeat_interleave(BLOCK).repeat(3, 1)  # a block of each
    assert_close_enough(weight)
    assert_close_enough(-weight)
    elements, scales = quantise(weight)
    assert elements[0, 0].item() == 448
    assert (elements[:, -BLOCK:].float() == 0).all()
    assert scales[0, -1] == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    weight = torch.zeros(200, 200)
    weight[150, 3] = bad
    with pytest.raises(ValueError, match="200 x 200 is not finite"):
        quantise(weight)


@either_type
def test_once_more_changes_nothing(dtype: torch.dtype) -> None:
    weight = random(200, 300, dtype)
    weight[:BLOCK, :BLOCK] = 0
    elements, scales = quantise(weight)
    again, scales_again = quantise(values(elements, scales).float())
    assert torch.equal(again.float(), elements.float())
    torch.testing.assert_close(scales_again, scales, rtol=2**-23, atol=0)
    from_bfloat16, _ = quantise(dequantize(elements, scales, (BLOCK, BLOCK)))
    assert torch.equal(from_bfloat16.float(), elements.float())


def test_the_input_stays_and_may_be_a_view() -> None:
    whole = random(300, 260, torch.float32)
    before = whole.clone()
    for view in (whole.T, whole[::2, 3:200], whole[:BLOCK, :BLOCK], whole.T[:256, :256]):
        elements, scales = quantise(view)
        expected, expected_scales = quantise(view.contiguous())
        assert torch.equal(elements.float(), expected.float())
        assert torch.equal(scales, expected_scales)
        assert elements.is_contiguous()
    assert torch.equal(whole, before)


def test_sglang_reads_it_and_quantizes_the_same() -> None:
    """SGLang 0.5.23's own pieces: how it multiplies out, and its cast, whose scales are powers of two."""
    sglang = pytest.importorskip("sglang.srt.layers.quantization.fp8_utils")
    weight = random(300, 520, torch.bfloat16, spread=1.0)
    elements, scales = quantise(weight)
    read = sglang.block_quant_dequant(elements, scales, [BLOCK, BLOCK], torch.bfloat16)
    assert torch.equal(read, dequantize(elements, scales, (BLOCK, BLOCK)))
    weight = weight.clamp(-1.75, 1.75)
    weight[::100, ::100] = 1.75  # in every block; 448 is 1.75 times a power of two
    elements, scales = quantise(weight)
    theirs, their_scales = sglang.per_block_cast_to_fp8(weight)
    assert torch.equal(scales, their_scales)
    assert torch.equal(elements.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("family", [family for family in FAMILIES if "gpt" not in family])
def test_linear_layers_and_nothing_else(family: str, tmp_path: Path) -> None:
    write_model(family, tmp_path)
    table = model_parameters(read_model_shape(tmp_path), 1)
    for parameter in table:
        for name in parameter.hf:
            expected = name.endswith("_proj.weight") or name.endswith("kv_a_proj_with_mqa.weight")
            expected |= family == "mixtral" and ".experts." in name
            assert is_quantised(parameter) == expected, name


def test_stacked_experts_are_refused(tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if "gpt" in family)
    write_model(family, tmp_path)
    table = model_parameters(read_model_shape(tmp_path), 1)
    experts = [p for p in table if ".experts." in p.megatron and ".weight" in p.megatron]
    assert experts
    for parameter in experts:
        with pytest.raises(ValueError, match="no FP8 form of stacked experts"):
            is_quantised(parameter)
