"""The time model against closed forms: rooflines, rings, the pipeline's bubble, recomputation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megarl.config import Layout
from megarl.layout import (
    Decoder,
    Layer,
    Linear,
    Machine,
    Mixture,
    Shares,
    Software,
    Training,
    gated_mlp,
    grouped_attention,
    step_time,
)
from megarl.simulator import GPUS

HIDDEN, LAYERS = 4096, 16
PLAIN = Shares(
    depth=0.0,
    tail=0.0,
    kernel_s=0.0,
    layer_s=0.0,
    expert_layer_s=0.0,
    routing_s=0.0,
    collective_s=0.0,
    waiting=1.0,
    step_s=0.0,
)
APART = Software(tensor_overlap=False, backward_overlap=False, data_overlap=False, pipeline_overlap=False)
"""Nothing runs beside anything."""
H100 = Machine(GPUS["H100"], "H100", PLAIN)


def decoder(layers: int = LAYERS, mixture: Mixture | None = None) -> Decoder:
    attention = grouped_attention(HIDDEN, 32, 8, 128)
    layer = Layer(attention, mixture or gated_mlp(HIDDEN, 4 * HIDDEN), 2 * HIDDEN)
    # one logit, so that all stages cost the same but for the embedding
    return Decoder("test", HIDDEN, 1, (layer,), (0,) * layers, head=HIDDEN, final_norm=HIDDEN)


def training(gpus: int = 1, model: Decoder | None = None, **more: Any) -> Training:
    layout = Layout(**{name: more.pop(name) for name in list(more) if name in Layout.model_fields})
    fields: dict[str, Any] = {"software": APART} | more
    return Training(model or decoder(), layout, gpus, 4096, fields.pop("global_batch", 64), **fields)


def test_a_matrix_product_takes_its_operations_or_its_bytes() -> None:
    rows, inputs, outputs = 4096, 8192, 2048
    flops = 2 * rows * inputs * outputs / (GPUS["H100"].flops_16 * PLAIN.gemm["H100"])
    assert H100.gemm_s(rows, inputs, outputs) == pytest.approx(flops)
    moved = 2 * (inputs + inputs * outputs + outputs) / (GPUS["H100"].bandwidth * PLAIN.memory)
    assert H100.gemm_s(1, inputs, outputs) == pytest.approx(moved), "one row is bound by the weights"
    begun = Machine(GPUS["H100"], "H100", replace(PLAIN, depth=float(inputs)))
    assert begun.gemm_s(rows, inputs, outputs) == pytest.approx(2 * flops)


def test_a_small_product_leaves_the_last_round_of_tiles_half_empty() -> None:
    half = Machine(GPUS["H100"], "H100", replace(PLAIN, tail=1024.0 * 1024))
    whole, one, four = (half.gemm_s(1024, 8192, 1024, count=count) * each for count, each in ((1, 1), (1, 4), (4, 1)))
    assert whole == pytest.approx(2 * H100.gemm_s(1024, 8192, 1024))
    assert four < one, "products that run together share it"


def test_each_precision_has_its_peak() -> None:
    gpu = GPUS["GB300"]
    machine = Machine(gpu, "B300", replace(PLAIN, gemm={"B300": 0.5}))
    low = PLAIN.low_precision
    assert machine.flops("bf16") == 0.5 * gpu.flops_16
    assert machine.flops("fp8") == 0.5 * gpu.flops_8 * low["fp8"]
    assert machine.flops("fp4") == 0.5 * gpu.flops_4 * low["fp4"]
    assert H100.flops("fp4") < H100.flops("fp8"), "without 4-bit units it is computed in 8"


def test_rings_within_and_between_nodes() -> None:
    link, network = GPUS["H100"].link * PLAIN.link["H100"], GPUS["H100"].network * PLAIN.network
    sent = 1e9
    assert H100.collective_s(sent, 1, 1) == 0
    assert H100.collective_s(sent, 8, 1) == pytest.approx(sent * 7 / 8 / link)
    # one rank on each of four nodes, and eight on each
    assert H100.collective_s(sent, 4, 8) == pytest.approx(sent * 3 / 4 / network)
    assert H100.collective_s(sent, 32, 1) == pytest.approx(sent * 3 / 4 / 8 / network + sent * 7 / 8 / link)
    linked = Machine(GPUS["GB200"], "B200", PLAIN)
    assert linked.collective_s(sent, 64, 1) == pytest.approx(sent * 63 / 64 / (GPUS["GB200"].link * PLAIN.link["B200"]))


def test_tokens_go_once_to_each_place() -> None:
    link, network = GPUS["H100"].link * PLAIN.exchange, GPUS["H100"].network * PLAIN.network
    assert H100.exchange_s(1e9, (2, 64), 1, 1, once=True) == 0
    for once in (True, False):
        one_expert = H100.exchange_s(1e9, (1, 64), 8, 1, once=once)
        assert one_expert == pytest.approx(1e9 * 7 / 8 / link)
    # two of 64 experts on four nodes: one node has both with 15/63, and three quarters of nodes are others
    once = H100.exchange_s(1e9, (2, 64), 32, 1, once=True)
    assert once == pytest.approx(1e9 * (2 - 15 / 63) * 3 / 4 / network)
    assert H100.exchange_s(1e9, (2, 64), 32, 1, once=False) == pytest.approx(1e9 * 2 * 3 / 4 / network)


def test_every_expert_is_somewhere_else() -> None:
    """Experts are drawn without putting back: those of eight ranks with one each are on as many ranks as there are."""
    link = GPUS["H100"].link * PLAIN.exchange
    assert H100.exchange_s(1e9, (2, 8), 8, 1, once=True) == pytest.approx(2e9 * 7 / 8 / link)
    assert H100.exchange_s(1e9, (8, 8), 2, 1, once=True) == pytest.approx(2e9 / 2 / link)
    assert H100.exchange_s(1e9, (8, 8), 2, 1, once=False) == pytest.approx(8e9 / 2 / link), "four times to each rank"


def test_groups_that_do_not_fill_their_nodes_are_on_as_few_as_hold_them() -> None:
    rack = Machine(GPUS["GB200"], "B200", PLAIN)
    cases = {(64, 1): (1, 64), (72, 1): (1, 72), (96, 1): (2, 48), (128, 1): (2, 64), (144, 1): (2, 72)}
    assert {case: rack.spread(*case) for case in cases} == cases
    assert rack.spread(3, 64) == (3, 1), "a rack has only one of them"
    assert H100.spread(5, 4) == (3, 5 / 3)
    sent, link, network = 1e9, GPUS["GB200"].link * PLAIN.link["B200"], GPUS["GB200"].network * PLAIN.network
    assert rack.collective_s(sent, 96, 1) == pytest.approx(sent / 2 / 48 / network + sent * 47 / 48 / link)
    exchanged = rack.exchange_s(sent, (1, 96), 96, 1, once=False)
    assert exchanged == pytest.approx(sent / 2 / network), "half of the tokens leave the rack"


def test_some_stages_of_a_node_send_to_the_next_node() -> None:
    link, network = GPUS["H100"].link * PLAIN.link["H100"], GPUS["H100"].network * PLAIN.network
    assert H100.send_s(1e9, 4, 8) == pytest.approx(1e9 / link)
    assert H100.send_s(1e9, 4, 16) == pytest.approx(1e9 / 2 / link + 1e9 / 2 / network)
    assert H100.send_s(1e9, 8, 16) == H100.send_s(1e9, 32, 64) == pytest.approx(1e9 / network)


def test_the_bubble_is_that_of_one_f_one_b() -> None:
    """(p - 1) / m of the work, divided by the parts of a stage (arXiv 2104.04473, section 2.2)."""
    for pipeline, interleave in ((1, 1), (2, 1), (4, 1), (4, 2), (4, 4)):
        found = step_time(training(pipeline, pipeline=pipeline, interleave=interleave), H100)
        share = (pipeline - 1) / 64 / interleave
        assert found.bubble == pytest.approx(share * found.work.seconds, rel=0.02, abs=1e-12)


def test_twice_the_batch_is_twice_the_work_and_the_same_bubble() -> None:
    one, two = (step_time(training(4, pipeline=4, global_batch=batch), H100) for batch in (64, 128))
    assert two.work.seconds == pytest.approx(2 * one.work.seconds)
    assert two.bubble == pytest.approx(one.bubble)


def test_full_recomputation_adds_a_forward_pass() -> None:
    """Products run once forward and twice backward, so a third more; half the layers, a sixth."""
    none, full = (step_time(training(recompute=how), H100).work for how in ("none", "full"))
    head = 3 * H100.gemm_s(4096, HIDDEN, 1) * 64
    assert full.gemm - head == pytest.approx(4 / 3 * (none.gemm - head))
    half = step_time(training(recompute="full", recomputed=0.5), H100).work
    assert half.gemm - head == pytest.approx(7 / 6 * (none.gemm - head))


def test_tensor_ranks_share_products_and_pay_for_four_collectives_a_pass() -> None:
    one = step_time(training(1), H100).work
    eight = step_time(training(8, tensor=8, global_batch=64), H100).work
    flops = 6 * 64 * 4096 * LAYERS * decoder().kinds[0].parameters(1) / H100.flops("bf16")
    assert flops < one.gemm < 1.2 * flops
    assert flops / 8 < eight.gemm < 1.5 * flops / 8
    block = H100.collective_s(2.0 * 4096 * HIDDEN, 8, 1)
    assert eight.tensor == pytest.approx(64 * (8 * LAYERS + 2) * block)
    assert one.tensor == 0
    hidden = replace(APART, tensor_overlap=True)
    beside = step_time(training(8, tensor=8, global_batch=64, software=hidden), H100).work
    assert beside.tensor == pytest.approx((1 - PLAIN.overlap) * eight.tensor)


@pytest.mark.parametrize(("sequence_parallel", "hidden"), [(True, 1 / 4), (False, 1 / 2)])
def test_collectives_of_gradients_run_beside_those_of_weights(sequence_parallel: bool, hidden: float) -> None:
    """All of the backward pass's all-reduces, or its scatters: half or a quarter of all."""
    model = decoder()
    apart, beside, waiting = (
        step_time(
            training(8, model, tensor=8, sequence_parallel=sequence_parallel, software=software),
            Machine(GPUS["H100"], "H100", replace(PLAIN, waiting=2.0 if double else 1.0)),
        ).work.tensor
        for software, double in (
            (APART, False),
            (replace(APART, backward_overlap=True), True),
            (APART, True),
        )
    )
    assert beside == pytest.approx((1 - hidden * PLAIN.overlap) * apart)
    assert waiting == pytest.approx(2 * apart), "nothing runs beside, so all wait for the slowest"


