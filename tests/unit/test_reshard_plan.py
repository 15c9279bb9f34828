"""Reshard plans, carried out with small tensors: each engine rank gets what SGLang's own loaders would have cut for it.

All elements of a model are different numbers and padding is 0, so that no element can take another's place unseen.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megarl.checkpoint_engine.check_plan import check
from megarl.checkpoint_engine.plan import Cell, Item, Plan, Transfer, make_plan
from megarl.checkpoint_engine.sides import Engines, PlanError, Relay, Training
from megarl.checkpoint_engine.traffic import traffic
from megarl.config import Layout, ModelShape, Rope, read_model_shape, train_place
from megarl.weights import Parameter, matrix, model_parameters
from tests.families import family_config

Array = NDArray[Any]
State = dict[str, Array]
SMALL: dict[str, Any] = {"vocab_size": 70, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 8}
DENSE = SMALL | {"intermediate_size": 8, "num_key_value_heads": 2}
MOE = DENSE | {"moe_intermediate_size": 8}
LATENT: dict[str, Any] = SMALL | {
    "num_key_value_heads": 8,
    "intermediate_size": 8,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "kv_lora_rank": 4,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 2,
    "v_head_dim": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", DENSE),
    "llama_tied": ("llama", DENSE | {"tie_word_embeddings": True, "num_hidden_layers": 4}),
    "qwen2": ("qwen2", DENSE | {"vocab_size": 129}),
    "qwen3": ("qwen3", DENSE | {"head_dim": 2, "num_hidden_layers": 4, "tie_word_embeddings": True}),
    "qwen3_heads": ("qwen3", DENSE | {"head_dim": 4, "num_key_value_heads": 8}),
    "gemma3": ("gemma3", DENSE | {"head_dim": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3_moe": ("qwen3_moe", MOE | {"head_dim": 2, "num_experts": 4}),
    "mixtral": ("mixtral", DENSE | {"num_local_experts": 4}),
    "glm4_moe": ("glm4_moe", MOE | {"head_dim": 2, "n_routed_experts": 4}),
    "deepseek_v2_lite": ("deepseek_v2_lite", LATENT),
    "deepseek_v3": ("deepseek_v3", LATENT | {"q_lora_rank": 8}),
    "deepseek_v3_halves": ("deepseek_v3", LATENT | {"q_lora_rank": 8, "rope_interleave": False}),
}


@dataclass(frozen=True, eq=False)
class Model:
    shape: ModelShape
    tensors: State
    """The Hugging Face tensors."""
    size: int
    """1 more than the largest number in them."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return {name: small_model(name, tmp_path_factory.mktemp(name)) for name in MODELS}


def small_model(name: str, directory: Path) -> Model:
    family, fields = MODELS[name]
    family_config(family, **fields).save_pretrained(directory)
    shape = read_model_shape(directory)
    tensors, start = {}, 1
    for parameter in model_parameters(shape, 1):
        for hf, size in zip(parameter.hf, parameter.hf_shapes, strict=True):
            count = int(np.prod(size))
            tensors[hf] = np.arange(start, start + count).reshape(size)
            start += count
    return Model(shape, tensors, start)


# ---------------------------------------------------------------------------------------------- what an engine holds


