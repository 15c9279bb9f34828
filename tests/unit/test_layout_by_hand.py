"""Training steps worked out by hand, and the same of the tuner: a dense model, two mixtures of experts.

The left sides are what the models say; the right sides are plain arithmetic from published sizes and formulas:
Narayanan et al. (arXiv 2104.04473) for the pipeline, Korthikanti et al. (arXiv 2205.05198) for tensor and sequence
parallelism and for activations, Dao (arXiv 2307.08691) for attention. GPUs and networks here reach their peaks, nothing
takes time to begin and nothing hides behind anything: 989 TFLOPS, 450 GB/s to GPUs of the node, 50 GB/s to others.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megarl.config import Layout
from megarl.layout import (
    KNOWN,
    Decoder,
    Layer,
    Linear,
    Machine,
    Mixture,
    Mlp,
    Shares,
    Software,
    Training,
    decoder,
    gated_mlp,
    grouped_attention,
    memory,
    step_time,
)
from megarl.simulator import GPUS

FLOPS, LINK, NETWORK, BANDWIDTH = 989e12, 450e9, 50e9, 3.35e12
PEAKS = Shares(
    gemm={"H100": 1.0},
    low_precision={"bf16": 1.0},
    attention={"cudnn": 1.0},
    depth=0.0,
    tail=0.0,
    memory=1.0,
    link={"H100": 1.0},
    exchange=1.0,
    network=1.0,
    collective_s=0.0,
    kernel_s=0.0,
    layer_s=0.0,
    expert_layer_s=0.0,
    routing_s=0.0,
    overlap=0.0,
    step_s=0.0,
)
IDEAL = Machine(GPUS["H100"], "H100", PEAKS)
NO_PASSES = Machine(replace(GPUS["H100"], bandwidth=math.inf), "H100", PEAKS)
"""Norms, activations and the optimizer, which only pass over memory, take no time."""
ATTENTION = 1 + 5 / 2 / 0.8
"""Passes of attention: backward five products for two forward, at 0.8 of their rate."""


def close(value: float) -> object:
    return pytest.approx(value, rel=0.01)


# --- Llama 3.1 70B on 8 nodes: tensor 8 with sequence parallelism, pipeline 4, data 2; 64 sequences of 8192 tokens.

HIDDEN, FFN, VOCAB, SEQUENCE = 8192, 28_672, 128_256, 8192
MATRICES = HIDDEN * (8192 + 2 * 8 * 128) + 8192 * HIDDEN + 3 * HIDDEN * FFN
"""Of a layer: query, key and value of 64 and 8 heads of 128; their output; gate, up and down."""
TABLE = VOCAB * HIDDEN
MICRO_BATCHES = 64 // 2
LLAMA = Training(decoder(KNOWN["llama3.1-70b"]), Layout(tensor=8, pipeline=4), 64, SEQUENCE, 64)
STATES = 2 * SEQUENCE * HIDDEN
"""Bytes of a micro-batch's hidden states."""
OWN = 20 * (MATRICES / 8 + 2 * HIDDEN) + TABLE / 8
"""Parameters of a rank of the first stage; norms are not divided."""


def test_llama_has_its_70_billion_parameters() -> None:
    assert LLAMA.decoder.parameters == 80 * (MATRICES + 2 * HIDDEN) + 2 * TABLE + HIDDEN
    assert LLAMA.decoder.parameters / 1e9 == close(70.6)
    assert (LLAMA.data, LLAMA.micro_batches) == (2, MICRO_BATCHES)


def test_a_dense_step_is_its_operations_and_bytes() -> None:
    found = step_time(LLAMA, NO_PASSES)
    # of each of 20 layers: 2 FLOPs for a parameter and token forward, 4 backward
    gemm = 6 * SEQUENCE * 20 * MATRICES / 8 / FLOPS
    # scores and values of half of all pairs, 2 FLOPs each for every element of every head
    attention = ATTENTION * 20 * 2 * SEQUENCE**2 * HIDDEN / 8 / FLOPS
    # a gather and a scatter around attention and MLP, both ways; a rank gets all parts but its own
    tensor = 20 * 8 * STATES * 7 / 8 / LINK
    # the last stage, which is the slowest, has the output layer as well: a gather forward and a scatter backward
    assert found.work.gemm == close(MICRO_BATCHES * (gemm + 6 * SEQUENCE * TABLE / 8 / FLOPS))
    assert found.work.attention == close(MICRO_BATCHES * attention)
    assert found.work.tensor == close(MICRO_BATCHES * (tensor + 2 * STATES * 7 / 8 / LINK))
    assert found.work.expert == found.work.memory == found.optimizer == found.host == 0
    # a micro-batch passes three other stages before and behind the last; (p - 1) / n of the work if all were alike
    assert found.bubble == close(3 * (gemm + attention + tensor))
    assert found.bubble == pytest.approx(3 / MICRO_BATCHES * found.work.seconds, rel=0.06)
    # an eighth of the states, to the next stage and back, for all micro-batches and while the pipeline fills
    assert found.pipeline == close(2 * (MICRO_BATCHES + 3) * STATES / 8 / NETWORK)
    # two copies, on different nodes: gradients in 32 bits are scattered, weights in 16 gathered, half of them elsewhere
    assert found.data == close((4 + 2) * OWN / 2 / NETWORK)


