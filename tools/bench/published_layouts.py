"""Rows of published training runs as the questions that `megarl.layout` answers.

A row has the columns of `published_layouts.csv`. What it does not state is taken from what is known of its architecture
(`published_models.py`) or its training program, the same for all of its rows; spellings are read by what they contain.
Used by `layout_accuracy.py`, which says what is done with them.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from megarl.config import Layout
from megarl.layout import (
    GENERATIONS,
    Decoder,
    Kernel,
    Machine,
    Precision,
    Scan,
    Shares,
    Software,
    Training,
    fits,
)
from megarl.simulator import GPUS
from tools.bench.published_models import Sizes, published_decoder

Row = dict[str, str]
T = TypeVar("T")

KERNELS: tuple[tuple[str, Kernel], ...] = (
    (r"cudnn|fa-?3|flash-?(attn|attention)?-?3|te/", "cudnn"),
    (r"fa-?2|flash.*2|sdpa|flex", "flash2"),
    (r"flash", "flash1"),
    (r"fused", "fused_softmax"),
    (r"torch|unfused|eager|native|naive", "unfused"),
)
"""The first that is in a name counts; as in the next one."""
PRECISIONS: tuple[tuple[str, Precision], ...] = (
    (r"fp4", "fp4"),
    (r"mx", "mxfp8"),
    (r"row", "bf16"),  # torchao's row-wise scales cost what 8 bits save
    (r"8", "fp8"),
    (r"fp32|float32|tf32", "fp32"),
)
"""16 bits are all the same; those that none names are 16 as well."""
EARLY = Software(tensor_overlap=False, data_overlap=False, pipeline_overlap=False, gradient_bytes=2)
APART = replace(EARLY, fused_gradients=False, backward_overlap=False)
FSDP = Software(kernel="flash2", tensor_overlap=False, gradient_bytes=2)
PROGRAMS = {
    r"aa-scaling": replace(
        APART, fused_norm=False, fused_mlp=False, gathered_logits=True, logit_bytes=18.0, listed=(1, 2)
    ),
    r"megatron-deepspeed": replace(APART, kernel="fused_softmax", partition_bytes=16.0, buffer_bytes=6e9),
    r"megatron-lm.*20(19|2[0-2])": replace(EARLY, kernel="fused_softmax"),
    r"megatron-lm": Software(tensor_overlap=False, data_overlap=False),
    r"(nvidia )?nemo automodel|automodel": replace(FSDP, fused_mlp=False, partition_bytes=4.0),
    r"megatron-bridge|(nvidia )?nemo": Software(gradient_bytes=2),
    r"llm-foundry|composer|mosaic": replace(FSDP, kernel="flash1", fused_mlp=False, logit_bytes=4.0),
    r"torchtitan|pytorch|fsdp|fairscale|metaseq|olmo": replace(FSDP, gradient_bytes=4),
}
"""By how a framework's name begins, the first that does; all others are current Megatron-core."""
WITH_DROPOUT = r"megatron-deepspeed|megatron-lm.*20(19|2[0-2])"
"""Programs that trained GPT with dropout; BLOOM had none."""
SHARDED = r"llm-foundry|composer|mosaic|torchtitan|.*(fsdp|zero-?3)"

GRAPHS_SINCE = 26.06
"""Megatron-Bridge's release from which its recipes capture layers with experts in CUDA graphs and overlap exchanges."""
JEAN_ZAY_NETWORK = 2.1e9
"""Bytes a second for each GPU where BigScience trained: of a node's 400 Gb/s of Omni-Path, NCCL reached 135 between two
nodes (the project's own measurement, bigscience/experiments/README.md), for eight GPUs."""
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
    def doubtful(self) -> bool:
        """One kernel's runs with two stages in one sheet: their bubbles are as long as if the pipeline were filled and
        emptied eight times a step, for micro-batches of 1 to 8. No other sheet of this program has that."""
        sheet = "llama_13B_bfloat16_64_GPUs_all_runs" in self.row["source"]
        return sheet and self.training.software.kernel == "flash2" and self.training.layout.pipeline == 2

    @property
    def model_parallel(self) -> bool:
        layout = self.training.layout
        return layout.model_ranks * layout.expert > 1