def engine_state(model: Model, engine: Engines, rank: int) -> State:
    """As SGLang's layers cut what they are given: by the names of the checkpoint alone."""
    size, state, experts = engine.tensor, {}, model.shape.experts
    expert_rank, within = divmod(rank, engine.expert_tensor)
    for hf, x in model.tensors.items():
        stem, _, name = hf.removesuffix(".weight").rpartition(".")
        of_expert = ".experts." in hf
        split, at = (engine.expert_tensor, within) if of_expert else (size, rank)
        if ".experts." in hf:
            if name in ("down_proj", "w2"):
                continue
            if name in ("gate_proj", "w1"):
                stacks, _, number = stem.rpartition(".")
                assert experts is not None
                local = experts.count // engine.expert
                slot = int(number) - expert_rank * local
                if 0 <= slot < local:
                    up, down = ("up_proj", "down_proj") if name == "gate_proj" else ("w3", "w2")
                    both = [rows_of(y, at, split) for y in (x, model.tensors[f"{stem}.{up}.weight"])]
                    put(state, f"{stacks}.w13_weight", slot, local, np.concatenate(both))
                    columns = np.split(model.tensors[f"{stem}.{down}.weight"], split, 1)[at]
                    put(state, f"{stacks}.w2_weight", slot, local, columns)
        elif name in ("embed_tokens", "lm_head"):
            whole = model.shape.family == "gemma3" and name == "embed_tokens"
            state[hf] = x if whole else rows_of(padded(x, size), rank, size)
        elif name.startswith(("q_proj", "k_proj", "v_proj")) or hf.endswith("_proj.bias"):
            attention_state(state, hf, model, rank, size)
        elif name == "gate_proj":
            both = [rows_of(y, rank, size) for y in (x, model.tensors[f"{stem}.up_proj.weight"])]
            state[f"{stem}.gate_up_proj.weight"] = np.concatenate(both)
        elif name in ("o_proj", "down_proj"):
            state[hf] = np.split(x, size, 1)[rank]
        elif name in ("q_b_proj", "kv_b_proj"):
            state[hf] = rows_of(x, rank, size)
        elif name == "q_a_proj":
            both = [x, model.tensors[f"{stem}.kv_a_proj_with_mqa.weight"]]
            state[f"{stem}.fused_qkv_a_proj_with_mqa.weight"] = np.concatenate(both)
        elif name != "up_proj" and not (name == "kv_a_proj_with_mqa" and f"{stem}.q_a_proj.weight" in model.tensors):
            state[hf] = x  # norms, routers and their biases, a lone kv_a_proj_with_mqa
    return state