def test_the_optimizer_passes_over_its_half_of_the_state() -> None:
    """The gradient is read for the norm and for Adam; master weights and moments read and written; weights written."""
    assert step_time(LLAMA, IDEAL).optimizer == close(OWN / 2 * (2 * 4 + 2 * 12 + 2) / BANDWIDTH)


def test_all_products_are_six_flops_for_each_parameter_and_token() -> None:
    """Of one rank that has the whole model; a look-up in the embedding is no product."""
    alone = replace(LLAMA, layout=Layout(), gpus=1, global_batch=1)
    assert step_time(alone, IDEAL).work.gemm == close(6 * (70.6e9 - TABLE) * SEQUENCE / FLOPS)


def test_a_real_step_takes_longer_than_the_ideal_but_not_three_times() -> None:
    ideal, real = step_time(LLAMA, IDEAL).seconds, step_time(LLAMA, Machine(GPUS["H100"])).seconds
    assert 1.3 * ideal < real < 3 * ideal
    model_flops = 64 * SEQUENCE * (6 * 70.6e9 + 80 * 6 * SEQUENCE * HIDDEN)
    assert 0.35 < model_flops / 64 / FLOPS / real < 0.6, "what is published of such steps"


def test_a_dense_rank_holds_its_share() -> None:
    """2 bytes for weights, 4 for gradients, and of the optimizer's 12 half. The first of four stages keeps activations
    of four micro-batches, the last of one: in 16 bits what each norm and each matrix takes."""
    first, *_, last = memory(LLAMA)
    assert first.weights == close(2 * OWN)
    assert first.gradients == close(4 * OWN)
    assert first.optimizer == close(12 * OWN / 2)
    norms = 2 * 2 * HIDDEN + 2 * 2 * HIDDEN  # what goes in and comes out of two
    heads = 2 * (8192 + 2 * 1024) + 2 * 8192 + 4 * 64  # query, key, value; what comes out, and a sum for each head
    mlp = 2 * 3 * FFN  # gate, up, and their product
    layer = SEQUENCE * (norms + heads + mlp) / 8
    assert first.activations == close(4 * 20 * layer)
    assert 20 * layer < last.activations < 1.05 * 20 * layer


# --- GPT-3 175B as Korthikanti et al. train it: tensor 8, pipeline 8 in 3 turns, sequences of 2048 tokens.


@pytest.mark.parametrize(("recompute", "factor"), [("none", 34 + 80), ("selective", 34), ("full", 2)])
def test_gpt3_keeps_what_the_paper_says(recompute: str, factor: int) -> None:
    """34 + 5 a s / h bytes for each element of the hidden states with a = 96 heads, the second without scores; 2 with
    full recomputation. 96 layers' worth, 1 + 7 / 24 times that with three turns (table 2 and section 4.2.3)."""
    hidden = 12_288
    attention = replace(grouped_attention(hidden, 96, 96, 128, qkv_bias=True, output_bias=True), rotary=False)
    mlp = Mlp(Linear(hidden, 4 * hidden, "outputs", True), Linear(4 * hidden, hidden, "inputs", True), gated=False)
    layer = Layer(attention, mlp, 4 * hidden)
    gpt = Decoder("gpt3", hidden, 51_200, (layer,), (0,) * 96, tied=True, final_norm=2 * hidden, dropout=True)
    layout = Layout(tensor=8, pipeline=8, interleave=3, recompute=recompute)  # type: ignore[arg-type]
    found = memory(Training(gpt, layout, 64, 2048, 64, software=Software(kernel="fused_softmax")))[0]
    # beside the layers lie the embedding's masks, a byte for each element, and the gradient that came last
    around = (8 * (1 + 7 / 24) + 2) * 2048 * hidden / 8
    assert found.activations == close(96 * (1 + 7 / 24) * factor * 2048 * hidden / 8 + around)


# --- Mixtral 8x7B on 8 nodes: tensor 2, pipeline 2, data 16, experts on 8 ranks; 256 sequences of 4096 tokens.

WIDTH, LENGTH = 4096, 4096
HEADS = WIDTH * (4096 + 2 * 8 * 128) + 4096 * WIDTH
EXPERT = 3 * WIDTH * 14_336
WORDS = 32_000 * WIDTH
BLOCK = Layer(
    grouped_attention(WIDTH, 32, 8, 128),
    Mixture(gated_mlp(WIDTH, 14_336), 8, 2, Linear(WIDTH, 8, "none")),
    2 * WIDTH,
)
MIXTRAL = Training(
    Decoder("mixtral", WIDTH, 32_000, (BLOCK,), (0,) * 32, final_norm=WIDTH),
    Layout(tensor=2, pipeline=2, expert=8),
    64,
    LENGTH,
    256,
)
TURNS = 256 // 16
DENSE = 16 * (HEADS / 2 + 8 * WIDTH + 2 * WIDTH) + WORDS / 2
"""Of a rank, beside its expert in each of 16 layers."""


