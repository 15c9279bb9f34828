"""The memory model is the published formulas where those apply, and adds up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megarl.config import Layout
from megarl.layout import (
    MEGARL,
    Decoder,
    Layer,
    Linear,
    Machine,
    Mixture,
    Mlp,
    Software,
    Training,
    fits,
    gated_mlp,
    grouped_attention,
    held,
    layer_bytes,
    memory,
    stages,
)
from megarl.simulator import GPUS

HIDDEN, HEADS, LAYERS = 512, 8, 8
SEQUENCE, BATCH = 256, 2
GPT2 = Software(kernel="fused_softmax", gradient_bytes=4)


def gpt(layers: int = LAYERS) -> Decoder:
    """As in Korthikanti et al.: dropout, biases, an MLP of 4 x hidden that is not gated, a tied embedding."""
    attention = replace(
        grouped_attention(HIDDEN, HEADS, HEADS, HIDDEN // HEADS, qkv_bias=True, output_bias=True), rotary=False
    )
    up, down = Linear(HIDDEN, 4 * HIDDEN, "outputs", True), Linear(4 * HIDDEN, HIDDEN, "inputs", True)
    layer = Layer(attention, Mlp(up, down, gated=False), 4 * HIDDEN)
    return Decoder("gpt", HIDDEN, 1024, (layer,), (0,) * layers, tied=True, final_norm=2 * HIDDEN, dropout=True)


def training(decoder: Decoder | None = None, gpus: int = 8, **more: Any) -> Training:
    layout = Layout(**{name: more.pop(name) for name in list(more) if name in Layout.model_fields})
    fields: dict[str, Any] = {"micro_batch": BATCH, "software": GPT2} | more
    return Training(decoder or gpt(), layout, gpus, SEQUENCE, 64, **fields)


@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_layer_keeps_what_korthikanti_et_al_count(tensor: int, sequence_parallel: bool) -> None:
    """Equations 2 and 4 of arXiv 2205.05198, in bytes."""
    one = training(tensor=tensor, sequence_parallel=sequence_parallel)
    states, scores = SEQUENCE * BATCH * HIDDEN, 5 * HEADS * SEQUENCE / HIDDEN
    shared = tensor if sequence_parallel else 1
    assert layer_bytes(one, one.decoder.kinds[0]) == states * (10 / shared + 24 / tensor + scores / tensor)


def test_selective_recomputation_drops_the_scores() -> None:
    """Equation 6."""
    one = training(tensor=2, recompute="selective")
    assert layer_bytes(one, one.decoder.kinds[0]) == SEQUENCE * BATCH * HIDDEN * 34 / 2


@pytest.mark.parametrize(("pipeline", "interleave"), [(1, 1), (2, 1), (4, 1), (2, 2), (2, 4), (4, 2)])
def test_the_first_stage_keeps_all_layers_and_interleaving_adds(pipeline: int, interleave: int) -> None:
    """Section 4.2.3: the first of p stages keeps L layers' worth, (p - 1) / (p v) more with v parts. Then masks (4.3),
    and with one stage the last norm's input and the output's, with several the gradient that was received last."""
    one = training(pipeline=pipeline, interleave=interleave, sequence_parallel=False)
    first = memory(one)[0].activations
    more = 1 + (pipeline - 1) / (pipeline * interleave) if interleave > 1 else 1.0
    states = SEQUENCE * BATCH * HIDDEN
    masks = pipeline * more * states
    around = masks + (4 * states if pipeline == 1 else 2 * states)
    assert first == pytest.approx(LAYERS * more * layer_bytes(one, one.decoder.kinds[0]) + around)


def test_later_stages_keep_fewer_micro_batches() -> None:
    """3, 2 and 1. Beside them: of the backward pass before what was received, and two gradients; at the end that and
    what the output needs, but one gradient less."""
    kept = [stage.activations for stage in memory(training(pipeline=4))[1:]]
    states = SEQUENCE * BATCH * HIDDEN * 2
    layers = [kept[0] - 3 * states, kept[1] - 3 * states, kept[2] - 4 * states]
    assert layers[0] / 3 == pytest.approx(layers[1] / 2) == pytest.approx(layers[2])


def test_no_more_is_kept_than_there_are_micro_batches() -> None:
    one = training(pipeline=8, gpus=8)
    assert one.micro_batches == 32
    eight, few = replace(one, global_batch=16), replace(one, global_batch=2)
    assert memory(few)[0].activations == pytest.approx(memory(eight)[0].activations / 8)
    before = SEQUENCE * BATCH * HIDDEN * 2  # the gradient of what was sent, once backward passes have begun
    assert memory(one)[0].activations == pytest.approx(memory(eight)[0].activations + before)


def test_full_recomputation_keeps_inputs() -> None:
    one, part = training(tensor=2, recompute="full"), training(tensor=2, recompute="full", recomputed=0.25)
    inputs = SEQUENCE * BATCH * HIDDEN  # two bytes, over two ranks
    around = 2.5 * inputs  # the embedding's mask, the last norm and the output
    assert memory(one)[0].activations == LAYERS * inputs + around
    layer = layer_bytes(part, part.decoder.kinds[0])
    assert memory(part)[0].activations == pytest.approx(LAYERS * (0.25 * inputs + 0.75 * layer) + around)


def kept_more(layer: Layer, fact: dict[str, Any], base: Software = Software(), **more: Any) -> float:  # noqa: B008
    """Elements for each token of a rank that a layer keeps more with another `fact`."""
    one = training(replace(gpt(), kinds=(layer,), dropout=False), software=base, **more)
    other = replace(one, software=replace(base, **fact))
    width = 4 if one.precision == "fp32" else 2
    return (layer_bytes(other, layer) - layer_bytes(one, layer)) / one.tokens / width


def test_an_activation_that_is_not_fused_keeps_what_lies_within_it() -> None:
    layer = Layer(None, gated_mlp(HIDDEN, 256), HIDDEN, norm_passes=1)
    assert kept_more(layer, {"fused_mlp": False}) == 256
    assert kept_more(layer, {"fused_mlp": False, "activation_copies": 2}) == 2 * 256
    assert kept_more(replace(layer, mlp=gated_mlp(HIDDEN, 256, bias=True)), {"fused_mlp": False}) == 0


def test_a_norm_that_is_not_fused_keeps_its_bytes() -> None:
    layer = Layer(None, gated_mlp(HIDDEN, 256), HIDDEN, norm_passes=1)
    assert kept_more(layer, {"fused_norm": False, "norm_bytes": 8.0}) == 8 * HIDDEN / 2 - HIDDEN


HEADED = Layer(grouped_attention(HIDDEN, HEADS, 2, 64), None, HIDDEN, norm_passes=1)


def test_packed_attention_keeps_its_output_twice() -> None:
    assert kept_more(HEADED, {"packed": True}) == HIDDEN


def test_packed_attention_keeps_the_keys_and_values_of_all_context_parallel_ranks_and_a_mask() -> None:
    more = kept_more(HEADED, {"packed": True}, context=4)
    assert more == HIDDEN + 3 * 2 * (2 * 64) + SEQUENCE


@pytest.mark.parametrize(("reason", "mask"), [({"precision": "fp32"}, 0), ({"context": 2}, SEQUENCE)])
def test_a_kernel_without_groups_wants_as_many_keys_as_queries(reason: dict[str, Any], mask: int) -> None:
    more = kept_more(HEADED, {"grouped": False}, Software(packed=True), **reason)
    assert more == reason.get("context", 1) * 2 * (HEADS - 2) * 64
    assert kept_more(HEADED, {"grouped": False}, Software(packed=True)) == 0


def test_selective_recomputation_keeps_what_values_are_a_view_of() -> None:
    one = training(gpt(), software=MEGARL)
    selective = replace(one, layout=Layout(recompute="selective"))
    parts = [layer_bytes(each, HEADED) for each in (one, selective)]
    query, key = HEADS * 64, 2 * 64
    # queries and keys before they turn; not the output a second time, nor the kernel's sums
    assert parts[1] - parts[0] == one.tokens * (2 * (query + key - HIDDEN) - 4 * HEADS)


def test_ranks_that_outnumber_keys_each_have_one() -> None:
    """One query, key, value and output, and the sum of a softmax."""
    one = training(replace(gpt(), dropout=False), tensor=8, software=Software())
    kept = layer_bytes(one, replace(HEADED, norm_passes=0))
    assert kept == SEQUENCE * BATCH * (2 * 4 * 64 + 4)


def test_what_a_stage_has_sent_stays_unless_it_is_freed() -> None:
    freed = training(pipeline=4)
    stays = replace(freed, software=replace(GPT2, freed_outputs=False))
    more = [b.activations - a.activations for a, b in zip(memory(freed), memory(stays), strict=True)]
    states = SEQUENCE * BATCH * HIDDEN * 2
    assert more == [5 * states, 4 * states, 3 * states, 0], "those under way, and the one before"


def test_logits_in_parts_want_the_hidden_states_whole() -> None:
    one = training(tensor=2, software=Software())
    whole = replace(one, software=Software(chunked_logits=True))
    assert memory(whole)[0].activations - memory(one)[0].activations == SEQUENCE * BATCH * HIDDEN


def test_weights_gradients_and_the_optimizers_share() -> None:
    one = training(tensor=2, pipeline=2, context=2, gpus=16)
    assert one.data == 2
    for stage, found in zip(stages(one.decoder, 2), memory(one), strict=True):
        count = held(one.decoder, one.layout, stage).total
        assert (found.weights, found.gradients) == (2 * count, 4 * count)
        assert found.optimizer == 12 * count / 4, "over data- and context-parallel ranks"
    whole = replace(one, sharding="none")
    assert memory(whole)[0].optimizer == 4 * memory(one)[0].optimizer


def test_in_32_bits_there_are_no_master_weights() -> None:
    one = training(precision="fp32", gpus=1)
    count = one.decoder.parameters
    found = memory(one)[0]
    assert (found.weights, found.gradients, found.optimizer) == (4 * count, 4 * count, 8 * count)


def test_fully_sharded_ranks_hold_a_part_of_everything() -> None:
    one = training(sharding="full", gpus=8)
    found, count = memory(one)[0], one.decoder.parameters
    assert (found.weights, found.gradients, found.optimizer) == (2 * count / 8, 4 * count / 8, 12 * count / 8)


def test_adapters_need_neither_gradients_nor_an_optimizer() -> None:
    found = memory(training(adapters=True))[0]
    assert found.gradients == found.optimizer == 0 < found.weights


@pytest.mark.parametrize(("precision", "gradient"), [("bf16", 6), ("fp32", 4)])
def test_logits_in_parts_have_a_bound_beside_their_matrix(precision: str, gradient: int) -> None:
    vocab = 2**20
    one = training(replace(gpt(), vocab=vocab), gpus=1, precision=precision)
    parts = replace(one, software=replace(GPT2, chunked_logits=True))
    assert memory(one)[0].working > GPT2.logit_bytes * vocab * BATCH * SEQUENCE
    assert 2**30 < memory(parts)[0].working - gradient * vocab * HIDDEN < 2**30 + 2**22


def test_experts_are_kept_and_shared_by_their_own_ranks() -> None:
    mixture = Mixture(gated_mlp(HIDDEN, 256), 16, 2, Linear(HIDDEN, 16, "none"))
    layer = Layer(grouped_attention(HIDDEN, HEADS, HEADS, 64), mixture, 2 * HIDDEN)
    model = Decoder("moe", HIDDEN, 1024, (layer,), (0,) * 4, final_norm=HIDDEN)
    one, spread = training(model, tensor=2), training(model, tensor=2, expert=4)
    experts = [held(model, each.layout, stages(model, 1)[0]).experts for each in (one, spread)]
    assert experts[0] == 4 * experts[1] == 4 * 16 * 3 * HIDDEN * 256
    # without expert parallelism all 8 ranks share the experts' state, with 4 groups of them 2 ranks do: the same bytes
    assert memory(one)[0].optimizer == memory(spread)[0].optimizer
    assert memory(one)[0].weights > memory(spread)[0].weights


def test_what_fits_is_the_gpus_memory() -> None:
    machine = Machine(GPUS["A100"], "A100")
    small = training()
    assert fits(small, machine)
    assert not fits(replace(small, micro_batch=4096), machine)


def test_gpus_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="6 GPUs cannot be divided into groups of 4"):
        memory(training(tensor=2, pipeline=2, gpus=6))


def test_gathered_logits_lie_beside_their_parts() -> None:
    """Of each logit a rank has what it computed, what it received, and what the loss makes of them all."""
    gathering = replace(GPT2, gathered_logits=True, logit_bytes=18.0)
    model = replace(gpt(), vocab=65_536)
    one, two = (memory(training(model, tensor=tensor, software=gathering))[-1].working for tensor in (1, 2))
    assert two - one == pytest.approx(SEQUENCE * BATCH * 65_536 * (2 / 2 + 2) - 2 * SEQUENCE * BATCH * HIDDEN * 2 / 2)


@pytest.mark.parametrize(("kernel", "width"), [("unfused", 4), ("fused_softmax", 2), ("flash2", 0)])
def test_gradients_of_scores_need_room(kernel: Any, width: int) -> None:
    model = replace(gpt(), vocab=8)
    one = memory(training(model, software=replace(GPT2, kernel=kernel), pipeline=2))[0].working
    states = SEQUENCE * BATCH * HIDDEN * 2
    assert one == 4 * 2 * states + width * SEQUENCE * SEQUENCE * BATCH * HEADS
