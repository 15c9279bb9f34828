"""Rows of published training runs as the questions that `megarl.layout` answers.

A row has the columns of `published_layouts.csv`. What it does not state is taken from what is known of its architecture
or its training program, the same for all of its rows. Used by `layout_accuracy.py`, which says what is done with them.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from megarl.config import LatentAttention, Layout
from megarl.layout import (
    Attention,
    Decoder,
    Kernel,
    Layer,
    Linear,
    Machine,
    Mixture,
    Mlp,
    Precision,
    Scan,
    Shares,
    Software,
    Training,
    fits,
    gated_mlp,
    grouped_attention,
    latent_attention,
)
from megarl.simulator import GPUS

Row = dict[str, str]

KERNELS: dict[str, Kernel] = {
    "torch": "unfused",
    "fused": "fused_softmax",
    "fused_softmax": "fused_softmax",
    "flash1": "flash1",
    "flash2": "flash2",
    "flash2+rms": "flash2",
}
PRECISIONS: dict[str, Precision] = {
    "bf16": "bf16",
    "fp16": "bf16",
    "amp_bf16": "bf16",
    "amp_fp8": "fp8",
    "fp8": "fp8",
    "fp8-cs": "fp8",
    "fp8-rowwise": "fp8",
    "mxfp8": "mxfp8",
    "fp8-mx": "mxfp8",
    "nvfp4": "fp4",
}
EARLY = Software(tensor_overlap=False, data_overlap=False, gradient_bytes=2)
PROGRAMS = {
    "AA-Scaling": replace(EARLY, fused_norm=False, fused_mlp=False, gathered_logits=True, logit_bytes=18.0),
    "Megatron-DeepSpeed": replace(EARLY, partition_bytes=16.0, buffer_bytes=6e9),
    "Megatron-LM 2022": EARLY,
    "Megatron-LM": Software(tensor_overlap=False, data_overlap=False),
    "Megatron-Bridge": Software(gradient_bytes=2),
    "NeMo": Software(gradient_bytes=2),
    "NeMo AutoModel": Software(gradient_bytes=2, tensor_overlap=False),
    "llm-foundry": Software(kernel="flash1", fused_mlp=False, gradient_bytes=2, logit_bytes=4.0),
    "torchtitan": Software(kernel="flash2", tensor_overlap=False),
}
"""By how a framework's name begins; all others are current Megatron-core."""

GRAPHS_SINCE = 26.06
"""Megatron-Bridge's release from which its recipes capture layers with experts in CUDA graphs and overlap exchanges."""
JEAN_ZAY_NETWORK = 6.25e9
"""Bytes a second for each GPU: four 100 Gb/s Omni-Path links for eight of them, where BigScience trained."""
POWER_CAPPED = 0.8
"""torchtitan's 500 W H100s reach so much of an SXM5's clock."""


@dataclass(frozen=True)
class Run:
    """A row that can be asked; `seconds` is None where it ran out of memory or gives none."""

    row: Row
    training: Training
    seconds: float | None

    @property
    def model(self) -> str:
        return self.row["model"]

    @property
    def model_parallel(self) -> bool:
        layout = self.training.layout
        return layout.model_ranks * layout.expert > 1


def read_rows(file: Path) -> list[Row]:
    with file.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def read_runs(rows: list[Row]) -> tuple[list[Run], list[tuple[Row, str]]]:
    """The rows that can be asked, and the others with the reason."""
    runs, left_out = [], []
    heads = {row["hidden"]: row["heads"] for row in reversed(rows) if row["heads"]}
    for given in rows:
        # the heads of a row that does not state them are those of the first row as wide
        row = given if given["heads"] else given | {"heads": heads.get(given["hidden"], "")}
        try:
            runs.append(Run(row, _training(row), float(row["step_s_any"]) if row["step_s_any"] else None))
        except ValueError as error:
            left_out.append((row, str(error)))
    return runs, left_out


def machine(row: Row, shares: Shares) -> Machine:
    """The GPUs and the network of a row."""
    name = row["gpu"]
    generation = next(
        one for one in ("A100", "H100", "H200", "B200", "B300") if one in name.replace("GB", "B")
    ).replace("H200", "H100")
    for known in ("A100-40GB", "GB300", "GB200", "B300", "B200", "H200", "H100", "A100"):
        if name.startswith(known):
            gpu = GPUS[known]
            break
    else:
        raise ValueError(f"unknown GPU {name}")
    if row["framework"].startswith("Megatron-DeepSpeed"):
        gpu = replace(gpu, network=JEAN_ZAY_NETWORK)
    if "500W" in name or "HBM2e" in name:
        gpu = replace(
            gpu, memory=94e9, flops_16=gpu.flops_16 * POWER_CAPPED, flops_8=gpu.flops_8 * POWER_CAPPED, bandwidth=2.4e12
        )
    return Machine(gpu, generation, shares)