def test_mixtral_has_its_47_billion_parameters() -> None:
    assert MIXTRAL.decoder.parameters / 1e9 == close(46.7)
    assert (MIXTRAL.data, MIXTRAL.micro_batches) == (16, TURNS)


def test_a_step_of_experts_is_its_operations_and_bytes() -> None:
    found = step_time(MIXTRAL, NO_PASSES)
    # two of eight experts for each token, and a router that divides tokens, not itself
    layers = 16 * (HEADS + 8 * WIDTH + 2 * EXPERT)
    assert found.work.gemm == close(TURNS * 6 * LENGTH * (layers + WORDS) / 2 / FLOPS)
    assert found.work.attention == close(TURNS * ATTENTION * 16 * 2 * LENGTH**2 * WIDTH / 2 / FLOPS)
    # only attention is divided by tensor ranks: a gather and a scatter, both ways; then the output layer
    states = 2 * LENGTH * WIDTH
    assert found.work.tensor == close(TURNS * (16 * 4 + 2) * states / 2 / LINK)
    # a rank has half of the tokens: each goes to two experts and comes back, both ways; seven of eight are elsewhere
    assert found.work.expert == close(TURNS * 16 * 4 * 2 * states / 2 * 7 / 8 / LINK)
    assert found.pipeline == close(2 * (TURNS + 1) * states / 2 / NETWORK)
    # 16 copies of what is no expert, four on each of four nodes, which share its bytes on the network; four of experts
    dense = 6 * DENSE * (3 / 4 / 4 / NETWORK + 3 / 4 / LINK)
    assert found.data == close(dense + 6 * 16 * EXPERT * 3 / 4 / NETWORK)
    assert step_time(MIXTRAL, IDEAL).optimizer == close(34 * (DENSE / 16 + 16 * EXPERT / 4) / BANDWIDTH)


def test_a_rank_of_experts_holds_its_share() -> None:
    first = memory(MIXTRAL)[0]
    assert first.weights == close(2 * (DENSE + 16 * EXPERT))
    assert first.gradients == close(4 * (DENSE + 16 * EXPERT))
    assert first.optimizer == close(12 * (DENSE / 16 + 16 * EXPERT / 4))
    attention = 2 * 2 * WIDTH + 2 * 2 * WIDTH + 2 * (4096 + 2 * 1024) + 2 * 4096 + 4 * 32
    experts = 2 * (2 * WIDTH + 2 * 3 * 14_336)  # two copies of a token, each expanded as in a dense layer
    assert first.activations == pytest.approx(2 * 16 * LENGTH / 2 * (attention + experts), rel=0.02)


# --- DeepSeek-V3: 8 of 256 experts, on 64 ranks of 8 nodes, and one that is shared, in 58 of 61 layers of width 7168.

DEEPSEEK = Training(decoder(KNOWN["deepseek-v3"]), Layout(expert=64), 64, 4096, 64)


def test_deepseek_activates_37_of_671_billion_parameters() -> None:
    """Latent attention; three dense layers; nine experts and a router in all others; the output layer."""
    assert DEEPSEEK.decoder.parameters / 1e9 == close(671)
    queries, keys = 7168 * 1536 + 1536 * 128 * 192, 7168 * (512 + 64) + 512 * 128 * 256
    attention = queries + keys + 128 * 128 * 7168
    active = 61 * attention + 3 * 3 * 7168 * 18_432 + 58 * 7168 * (9 * 3 * 2048 + 256) + 129_280 * 7168
    assert round(active / 1e9) == 37
    assert step_time(DEEPSEEK, NO_PASSES).work.gemm == close(6 * active * 4096 / FLOPS)


@pytest.mark.parametrize("once", [True, False])
def test_tokens_cross_the_network_to_eight_experts_or_to_their_nodes(once: bool) -> None:
    """A node has 32 of the 256; one that has none of a token's is not sent to: 5.3 nodes for 8 experts."""
    visits = 8 * (1 - math.comb(224, 8) / math.comb(256, 8)) if once else 8
    found = step_time(replace(DEEPSEEK, software=Software(send_once=once)), NO_PASSES)
    assert found.work.expert == close(58 * 4 * visits * 7 / 8 * 2 * 4096 * 7168 / NETWORK)


def test_shared_experts_are_divided_by_tensor_ranks_as_a_dense_mlp_is() -> None:
    """So that all 61 layers have two blocks, with a gather and a scatter each, both ways."""
    two = replace(DEEPSEEK, layout=Layout(tensor=2, expert=64))
    found = step_time(two, NO_PASSES)
    assert found.work.tensor == close(2 * (61 * 8 + 2) * 2 * 4096 * 7168 / 2 / LINK)