def read_rows(file: Path) -> list[Row]:
    with file.open(newline="", encoding="utf-8-sig") as lines:
        return [{name: (value or "").strip() for name, value in row.items() if name} for row in csv.DictReader(lines)]


def read_runs(rows: list[Row]) -> tuple[list[Run], list[tuple[Row, str]]]:
    """The rows that can be asked, and the others with the reason."""
    runs, left_out = [], []
    heads = {row["hidden"]: row["heads"] for row in reversed(rows) if row["heads"]}
    for given in rows:
        # the heads of a row that does not state them are those of the first row as wide
        row = given | {"heads": given["heads"] or heads.get(given["hidden"], ""), "status": given["status"].lower()}
        try:
            runs.append(Run(row, _training(row), _seconds(row)))
        except ValueError as error:
            left_out.append((row, str(error)))
    return runs, left_out


def machine(row: Row, shares: Shares) -> Machine:
    """The GPUs and the network of a row. Raises ValueError: unknown ones."""
    name = row["gpu"].upper().replace("_", "-")
    known = next((one for one in sorted(GENERATIONS, key=len, reverse=True) if one in name), None)
    if known is None:
        raise ValueError(f"GPU {row['gpu']} is not known")
    gpu = GPUS[known]
    if "40GB" in name and known == "A100":
        known, gpu = "A100-40GB", GPUS["A100-40GB"]
    if row["framework"].lower().startswith("megatron-deepspeed"):
        gpu = replace(gpu, network=JEAN_ZAY_NETWORK)
    if "HBM2E" in name and known == "H100":
        slower = {"flops_16": gpu.flops_16 * POWER_CAPPED, "flops_8": gpu.flops_8 * POWER_CAPPED}
        gpu = replace(gpu, memory=94e9, bandwidth=2.4e12, **slower)
    return Machine(gpu, GENERATIONS[known], shares)


def _number(row: Row, name: str, default: float = 0.0) -> float:
    """Raises ValueError: not a number."""
    text = row.get(name, "").replace(",", "")
    try:
        return float(text) if text else default
    except ValueError:
        raise ValueError(f"{name} is {row[name]!r}, not a number") from None


def _whole(row: Row, name: str, default: int = 0) -> int:
    return round(_number(row, name, default))


def _seconds(row: Row) -> float | None:
    """The step's, or from tokens a second."""
    if row["status"] == "oom":
        return None
    seconds = _number(row, "step_s_any") or _number(row, "step_time_s")
    rate = _number(row, "tok_s_gpu_any") or _number(row, "tokens_per_s_per_gpu")
    if not seconds and rate:
        seconds = _number(row, "gbs") * _number(row, "seq") / (rate * _number(row, "n_gpus"))
    return seconds or None