def _training(row: Row) -> Training:
    for name in ("n_gpus", "tp", "pp", "seq", "gbs"):
        if not row[name]:
            raise ValueError(f"{name} is not given")
    tensor = int(row["tp"])
    context = int(row["cp"] or 1)
    if not row["cp"] and row["dp"]:  # what the printed data-parallel size leaves
        context = max(1, int(row["n_gpus"]) // (tensor * int(row["pp"]) * int(row["dp"])))
    layout = Layout(
        tensor=tensor,
        pipeline=int(row["pp"]),
        interleave=int(row["vpp"] or 1) if int(row["pp"]) > 1 else 1,
        context=context,
        expert=int(row["ep"] or 1),
        expert_tensor=int(row["etp"] or 1),
        recompute=row["recompute"] or "none",  # type: ignore[arg-type]
    )
    software, decoder = _program(row), _decoder(row)
    if any(isinstance(kind.mixer, Scan) for kind in decoder.kinds):  # not captured in graphs
        software = replace(software, graphs=False, expert_overlap=False)
    sharded = row["framework"].startswith(("llm-foundry", "torchtitan")) or "FSDP" in row["framework"] + row["note"]
    training = Training(
        decoder,
        layout,
        int(row["n_gpus"]),
        int(row["seq"]),
        int(row["gbs"]),
        int(row["mbs"] or 1),
        PRECISIONS.get(row["precision"], "bf16"),
        sequence_parallel=row["sp"] != "False" and tensor > 1,
        sharding="full" if sharded else "none" if row["optimizer_sharding"] == "False" else "optimizer",
        adapters=row["kind"] == "lora",
        software=software,
    )
    if row["recompute"] == "selective" and row["framework"].startswith("MCore"):
        training = replace(training, light_recompute=True)  # their pages: norms and activations
    return training if row["recompute"] else _least_recompute(training, machine(row, Shares()))


def _least_recompute(training: Training, machine: Machine) -> Training:
    """What is kept of activations is not stated: all, or as much as fits."""
    full = replace(training, layout=training.layout.model_copy(update={"recompute": "full"}))
    light = replace(training, light_recompute=True)
    tenths = (replace(full, light_recompute=True, recomputed=tenth / 10) for tenth in range(1, 11))
    return next((one for one in (training, light, *tenths) if fits(one, machine)), full)


def _program(row: Row) -> Software:
    known = [name for name in PROGRAMS if row["framework"].startswith(name)]
    software = PROGRAMS[max(known, key=len)] if known else Software()
    if row["attn_kernel"] in KERNELS:
        software = replace(software, kernel=KERNELS[row["attn_kernel"]])
    if row["attn_kernel"].endswith("+rms"):
        software = replace(software, fused_norm=True)
    if "async" in row["note"].lower():
        software = replace(software, tensor_overlap=True)
    if "alltoall" in row["note"] or "A2A" in row["note"]:
        software = replace(software, send_once="DeepEP" in row["note"])
    if "A2A overlap" in row["note"]:
        software = replace(software, expert_overlap=True)
    if (release := re.search(r"\((\d\d\.\d\d)[.\d]*\)$", row["source"])) and float(release[1]) >= GRAPHS_SINCE:
        software = replace(software, graphs=True, expert_overlap=int(row["vpp"] or 1) > 1 or row["pp"] == "1")
    return software


def _decoder(row: Row) -> Decoder:
    name = row["model"]
    for known, make in _HYBRIDS.items():
        if name.startswith(known):
            return make
    sizes = tuple(int(row[field]) if row[field] else None for field in _SIZES)
    if sizes[1] is None:
        raise ValueError("the model's sizes are not given")
    return _described(name, float(row["params_b"] or 0), sizes)


_SIZES = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "experts", "topk")
_LATENT = {
    "deepseek-v3": (LatentAttention(1536, 512, 128, 64, 128), 3, 18432, 1),
    "kimi-k2": (LatentAttention(1536, 512, 128, 64, 128), 1, 18432, 0),
}
"""Latent attention, leading dense layers, their width, and multi-token-prediction layers that are trained."""
_WINDOWED = {"gpt-oss": 128}
_VOCAB = 50_257