def attention_state(state: State, hf: str, model: Model, rank: int, size: int) -> None:
    if model.shape.latent is not None:
        state[hf] = rows_of(model.tensors[hf], rank, size)
        return
    if "q_proj" not in hf:
        return
    query, *key_value = (model.tensors[hf.replace("q_proj", f"{one}_proj")] for one in "qkv")
    kv_heads, dim = model.shape.kv_heads, model.shape.head_dim
    copies = max(1, size // kv_heads)  # ranks that share a key-value head
    count = max(1, kv_heads // size) * dim
    start = rank // copies * count
    parts = [rows_of(query, rank, size), *(x[start : start + count] for x in key_value)]
    state[hf.replace("q_proj", "qkv_proj")] = np.concatenate(parts)


def rows_of(x: Array, rank: int, size: int) -> Array:
    return np.split(x, size)[rank]


def padded(x: Array, size: int) -> Array:
    """To a multiple of 64 rows, or of 64 for each rank if those cannot be divided."""
    rows = -(-len(x) // 64) * 64
    rows = rows if rows % size == 0 else -(-len(x) // (64 * size)) * 64 * size
    return np.concatenate([x, np.zeros((rows - len(x), x.shape[1]), x.dtype)])


def put(state: State, name: str, slot: int, slots: int, x: Array) -> None:
    state.setdefault(name, np.zeros((slots, *x.shape), x.dtype))[slot] = x


# --------------------------------------------------------------------------------------------- what the trainer holds


def trainer_state(model: Model, layout: Layout, world: int, rank: int) -> State:
    """A rank's shards, as matrices, by Megatron's names in the whole model; cut as the weights are loaded."""
    place, state, shape = train_place(rank, world, layout), {}, model.shape
    for parameter in model_parameters(shape, layout.tensor):
        stages = {(layout.pipeline - 1) if parameter.last_stage else 0}
        if parameter.layer is not None:
            stages = {parameter.layer // (shape.layers // layout.pipeline // layout.interleave) % layout.pipeline}
        elif shape.tied and not parameter.last_stage:
            stages.add(layout.pipeline - 1)
        at, split = place.tensor, layout.tensor
        if parameter.expert is not None:
            assert shape.experts is not None
            at, split = place.expert_tensor, layout.expert_tensor
            if parameter.expert // (shape.experts.count // layout.expert) != place.expert:
                continue
        if place.pipeline in stages:
            state[parameter.megatron] = trainer_shard(model, parameter, at, split)
    return state


def trainer_shard(model: Model, parameter: Parameter, rank: int, size: int) -> Array:
    key = (model, parameter, rank, size)
    if key not in _SHARDS:
        parts = [torch.from_numpy(model.tensors[name]) for name in parameter.hf]
        shard = parameter.layout.shard(parameter.layout.to_megatron(parts), rank, size).numpy()
        _SHARDS[key] = shard.reshape(matrix(shard.shape))
    return _SHARDS[key]


_SHARDS: dict[tuple[Model, Parameter, int, int], Array] = {}
trainer_states = cache(
    lambda model, key, world: [trainer_state(model, Layout(**dict(key)), world, r) for r in range(world)]
)
engine_states = cache(lambda model, engine: [engine_state(model, engine, rank) for rank in range(engine.tensor)])


# ------------------------------------------------------------------------------------------------------------- plans


def execute(plan: Plan, shards: list[State], empty: dict[int, State]) -> dict[int, int]:
    """Fill the engines' tensors, which are by rank; returns how many elements each rank got from others."""
    got, ranks = dict.fromkeys(empty, 0), plan.engines.ranks
    for bucket in range(len(plan.buckets)):
        here: dict[int, list[Transfer]] = {rank: [] for rank in empty}
        for one in plan.transfers(bucket):
            piece = shards[one.source][one.parameter.megatron][one.from_row :, one.from_column :]
            place(empty[one.target], one)[:] += piece[: one.rows, : one.columns]
            got[one.target] += one.rows * one.columns * (one.source != one.target)
            here[one.target].append(one)
        for giver, getter in (pair for relay in plan.relays for pair in relay):
            for source, target in zip(ranks[giver], ranks[getter], strict=True):
                for one in here[source]:
                    place(empty[target], one)[:] += place(empty[source], one)
                    got[target] += one.rows * one.columns
                here[target] += here[source]
    return got


def place(state: State, one: Transfer) -> Array:
    """Where an engine's rank has what it gets."""
    assert one.parameter.engine is not None
    tensor = state[one.parameter.engine.partition("[")[0]]
    tensor = tensor if one.slot is None else tensor[one.slot]
    found = tensor.reshape(matrix(tensor.shape))[one.to_row :, one.to_column :][: one.rows, : one.columns]
    assert found.shape == (one.rows, one.columns)
    return found


def layouts(shape: ModelShape) -> Iterator[tuple[Layout, int]]:
    """All for up to 8 ranks, with the number of ranks."""
    experts = [1] if shape.experts is None else [1, 2, 4]
    for world, tensor, pipeline, interleave, context in product((1, 2, 4, 8), (1, 2, 4), (1, 2), (1, 2), (1, 2)):
        parts = pipeline * interleave
        if world % (tensor * pipeline * context) or shape.layers % parts or (interleave > 1 and pipeline == 1):
            continue
        for expert, expert_tensor in product(experts, experts[:2]):
            if world // pipeline % (expert * expert_tensor) == 0:
                yield (
                    Layout(
                        tensor=tensor,
                        pipeline=pipeline,
                        interleave=interleave,
                        context=context,
                        expert=expert,
                        expert_tensor=expert_tensor,
                    ),
                    world,
                )


def engines_of(shape: ModelShape, world: int, generator: random.Random) -> Engines:
    """On the trainer's own ranks, on some of them in any order, or on others; sometimes on more."""
    size = generator.choice([1, 2, 4, 8])
    expert = 1
    if shape.experts is not None:
        expert = generator.choice([n for n in (1, 2, 4) if size % n == 0])
    start = generator.choice([0, 0, world])
    ranks = list(range(start, start + max(size, world, generator.choice([0, 0, 0, 12]))))
    if generator.random() < 0.25:
        generator.shuffle(ranks)
    count = generator.randint(1, len(ranks) // size)
    return Engines(tuple(tuple(ranks[i * size : (i + 1) * size]) for i in range(count)), expert)


@pytest.mark.parametrize("name", MODELS)
def test_engines_get_what_their_loaders_would_have_cut(name: str, models: dict[str, Model]) -> None:
    """Random layouts on both sides; each is written once, and over the wire comes only what the GPU does not have.

    A rank of an engine that is not served gets all of its shard, for who passes it on does not ask what is there.
    """
    model, generator, seen = models[name], random.Random(name), Counter[str]()
    choices = list(layouts(model.shape))
    for number in range(220 if model.shape.experts is None else 130):
        layout, world = generator.choice(choices)
        engines = engines_of(model.shape, world, generator)
        training = Training(layout, world)
        plan = make_plan(model.shape, training, engines, ranks_per_node=4, bucket_bytes=generator.choice([1000, 10**6]))
        if number % 8 == 0:
            check(plan)
        held = trainer_states(model, tuple(layout), world)
        one = Engines((tuple(range(engines.tensor)),), engines.expert)
        want = {
            rank: state for ranks in engines.ranks for rank, state in zip(ranks, engine_states(model, one), strict=True)
        }
        have = {rank: {key: np.zeros_like(x) for key, x in state.items()} for rank, state in want.items()}
        got = execute(plan, held, have)
        served = {rank for number in plan.served for rank in engines.ranks[number]}
        for rank, state in want.items():
            for key, tensor in state.items():
                assert np.array_equal(have[rank][key], tensor), (rank, key, layout, world, engines)
            missing = np.ones(model.size, dtype=bool)
            missing[0] = False  # padding
            for shard in held[rank].values() if rank < world and rank in served else ():
                missing[shard] = False
            assert got[rank] == sum(np.count_nonzero(missing[x]) for x in state.values())
        cut = any(item.rows < plan.cells[item.cell].pattern.rows for bucket in plan.buckets for item in bucket)
        seen.update({"relays": bool(plan.relays), "relays of parts": bool(plan.relays) and cut, "parts": cut})
    assert min(seen.values()) > 0, seen


@pytest.mark.parametrize("limit", [1, 40, 1000, 2500, 10**9])
@pytest.mark.parametrize("ranks", [((0, 1, 2, 3), (4, 5, 6, 7)), tuple((rank,) for rank in range(6, 14))])
def test_buckets_are_bounded_both_ways(
    limit: int, ranks: tuple[tuple[int, ...], ...], models: dict[str, Model]
) -> None:
    """But for a single row that is larger than the limit, which is alone."""
    training, engines = Training(Layout(tensor=2, pipeline=2, expert=2), 8), Engines(ranks, min(2, len(ranks[0])))
    plan = make_plan(models["qwen3_moe"].shape, training, engines, ranks_per_node=8, bucket_bytes=limit)
    flow = traffic(plan)
    for number, bucket in enumerate(plan.buckets):
        sent, got = Counter[int](), Counter[int]()
        for one in plan.transfers(number):
            nbytes = one.rows * one.columns * 2
            sent[one.source] += nbytes * (one.source != one.target)
            got[one.target] += nbytes
        assert max([0, *sent.values(), *got.values()]) <= limit or (len(bucket) == 1 and bucket[0].rows == 1)
        for relay in plan.relays:
            for pair in relay:
                for source, target in zip(*(engines.ranks[engine] for engine in pair), strict=True):
                    got[target] += got[source]
        assert [got[rank] for rank in range(plan.sides.ranks)] == (flow.received + flow.kept)[number].tolist()
        assert [sent[rank] for rank in range(plan.sides.ranks)] == (flow.sent - flow.relayed)[number].tolist()
    assert (len(plan.buckets) == 1) == (limit == 10**9)
    check(plan)


def test_a_ranks_own_transfers_are_those_of_all_that_concern_it(models: dict[str, Model]) -> None:
    engines = Engines(((2, 3, 4, 5), (6, 7, 8, 9)), 2)
    plan = make_plan(
        models["glm4_moe"].shape, Training(Layout(tensor=2, expert=4), 8), engines, ranks_per_node=4, bucket_bytes=2000
    )
    flow = traffic(plan)
    for bucket in range(len(plan.buckets)):
        everything = list(plan.transfers(bucket))
        for rank in range(10):
            own = [one for one in everything if rank in (one.source, one.target)]
            assert list(plan.transfers(bucket, rank)) == own
            for way, sums in (("source", flow.sent), ("target", flow.received)):
                away = [one for one in own if one.source != one.target and getattr(one, way) == rank]
                assert sums[bucket, rank] == sum(
                    one.rows * one.columns * (4 if one.parameter.float32 else 2) for one in away
                )


QWEN3_8B = ModelShape("qwen3", 36, 4096, 32, 8, 128, 12288, 151936, 40960, 1e-6, Rope(), False, qk_norm=True)


@pytest.mark.parametrize(
    ("layout", "world", "engines", "most"),
    [
        # engines elsewhere: all ranks send alike
        (Layout(tensor=2), 16, [range(16, 20), range(20, 24)], 1.02),
        (Layout(tensor=4, context=2), 16, [range(16, 24)], 1.02),
        (Layout(tensor=4), 16, [[16], [17], [18]], 1.02),
        # on the same ranks
        # of two engine ranks that need a shard, the first and the last pair have one that holds it
        (Layout(tensor=4), 16, [range(start, start + 8) for start in (0, 8)], 1.34),
        (Layout(tensor=2, pipeline=2), 32, [range(start, start + 4) for start in range(0, 32, 4)], 1.1),
        (Layout(tensor=4, pipeline=2), 64, [[rank] for rank in range(64)], 1.02),
    ],
)
def test_senders_share_the_load(layout: Layout, world: int, engines: list[Any], most: float) -> None:
    """`most`: bytes sent by the busiest rank over the mean of the trainer's ranks."""
    ranks = tuple(map(tuple, engines))
    plan = make_plan(QWEN3_8B, Training(layout, world), Engines(ranks), ranks_per_node=8, bucket_bytes=1 << 29)
    sent = traffic(plan).sent.sum(0)[:world]
    assert sent.max() <= most * sent.mean()


@pytest.mark.parametrize(
    ("world", "layout", "engines", "size", "served"),
    [
        # as many ranks on both sides, or fewer in the engines: nothing is gained by relays
        (8, Layout(tensor=2), 4, 2, 4),
        (8, Layout(tensor=2, pipeline=2), 2, 2, 2),
        # a rank of the trainer sends one shard, however many engines there are
        (8, Layout(tensor=2), 16, 2, 4),
        (8, Layout(tensor=2), 64, 2, 4),
        (8, Layout(tensor=2, pipeline=2), 64, 8, 1),
        (1, Layout(), 5, 1, 1),
        # its one rank has to send all four shards in any case
        (1, Layout(), 8, 4, 1),
    ],
)
def test_engines_pass_on_what_the_trainer_would_send_too_often(
    world: int, layout: Layout, engines: int, size: int, served: int
) -> None:
    ranks = tuple(tuple(range(first, first + size)) for first in range(world, world + engines * size, size))
    plan = make_plan(QWEN3_8B, Training(layout, world), Engines(ranks), ranks_per_node=8, bucket_bytes=1 << 29)
    assert len(plan.served) == served
    assert len(plan.relays) == (engines // served - 1).bit_length()
    flow = traffic(plan)
    sent, got = (flow.sent - flow.relayed).sum(0), flow.received.sum(0)
    assert sent.max() <= max(1.02, size / world) * got.max()
    # the first of those that pass it on do so in each round
    assert flow.relayed.sum(0).max() == len(plan.relays) * got.max()
    assert flow.sent.sum() == flow.received.sum()


def test_relays_leave_an_engine_beside_the_trainer_what_it_has() -> None:
    """The trainer's ranks are those of the first of four engines, which keeps all and gives it to the others."""
    engines = Engines(tuple(tuple(range(first, first + 4)) for first in range(0, 16, 4)))
    plan = make_plan(QWEN3_8B, Training(Layout(tensor=4), 4), engines, ranks_per_node=8, bucket_bytes=1 << 29)
    assert (plan.served, plan.relays) == ((0,), (((0, 1),), ((0, 2), (1, 3))))
    flow = traffic(plan)
    assert np.array_equal(flow.sent, flow.relayed)
    assert not flow.received[:, :4].any()
    assert np.array_equal(flow.received[:, 4:8], flow.kept[:, :4])


def test_what_the_node_has_comes_from_the_node() -> None:
    """A node of two ranks has both tensor-parallel shards of its stage, and its engines need the other stage's too."""
    engines = Engines(tuple((rank,) for rank in range(8)))
    training = Training(Layout(tensor=2, pipeline=2), 8)
    plan = make_plan(QWEN3_8B, training, engines, ranks_per_node=2, bucket_bytes=1 << 40)
    for one in plan.transfers(0):
        if one.source // 4 == one.target // 4:
            assert one.source // 2 == one.target // 2


@pytest.mark.parametrize(
    ("model", "layout", "engines", "named"),
    [
        ("llama", Layout(tensor=3), Engines(((0, 1),)), r"16 cannot be divided evenly over 3 ranks"),
        (
            "llama",
            Layout(tensor=2),
            Engines(((0, 1, 2),)),
            r"qkv_proj\.weight: 2 cannot be divided evenly over 3",
        ),
        ("llama", Layout(pipeline=3), Engines(((0,),)), r"2 layers into 3 x 1 parts"),
        ("llama", Layout(), Engines(((0, 1), (2,))), r"as many ranks each"),
        ("llama", Layout(), Engines(((0, 1), (1, 2))), r"no rank twice"),
        ("mixtral", Layout(), Engines(((0, 1, 2),), 3), r"4 experts by 3 of an engine"),
        ("mixtral", Layout(), Engines(((0, 1, 2),), 2), r"an engine's 3 ranks by 2"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    model: str, layout: Layout, engines: Engines, named: str, models: dict[str, Model]
) -> None:
    with pytest.raises(PlanError, match=named):
        make_plan(models[model].shape, Training(layout, 6), engines, ranks_per_node=8, bucket_bytes=1000)


def test_a_parameter_without_a_known_place_is_named(tmp_path: Path) -> None:
    family_config("gpt_oss").save_pretrained(tmp_path)
    shape = read_model_shape(tmp_path)
    with pytest.raises(PlanError, match=r"decoder\.layers\.0\.mlp\.experts\.linear_fc1\.weight\[0\]"):
        make_plan(shape, Training(Layout(), 1), Engines(((0,),)), ranks_per_node=8, bucket_bytes=1000)


# ------------------------------------------------------------------------------------------------------------- check


def tampered(plan: Plan, name: str, change: Callable[[Cell], Cell]) -> Plan:
    """With another cell for the parameter of that engine name."""
    found = [cell for cell in plan.cells if any(one.engine == name for one in cell.parameters)]
    assert len(found) == 1
    return replace(plan, cells=tuple(change(cell) if cell is found[0] else cell for cell in plan.cells))


def with_pieces(change: Callable[[Array], Array]) -> Callable[[Cell], Cell]:
    return lambda cell: replace(cell, pattern=replace(cell.pattern, pieces=change(cell.pattern.pieces)))


def with_requests(change: Callable[[Array], Array]) -> Callable[[Cell], Cell]:
    return lambda cell: replace(cell, requests=change(cell.requests))


def less(table: Array) -> Array:
    return np.delete(table, 1)


def twice(table: Array) -> Array:
    return np.concatenate([table, table[1:2]])


def other(**changes: int) -> Callable[[Array], Array]:
    """The second row's columns are moved by these numbers."""

    def change(table: Array) -> Array:
        table = table.copy()
        for column, by in changes.items():
            table[column][1] += by
        return table

    return change


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (with_pieces(less), r"qkv_proj\.weight: the engine's shard 0: rows 4:6, columns 0:16 are written 0 times"),
        (with_pieces(twice), r"qkv_proj\.weight: the engine's shard 0: rows 4:6, columns 0:16 are written 2 times"),
        (with_pieces(other(to_row=1)), r"the engine's shard 0 does not have rows 5:7, columns 0:16 where"),
        (with_pieces(other(from_row=-1)), r"the trainer's shard 0 does not have rows 7:9"),
        (with_pieces(other(row=1, from_row=1, to_row=1)), r"qkv_proj\.weight"),
        (with_pieces(other(columns=-1)), r"rows 4:6, columns 15:16 are written 0 times"),
        (with_pieces(other(part=1)), r"qkv_proj\.weight: the trainer's shard 0 does not have"),
        (with_pieces(other(pair=100)), r"a piece is of no shard"),
        (with_requests(less), r"qkv_proj\.weight: rank 4 gets .* shard 0 .* 0 times, expected 1"),
        (with_requests(twice), r"qkv_proj\.weight: rank 4 gets .* shard 0 .* 2 times, expected 1"),
        (with_requests(other(target=1)), r"qkv_proj\.weight: rank 4 gets .* 0 times"),
        (
            with_requests(other(first=1)),
            r"rank \d is to send the trainer's shard 0, which it does not hold",
        ),
    ],
)
def test_check_notices(change: Callable[[Cell], Cell], what: str, models: dict[str, Model]) -> None:
    """A piece of a query, key or value, or a request for it, that is missing, doubled, or somewhere else."""
    training, engines = Training(Layout(tensor=2), 4), Engines(((0, 1, 2, 3), (4, 5, 6, 7)))
    plan = make_plan(models["llama"].shape, training, engines, ranks_per_node=8, bucket_bytes=10**6)
    check(plan)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    with pytest.raises(PlanError, match=what):
        check(tampered(plan, name, change))


def test_check_notices_a_missing_and_a_doubled_parameter(models: dict[str, Model]) -> None:
    training, engines = Training(Layout(expert=2), 4), Engines(((0, 1), (2, 3)), 2)
    plan = make_plan(models["mixtral"].shape, training, engines, ranks_per_node=8, bucket_bytes=1000)
    with pytest.raises(PlanError, match=r"rows \d+:\d+ are sent 0 times"):
        check(replace(plan, buckets=plan.buckets[:-1]))
    with pytest.raises(PlanError, match=r"rows \d+:\d+ are sent more than once"):
        check(replace(plan, buckets=(*plan.buckets, plan.buckets[0][:1])))


@pytest.mark.parametrize(
    ("row", "rows", "what"),
    [
        (1, -1, r"rows 0:1 are sent 0 times"),
        (0, -1, r"rows \d+:\d+ are sent 0 times"),
        (0, 1, r"rows \d+:\d+ are sent more than once"),
        (0, -99, r"embed_tokens\.weight: rows"),
    ],
)
def test_check_notices_other_rows(row: int, rows: int, what: str, models: dict[str, Model]) -> None:
    plan = make_plan(
        models["llama"].shape, Training(Layout(), 2), Engines(((0,), (1,))), ranks_per_node=8, bucket_bytes=600
    )
    check(plan)

    def changed(item: Item) -> Item:
        name = plan.cells[item.cell].parameters[item.k].engine
        if item.row or name != "model.embed_tokens.weight":
            return item
        return item._replace(row=item.row + row, rows=item.rows + rows)

    with pytest.raises(PlanError, match=what):
        check(replace(plan, buckets=tuple(tuple(map(changed, bucket)) for bucket in plan.buckets)))


@pytest.mark.parametrize(
    ("served", "relays", "what"),
    [
        ((0,), (((0, 1),), ((0, 2),)), r"engine 3: gets each bucket 0 times, expected 1"),
        ((), (((0, 1),), ((0, 2), (1, 3))), r"engine 0: does not have yet what it passes on, in round 0"),
        ((0,), (((0, 1),), ((0, 2), (1, 3)), ((2, 3),)), r"engine 3: gets each bucket 2 times"),
        ((0,), (((0, 1),), ((0, 2), (1, 2)), ((2, 3),)), r"engine 2: gets each bucket 2 times"),
        ((0, 1), (((0, 1),), ((0, 2), (1, 3))), r"engine 1: gets each bucket 2 times"),
        ((0,), (((0, 1),), ((0, 2), (2, 3))), r"engine 2: does not have yet what it passes on, in round 1"),
        ((0,), (((0, 1), (0, 2)), ((1, 3),)), r"engine 0: passes on two at a time, in round 0"),
        ((0,), (((0, 1),), ((0, 2), (1, 3)), ((0, 4),)), r"engine 4: gets each bucket 1 times, expected 0"),
        ((0, 1), (((0, 2), (1, 3)),), r"rank 2 gets what the trainer's shard 0 has for it 0 times, expected 1"),
    ],
)
def test_check_notices_other_relays(
    served: tuple[int, ...], relays: tuple[Relay, ...], what: str, models: dict[str, Model]
) -> None:
    engines = Engines(((1,), (2,), (3,), (4,)))
    plan = make_plan(models["llama"].shape, Training(Layout(), 1), engines, ranks_per_node=8, bucket_bytes=1000)
    assert (plan.served, plan.relays) == ((0,), (((0, 1),), ((0, 2), (1, 3))))
    check(plan)
    with pytest.raises(PlanError, match=what):
        check(replace(plan, served=served, relays=relays))


def test_check_notices_buckets_that_are_too_large(models: dict[str, Model]) -> None:
    """Of which a rank gets too much, or of which the trainer's one rank sends too much to an engine's two."""
    for engines, what in ((Engines(((0,),)), "gets"), (Engines(((1, 2),)), "sends")):
        training = Training(Layout(), 1)
        plan = make_plan(models["llama"].shape, training, engines, ranks_per_node=8, bucket_bytes=3000)
        check(plan)
        with pytest.raises(PlanError, match=rf"bucket \d+: rank 0 {what} \d+ bytes of at most 3000"):
            check(replace(plan, buckets=(plan.buckets[0] + plan.buckets[1], *plan.buckets[2:])))
        with pytest.raises(PlanError, match=rf"bucket 0: rank 0 {what} \d+ bytes of at most 2000"):
            check(replace(plan, bucket_bytes=2000))