def _layout(row: Row) -> Layout:
    for name in ("n_gpus", "tp", "pp", "seq", "gbs"):
        if _whole(row, name) < 1:
            raise ValueError(f"{name} is not given")
    tensor, pipeline = _whole(row, "tp"), _whole(row, "pp")
    context = _whole(row, "cp") or 1
    if not row["cp"] and row["dp"]:  # what the printed data-parallel size leaves
        context = max(1, _whole(row, "n_gpus") // (tensor * pipeline * max(1, _whole(row, "dp"))))
    return Layout(
        tensor=tensor,
        pipeline=pipeline,
        interleave=max(1, _whole(row, "vpp")) if pipeline > 1 else 1,
        context=context,
        expert=_whole(row, "ep") or 1,
        expert_tensor=_whole(row, "etp") or 1,
        recompute=_recompute(row),  # type: ignore[arg-type]
    )


def _recompute(row: Row) -> str:
    how = row["recompute"].lower()
    if how in ("", "none", "no", "false", "0"):
        return "none"
    return "full" if re.search(r"full|uniform|block|every|true", how) else "selective"


def _training(row: Row) -> Training:
    framework = row["framework"].lower()
    layout, software, decoder = _layout(row), _program(row), _decoder(row)
    if any(isinstance(kind.mixer, Scan) for kind in decoder.kinds):  # not captured in graphs
        software = replace(software, graphs=False, expert_overlap=False)
    sharded = re.match(SHARDED, framework) or "fsdp" in row["note"].lower()
    training = Training(
        decoder,
        layout,
        _whole(row, "n_gpus"),
        _whole(row, "seq"),
        _whole(row, "gbs"),
        _whole(row, "mbs") or 1,
        _named(row["precision"], PRECISIONS, "bf16"),
        sequence_parallel=row["sp"].lower() not in ("false", "0", "no") and layout.tensor > 1,
        sharding="full" if sharded else "none" if row["optimizer_sharding"].lower() == "false" else "optimizer",
        adapters="lora" in row["kind"].lower(),
        software=software,
    )
    place, _ = machine(row, Shares()), training.data  # both raise where it cannot be
    return _partly_recomputed(training, row) if row["recompute"] else _least_recompute(training, place)


def _partly_recomputed(training: Training, row: Row) -> Training:
    """What programs mean by selective recomputation beside that of attention's scores."""
    full = replace(training, layout=training.layout.model_copy(update={"recompute": "full"}))
    framework = row["framework"].lower()
    if training.layout.recompute != "selective":
        return training
    if framework.startswith("torchtitan"):  # every other layer, or every other product
        return replace(full, recomputed=0.5)
    if re.search(r"recompute [\w,+]*\bmoe\b", row["note"].lower()):  # all but attention
        return replace(full, recomputed=0.75, light_recompute=True)
    return replace(training, light_recompute=framework.startswith("mcore"))  # their pages: norms and activations


def _least_recompute(training: Training, machine: Machine) -> Training:
    """What is kept of activations is not stated: all, or as much as fits."""
    full = replace(training, layout=training.layout.model_copy(update={"recompute": "full"}))
    light = replace(training, light_recompute=True)
    tenths = (replace(full, light_recompute=True, recomputed=tenth / 10) for tenth in range(1, 11))
    return next((one for one in (training, light, *tenths) if fits(one, machine)), full)


def _named(text: str, names: tuple[tuple[str, T], ...], default: T) -> T:
    """What the first pattern stands for that is in the text."""
    return next((value for pattern, value in names if re.search(pattern, text.lower())), default)


def _program(row: Row) -> Software:
    framework, note = row["framework"].lower(), row["note"].lower()
    software = next((one for start, one in PROGRAMS.items() if re.match(start, framework)), Software())
    if framework.startswith("megatron-deepspeed") and "bf16" in row["precision"].lower():
        software = replace(software, gradient_bytes=4)  # its optimizer for bf16 sums gradients in 32 bits
    kernel = row["attn_kernel"].lower()
    software = replace(software, kernel=_named(kernel, KERNELS, software.kernel))
    if software.kernel == "cudnn" and "A100" in row["gpu"].upper():
        software = replace(software, kernel="flash2")  # which TransformerEngine takes before Hopper
    if "rms" in kernel:
        software = replace(software, fused_norm=True)
    if "async" in note:
        software = replace(software, tensor_overlap=True)
    if "alltoall" in note or "a2a" in note:
        software = replace(software, send_once="deepep" in note)
    if "a2a overlap" in note:
        software = replace(software, expert_overlap=True)
    if (release := re.search(r"\((\d\d\.\d\d)[.\d]*\)$", row["source"])) and float(release[1]) >= GRAPHS_SINCE:
        software = replace(software, graphs=True, expert_overlap=_whole(row, "vpp", 1) > 1 or row["pp"] == "1")
    return software


def _decoder(row: Row) -> Decoder:
    sizes = None
    if row["hidden"]:
        names = ("hidden", "layers", "ffn", "heads", "kv_heads", "vocab", "experts", "topk")
        sizes = Sizes(*(_whole(row, name) for name in names), billions=_number(row, "params_b"))
    decoder = published_decoder(row["model"], sizes)
    name = row["model"].lower()
    if re.match(WITH_DROPOUT, row["framework"].lower()) and name.startswith("gpt"):
        decoder = replace(decoder, dropout=True)
    return decoder