@cache
def _described(name: str, billions: float, sizes: tuple[int | None, ...]) -> Decoder:
    """The decoder of these sizes; of those that the row leaves open, the ones nearest to its parameters."""
    layers, hidden, ffn, heads, kv_heads, vocab, experts, topk = sizes
    assert hidden is not None
    vocab = vocab or -(-_VOCAB // 128) * 128
    latent = next((known for start, known in _LATENT.items() if name.startswith(start)), None)
    plain = name.startswith(("gpt-", "gpt3", "mpt", "bloom", "nemotron")) and not name.startswith("gpt-oss")
    head_counts = [heads] if heads else [hidden // 128]
    head_dims = [hidden // head_counts[0]] if plain or not experts else [hidden // head_counts[0], 128, 64]
    depth = [layers] if layers else range(1, 200)
    best = None
    for count, head_dim in product(depth, head_dims):
        assert count is not None
        candidate = _make(
            name,
            count,
            hidden,
            ffn or 4 * hidden,
            head_counts[0],
            kv_heads,
            head_dim,
            vocab,
            experts,
            topk,
            plain,
            latent,
        )
        error = abs(candidate.parameters / 1e9 - billions)
        if best is None or error < best[0]:
            best = (error, candidate)
    assert best is not None
    return best[1]


def _make(
    name: str,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int | None,
    head_dim: int,
    vocab: int,
    experts: int | None,
    topk: int | None,
    plain: bool,
    latent: Any,
) -> Decoder:
    windows = [window for start, window in _WINDOWED.items() if name.startswith(start)]
    attention: Attention = (
        latent_attention(hidden, heads, latent[0])
        if latent
        else grouped_attention(hidden, heads, kv_heads or heads, head_dim, qkv_bias=plain, output_bias=plain)
    )
    if name.startswith(("gpt-", "gpt3", "mpt", "bloom")) and not experts:
        attention = replace(attention, rotary=False)
    order: list[int] = [0] * layers
    if plain:
        mlp: Mlp | Mixture = Mlp(Linear(hidden, ffn, "outputs", True), Linear(ffn, hidden, "inputs", True), gated=False)
        kinds = [Layer(attention, mlp, 4 * hidden)]
    elif not experts:
        kinds = [Layer(attention, gated_mlp(hidden, ffn), 2 * hidden)]
    else:
        shared = gated_mlp(hidden, ffn) if latent else None
        mlp = Mixture(
            gated_mlp(hidden, ffn, bias=name.startswith("gpt-oss")),
            experts,
            topk or 1,
            Linear(hidden, experts, "none"),
            shared,
        )
        kinds = [Layer(attention, mlp, 2 * hidden)]
        if latent:
            layers += latent[3]
            kinds.append(Layer(attention, gated_mlp(hidden, latent[2]), 2 * hidden))
            order = [1] * latent[1] + [0] * (layers - latent[1])
    if windows:
        kinds.append(replace(kinds[0], mixer=replace(attention, window=windows[0])))
        order = [layer % 2 for layer in range(layers)]
    return Decoder(
        name,
        hidden,
        vocab,
        tuple(kinds),
        tuple(order),
        tied=name.startswith(("gpt-1", "gpt-2", "gpt-5", "gpt3", "mpt", "bloom")) and not name.startswith("gpt-oss"),
        final_norm=hidden * (2 if plain else 1),
        dropout=name.startswith(("gpt-1", "gpt-2", "gpt-5", "bloom")),
    )


def _hybrid(
    name: str,
    hidden: int,
    pattern: str,
    *,
    scan_heads: int,
    experts: int,
    topk: int,
    width: int,
    shared: int,
    latent: int | None = None,
) -> Decoder:
    """Nemotron-H: layers of one mixer each, M a Mamba-2, * attention, E experts (squared ReLU, not gated)."""
    inner, state, groups = scan_heads * 64, 128, 8
    scan = Scan(
        (Linear(hidden, 2 * inner + 2 * groups * state + scan_heads, "outputs"), Linear(inner, hidden, "inputs")),
        scan_heads,
        64,
        state,
        groups,
    )

    def mlp(inputs: int, size: int) -> Mlp:
        return Mlp(Linear(inputs, size, "outputs"), Linear(size, inputs, "inputs"), gated=False)

    around = () if latent is None else (Linear(hidden, latent, "none"), Linear(latent, hidden, "none"))
    mixture = Mixture(
        mlp(latent or hidden, width), experts, topk, Linear(hidden, experts, "none"), mlp(hidden, shared), around
    )
    attention = grouped_attention(hidden, 32, 2, 128)
    kinds = (
        Layer(scan, None, hidden, 1),
        Layer(attention, None, hidden, 1),
        Layer(None, mixture, hidden, 1),
    )
    return Decoder(name, hidden, 131_072, kinds, tuple("M*E".index(one) for one in pattern), final_norm=hidden)


_HYBRIDS = {
    "nemotron3-nano": _hybrid(
        "nemotron3-nano",
        2688,
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        scan_heads=64,
        experts=128,
        topk=6,
        width=1856,
        shared=3712,
    ),
    "nemotron3-super": _hybrid(
        "nemotron3-super",
        4096,
        "MEMEMEM*E" * 8 + "ME" * 8,
        scan_heads=128,
        experts=512,
        topk=22,
        width=2688,
        shared=5376,
        latent=1024,
    ),
}
"""Sizes from the models' published configurations."""
