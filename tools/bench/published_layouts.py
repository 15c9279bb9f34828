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

from megarl.config import LatentAttention, Layout
from megarl.layout import (
    GENERATIONS,
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
EARLY = Software(tensor_overlap=False, data_overlap=False, pipeline_overlap=False, gradient_bytes=2)
PROGRAMS = {
    "AA-Scaling": replace(EARLY, fused_gradients=False, backward_overlap=False, fused_norm=False, fused_mlp=False, gathered_logits=True, logit_bytes=18.0, listed=(1, 2)),
    "Megatron-DeepSpeed": replace(EARLY, fused_gradients=False, backward_overlap=False, partition_bytes=16.0, buffer_bytes=6e9),
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
    """The GPUs and the network of a row. Raises ValueError: unknown ones."""
    name = row["gpu"]
    known = next((one for one in sorted(GENERATIONS, key=len, reverse=True) if name.startswith(one)), None)
    if known is None:
        raise ValueError(f"GPU {name} is not known")
    gpu = GPUS[known]
    if row["framework"].startswith("Megatron-DeepSpeed"):
        gpu = replace(gpu, network=JEAN_ZAY_NETWORK)
    if "HBM2e" in name:
        slower = {"flops_16": gpu.flops_16 * POWER_CAPPED, "flops_8": gpu.flops_8 * POWER_CAPPED}
        gpu = replace(gpu, memory=94e9, bandwidth=2.4e12, **slower)
    return Machine(gpu, GENERATIONS[known], shares)


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
    place, _ = machine(row, Shares()), training.data  # both raise where it cannot be
    if row["recompute"] == "selective" and row["framework"].startswith("MCore"):
        training = replace(training, light_recompute=True)  # their pages: norms and activations
    return training if row["recompute"] else _least_recompute(training, place)


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
    """The model; of the sizes that a row leaves open, those with which it has most nearly its parameters."""
    name = row["model"]
    for known, decoder in _HYBRIDS.items():
        if name.startswith(known):
            return decoder
    if not row["hidden"]:
        raise ValueError("the model's sizes are not given")
    hidden = int(row["hidden"])
    heads = int(row["heads"] or hidden // 128)
    experts = int(row["experts"] or 0)
    depths = [int(row["layers"])] if row["layers"] else range(1, 200)
    head_dims = [hidden // heads, 128, 64] if experts else [hidden // heads]
    candidates = [
        _described(
            name,
            _Sizes(
                layers,
                hidden,
                int(row["ffn"] or 4 * hidden),
                heads,
                int(row["kv_heads"] or heads),
                head_dim,
                int(row["vocab"] or _VOCAB),
                experts,
                int(row["topk"] or 1),
            ),
        )
        for layers, head_dim in product(depths, head_dims)
    ]
    billions = float(row["params_b"] or 0)
    return min(candidates, key=lambda decoder: abs(decoder.parameters / 1e9 - billions))


_VOCAB = 50_304
"""GPT-2's, padded; where a row gives none."""
_UNGATED = ("gpt-", "gpt3", "mpt", "bloom", "nemotron-")
"""Decoders like GPT-2: biases and MLPs that are not gated."""
_TIED = ("gpt-1", "gpt-2", "gpt-5", "gpt3", "mpt", "bloom")
_UNROTATED = _TIED
_DROPOUT = ("gpt-1", "gpt-2", "gpt-5", "bloom")
_WINDOWED = {"gpt-oss": 128}


@dataclass(frozen=True)
class _Latent:
    """What rows do not give of models with latent attention: their first layers are dense and of another width.

    `predicted`: multi-token-prediction layers that are trained.
    """

    attention: LatentAttention
    dense: int
    width: int
    shared: int = 1
    predicted: int = 0


_LATENT = {
    "deepseek-v3": _Latent(LatentAttention(1536, 512, 128, 64, 128), dense=3, width=18_432, predicted=1),
    "kimi-k2": _Latent(LatentAttention(1536, 512, 128, 64, 128), dense=1, width=18_432),
    "deepseek-v2": _Latent(LatentAttention(1536, 512, 128, 64, 128), dense=1, width=12_288, shared=2),
    "deepseek-v2-lite": _Latent(LatentAttention(None, 512, 128, 64, 128), dense=1, width=10_944, shared=2),
    "moonlight": _Latent(LatentAttention(None, 512, 128, 64, 128), dense=1, width=11_264, shared=2),
}
"""Sizes from the models' published configurations."""


@dataclass(frozen=True)
class _Sizes:
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int
    topk: int


@cache
def _described(name: str, sizes: _Sizes) -> Decoder:
    """A decoder of the kind that its name tells."""
    hidden = sizes.hidden
    latent = next((_LATENT[start] for start in sorted(_LATENT, reverse=True) if name.startswith(start)), None)
    window = next((size for start, size in _WINDOWED.items() if name.startswith(start)), None)
    ungated = name.startswith(_UNGATED) and not sizes.experts
    attention = (
        latent_attention(hidden, sizes.heads, latent.attention)
        if latent
        else grouped_attention(
            hidden, sizes.heads, sizes.kv_heads, sizes.head_dim, qkv_bias=ungated, output_bias=ungated
        )
    )
    attention = replace(attention, rotary=not name.startswith(_UNROTATED))
    mlp: Mlp | Mixture = gated_mlp(hidden, sizes.ffn, bias=window is not None)
    if ungated:
        up, down = Linear(hidden, sizes.ffn, "outputs", True), Linear(sizes.ffn, hidden, "inputs", True)
        mlp = Mlp(up, down, gated=False)
    elif sizes.experts:
        shared = gated_mlp(hidden, latent.shared * sizes.ffn) if latent else None
        mlp = Mixture(mlp, sizes.experts, sizes.topk, Linear(hidden, sizes.experts, "none"), shared)
    kinds = [Layer(attention, mlp, (4 if ungated else 2) * hidden)]
    order = [0] * sizes.layers
    if latent:
        kinds.append(Layer(attention, gated_mlp(hidden, latent.width), 2 * hidden))
        order = [1] * latent.dense + [0] * (sizes.layers + latent.predicted - latent.dense)
    if window:
        kinds.append(replace(kinds[0], mixer=replace(attention, window=window)))
        order = [layer % 2 for layer in range(sizes.layers)]
    return Decoder(
        name,
        hidden,
        sizes.vocab,
        tuple(kinds),
        tuple(order),
        tied=name.startswith(_TIED),
        final_norm=hidden * (2 if ungated else 1),
        dropout=name.startswith(_DROPOUT),
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