def test_attention_grows_with_the_square_and_stops_at_a_window() -> None:
    short, long = (replace(training(), sequence=length, global_batch=64 * 4096 // length) for length in (4096, 16384))
    assert step_time(long, H100).work.attention == pytest.approx(4 * step_time(short, H100).work.attention)
    layer = decoder().kinds[0]
    assert layer.mixer is not None
    windowed = replace(decoder(), kinds=(replace(layer, mixer=replace(layer.mixer, window=128)),))
    narrow = step_time(replace(long, decoder=windowed), H100).work.attention
    assert narrow == pytest.approx(step_time(long, H100).work.attention * 256 / 16384)


def test_experts_are_shared_however_many_ranks_divide_them() -> None:
    mixture = Mixture(gated_mlp(HIDDEN, 2048), 64, 8, Linear(HIDDEN, 64, "none"))
    model = decoder(4, mixture)
    found = [step_time(training(64, model, expert=size), H100).work for size in (8, 64)]
    assert found[1].gemm == pytest.approx(found[0].gemm, rel=0.2)
    assert found[0].expert < found[1].expert, "tokens leave the node"
    overlapped = training(64, model, expert=64, software=replace(APART, expert_overlap=True))
    assert step_time(overlapped, H100).work.expert == pytest.approx((1 - PLAIN.overlap) * found[1].expert)


def test_gradients_are_summed_over_the_network_and_overlap_hides_some() -> None:
    alone, many = (step_time(training(gpus, global_batch=gpus), H100) for gpus in (1, 64))
    assert alone.data == 0
    count = decoder().parameters
    both = H100.collective_s(4.0 * count, 64, 1) + H100.collective_s(2.0 * count, 64, 1)
    assert many.data == pytest.approx(both)
    hidden = step_time(training(64, global_batch=64, software=replace(APART, data_overlap=True)), H100)
    assert 0 < hidden.data < many.data
    assert hidden.optimizer == many.optimizer == pytest.approx(alone.optimizer / 64)


def test_a_stage_sends_its_part_of_the_hidden_states() -> None:
    def sending(**more: Any) -> float:
        return step_time(training(16, pipeline=2, **more), H100).pipeline

    whole = 2 * (32 + 1) * H100.send_s(2.0 * 4096 * HIDDEN, 8, 16)
    assert sending(global_batch=256) == pytest.approx(whole)
    part = 2 * (64 + 1) * H100.send_s(2.0 * 4096 * HIDDEN / 2, 8, 16)
    assert sending(tensor=2, global_batch=256) == pytest.approx(part)
    gathered = 2 * (64 + 1) * H100.collective_s(2.0 * 4096 * HIDDEN, 2, 1)
    assert sending(tensor=2, global_batch=256, sequence_parallel=False) == pytest.approx(part + gathered)
    turns = sending(interleave=2, global_batch=256)
    beside = sending(interleave=2, global_batch=256, software=replace(APART, pipeline_overlap=True))
    assert beside == pytest.approx((1 - PLAIN.overlap) * turns)


def test_gradients_that_are_added_apart_are_written_and_read_again() -> None:
    fused, apart = (
        step_time(training(software=replace(APART, fused_gradients=fused)), H100).work.memory for fused in (True, False)
    )
    count = LAYERS * decoder().kinds[0].parameters(1)
    assert apart - fused == pytest.approx(64 * H100.memory_s(12.0 * count))


def test_sharded_weights_are_gathered_for_every_micro_batch_unless_a_pipeline_keeps_them() -> None:
    slow = replace(PLAIN, network=1e-6)  # so that computation hides nothing to speak of

    def data(micro_batches: int, adapters: bool = False, **more: Any) -> float:
        one = training(32, global_batch=32 * micro_batches, sharding="full", adapters=adapters, **more)
        return step_time(one, Machine(GPUS["H100"], "H100", slow)).data

    assert data(4) == pytest.approx(4 * data(1), rel=1e-3)
    assert data(4, pipeline=4) == pytest.approx(data(1, pipeline=4), rel=1e-3)
    assert data(4, adapters=True) == pytest.approx(data(4) * 4 / 8, rel=1e-3), "there are no gradients to scatter"


def test_kernels_written_for_the_a100_reach_less_of_a_later_gpu() -> None:
    def attention(gpu: str, kernel: Any) -> float:
        shares = replace(PLAIN, attention=dict.fromkeys(PLAIN.attention, 0.5))
        place = Machine(GPUS[gpu], gpu, shares)
        return step_time(training(software=replace(APART, kernel=kernel)), place).work.attention * GPUS[gpu].flops_16

    assert attention("A100", "flash2") == pytest.approx(attention("H100", "cudnn"))
    assert attention("H100", "flash2") == pytest.approx(attention("A100", "flash2") / PLAIN.older_kernel)


def test_the_host_holds_up_small_work() -> None:
    slow = Machine(GPUS["H100"], "H100", replace(PLAIN, layer_s=1.0))
    assert step_time(training(), slow).seconds == pytest.approx(64 * 2 * LAYERS, rel=0.01)
    graphs = training(software=replace(APART, graphs=True))
    assert step_time(graphs, slow).seconds == pytest.approx(step_time(graphs, H100).seconds)


def test_the_parts_are_the_step() -> None:
    found = step_time(training(16, tensor=2, pipeline=2), H100)
    parts = (found.work.seconds, found.bubble, found.pipeline, found.data, found.optimizer, found.host)
    assert found.seconds == pytest.approx(sum(parts))
    assert min(parts[:5]) > 0


def test_32_bits_are_twice_the_bytes() -> None:
    half, full = (
        step_time(training(8, tensor=2, pipeline=2, sequence_parallel=True, precision=name), H100)
        for name in ("bf16", "fp32")
    )
    assert full.work.tensor == pytest.approx(2 * half.work.tensor)
    assert full.pipeline == pytest.approx(2 * half.pipeline)
    count = decoder().parameters / 4  # of each of two copies of a quarter of the model
    scatter, gather = (H100.collective_s(4.0 * count, 2, 2) for _ in range(2))
    assert full.data == pytest.approx(scatter + gather, rel=0.05)
    assert half.data == pytest.approx(0.75 * full.data, rel=0.05)


def test_a_ring_of_keys_adds_what_is_not_hidden() -> None:
    """Keys and values go round once forward; they and their gradients backward. Never all of it is hidden."""
    one_step = training(2, context=2, global_batch=1, software=Software())
    one = H100.collective_s(2.0 * 4096 * 8 * 256, 2, 1)
    found = step_time(one_step, H100).work
    assert found.tensor == pytest.approx((1 - PLAIN.overlap) * 3 * LAYERS * one)
    slow = Machine(replace(GPUS["H100"], link=1e6), "H100", PLAIN)
    bound = step_time(one_step, slow).work
    ring = slow.collective_s(2.0 * 4096 * 8 * 256, 2, 1)
    assert bound.tensor == pytest.approx(3 * LAYERS * ring - PLAIN.overlap * bound.attention)


def test_packed_attention_gathers_keys_and_makes_whole_squares_of_them() -> None:
    ring, packed = (
        step_time(
            training(2, context=2, software=Software(tensor_overlap=False, data_overlap=False, packed=flag)), H100
        ).work
        for flag in (False, True)
    )
    assert packed.attention == pytest.approx(2 * ring.attention)
    one = H100.collective_s(2.0 * 4096 * 8 * 128, 2, 1)  # keys of a micro-batch, and as many values
    assert packed.tensor == pytest.approx(64 * LAYERS * (2 + 2) * one)
    alone = Software(tensor_overlap=False, data_overlap=False, packed=True)
    assert step_time(training(software=alone), H100).work.attention == pytest.approx(ring.attention * 2)


def test_what_is_not_fused_passes_over_memory() -> None:
    """Gradients of a micro-batch are written and read, those before them read and written; Adam is eight operations."""
    count, fused = decoder().parameters, step_time(training(), H100)
    apart = Software(tensor_overlap=False, data_overlap=False, fused_gradients=False, fused_adam=False)
    found = step_time(training(software=apart), H100)
    assert found.work.memory - fused.work.memory == pytest.approx(
        64 * H100.memory_s((4.0 + 8.0) * count),
        rel=1e-4,  # what lies outside of the layers is left out
    )
    assert found.optimizer / fused.optimizer == pytest.approx((34 + 64) / 34)


def test_a_collective_that_waits_gathers_the_input_again() -> None:
    apart = Software(tensor_overlap=False, data_overlap=False, asynchronous=False)
    found = [step_time(training(2, tensor=2, software=one), H100).work for one in (training().software, apart)]
    blocks = 2 * LAYERS + 0.5
    assert found[1].tensor - found[0].tensor == pytest.approx(
        64 * blocks * H100.collective_s(2.0 * 4096 * HIDDEN, 2, 1)
    )
