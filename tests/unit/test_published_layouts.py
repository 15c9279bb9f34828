"""Rows of published runs are read whatever their spelling, and what they leave open follows from what they give."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.layout import Attention, Mixture, Mlp, Scan, memory, step_time
from megarl.layout.machine import Shares
from tools.bench.layout_accuracy import TABLE
from tools.bench.published_layouts import Row, Run, machine, read_rows, read_runs
from tools.bench.published_models import HYBRIDS

COLUMNS = TABLE.read_text().splitlines()[0].split(",")
LLAMA = {
    "source": "somebody",
    "gpu": "A100-80GB-SXM",
    "n_gpus": 64,
    "model": "llama-30b",
    "params_b": 32.5,
    "layers": 60,
    "hidden": 6656,
    "ffn": 17_920,
    "heads": 52,
    "kv_heads": 52,
    "vocab": 32_000,
    "seq": 2048,
    "gbs": 256,
    "mbs": 1,
    "tp": 4,
    "pp": 2,
    "dp": 8,
    "precision": "bf16",
    "recompute": "none",
    "status": "ok",
    "kind": "pretrain",
    "quality": "A",
    "framework": "somebody's",
    "step_s_any": 10.0,
}
MOE = {"gpu": "H100-80GB-SXM", "kv_heads": 8, "pp": 1, "tp": 1, "ep": 8, "dp": 64, "ffn": 1536}


def row(**changes: Any) -> Row:
    given = LLAMA | changes
    assert set(given) <= set(COLUMNS)
    return {name: str(given.get(name, "")) for name in COLUMNS}


def read(**changes: Any) -> Run:
    runs, left_out = read_runs([row(**changes)])
    assert not left_out, left_out[0][1]
    return runs[0]


def answered(run: Run) -> bool:
    seconds = step_time(run.training, machine(run.row, Shares())).seconds
    return 0 < seconds < 1e5 and max(one.total for one in memory(run.training)) > 1e8


def test_every_row_of_the_table_that_gives_sizes_and_a_layout_is_read() -> None:
    runs, left_out = read_runs(read_rows(TABLE))
    assert len(runs) + len(left_out) == 1204
    assert {why.split(" ", 1)[1] for _, why in left_out} == {"is not given", "model's sizes are not given"}
    assert not [bad for bad, why in left_out if "sizes" in why and bad["hidden"]]


def test_sizes_that_a_row_leaves_open_follow_from_its_parameters() -> None:
    for run in read_runs(read_rows(TABLE))[0]:
        billions = float(run.row["params_b"])
        # MPT's positions are as long as the sequences; the others are parts of models, named without the embedding
        if run.row["hidden"] and not run.model.startswith(("mpt", "gpt-18b", "gpt-20b")):
            assert run.training.decoder.parameters / 1e9 == pytest.approx(billions, rel=0.08), run.model


@pytest.mark.parametrize("missing", [("layers",), ("ffn",), ("vocab",), ("heads", "kv_heads"), ("ffn", "vocab")])
def test_what_is_missing_is_guessed_to_have_the_parameters(missing: tuple[str, ...]) -> None:
    run = read(**dict.fromkeys(missing, ""))
    assert run.training.decoder.parameters / 1e9 == pytest.approx(32.5, rel=0.05)
    assert answered(run)


@pytest.mark.parametrize(
    "name", ["gpt-22b", "GPT3-40B", "gpt_1t", "Megatron 530B", "MT-NLG-530b", "OPT-175B", "mpt-30b", "BLOOM-7b1"]
)
def test_gpts_are_not_gated(name: str) -> None:
    model = read(model=name, ffn="", params_b="").training.decoder
    mlp = model.kinds[0].mlp
    assert isinstance(mlp, Mlp)
    assert (mlp.gated, mlp.width, mlp.up.bias) == (False, 4 * 6656, True)
    assert model.tied


@pytest.mark.parametrize("name", ["Llama-3.3-70B", "qwen2.5-32b", "Qwen3-14B", "gemma-7b", "mistral", "anything else"])
def test_other_dense_models_are_gated(name: str) -> None:
    mlp = read(model=name).training.decoder.kinds[0].mlp
    assert isinstance(mlp, Mlp)
    assert mlp.gated


@pytest.mark.parametrize(
    ("name", "sizes", "shared", "alternating"),
    [
        ("Qwen3-235B-A22B", (235, 94, 4096, 1536, 64, 4, 151_936, 128, 8), False, False),
        ("mixtral-8x7b", (46.7, 32, 4096, 14_336, 32, 8, 32_000, 8, 2), False, False),
        ("Llama4-Scout", (109, 48, 5120, 8192, 40, 8, 202_048, 16, 1), True, False),
        ("llama-4-maverick", (400, 48, 5120, 8192, 40, 8, 202_048, 128, 1), True, True),
        ("GLM-4.5-Air", (106, 46, 4096, 1408, 96, 8, 151_552, 128, 8), None, False),
        ("minimax-m2", (230, 62, 3072, 1536, 48, 8, 200_064, 256, 8), None, False),
    ],
)
def test_mixtures_are_recognised_by_their_parameters(
    name: str, sizes: tuple[float, ...], shared: bool | None, alternating: bool
) -> None:
    names = ("params_b", "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "experts", "topk")
    run = read(**MOE | dict(zip(names, sizes, strict=True)) | {"model": name})
    model = run.training.decoder
    assert model.parameters / 1e9 == pytest.approx(sizes[0], rel=0.06)
    mixtures = [kind.mlp for kind in model.kinds if isinstance(kind.mlp, Mixture)]
    if shared is not None:  # else it is too small to be told from other sizes that are not given
        assert all((one.shared is not None) == shared for one in mixtures)
    assert (len(model.kinds) > len(mixtures)) == alternating
    assert answered(run)


@pytest.mark.parametrize(
    "name", ["deepseek-v3", "DeepSeek-V3.2-Exp", "deepseek-r1", "Kimi-K2.5", "kimi_k2", "Moonlight-16B"]
)
def test_latent_attention_goes_by_the_name(name: str) -> None:
    sizes = {"layers": 61, "hidden": 7168, "ffn": 2048, "heads": 128, "kv_heads": "", "experts": 256, "topk": 8}
    run = read(**MOE | sizes | {"model": name, "ep": 64, "params_b": 671})
    mixer = run.training.decoder.kinds[0].mixer
    assert isinstance(mixer, Attention)
    assert (mixer.key, mixer.value) == (192, 128)
    assert answered(run)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Nemotron-3-Nano-30B", 31.6), ("nemotron3_super", 120.7), ("NemotronH-8B", 8.1), ("nemotron-h-56b", 56.2)],
)
def test_hybrids_are_known_by_name_without_sizes(name: str, billions: float) -> None:
    run = read(**MOE | dict.fromkeys(("layers", "hidden", "ffn", "heads", "kv_heads", "vocab"), "") | {"model": name})
    assert run.training.decoder in HYBRIDS.values()
    assert run.training.decoder.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert any(isinstance(kind.mixer, Scan) for kind in run.training.decoder.kinds)
    assert answered(run)


def test_gpt_oss_is_no_gpt() -> None:
    sizes = {"layers": 36, "hidden": 2880, "ffn": 2880, "heads": 64, "kv_heads": 8, "experts": 128, "topk": 4}
    for name in ("gpt-oss-120b", "GPT_OSS 120B", "gptoss-120b"):
        model = read(**MOE | sizes | {"model": name, "params_b": 116.8, "vocab": 201_088}).training.decoder
        windows = {kind.mixer.window for kind in model.kinds if isinstance(kind.mixer, Attention)}
        assert windows == {None, 128}
        assert model.parameters / 1e9 == pytest.approx(116.8, rel=0.02)


@pytest.mark.parametrize(
    ("given", "understood"),
    [
        ("BF16", "bf16"),
        ("fp16", "bf16"),
        ("", "bf16"),
        ("amp_bf16", "bf16"),
        ("FP8-DS", "fp8"),
        ("fp8-sc", "fp8"),
        ("fp8-blockwise", "fp8"),
        ("FP8-MX", "mxfp8"),
        ("MXFP8", "mxfp8"),
        ("NVFP4", "fp4"),
        ("fp8-rowwise", "bf16"),
        ("TF32", "fp32"),
        ("anything", "bf16"),
    ],
)
def test_precisions_are_read_by_what_they_contain(given: str, understood: str) -> None:
    assert read(precision=given).training.precision == understood


@pytest.mark.parametrize(
    ("gpu", "given", "understood"),
    [
        ("A100-80GB-SXM", "flash_attention2 + RMS kernel", "flash2"),
        ("A100-80GB-SXM", "flash_attentionv1.0.8", "flash1"),
        ("A100-80GB-SXM", "te/cudnn_flash", "flash2"),
        ("H100-80GB-SXM", "te/cudnn_flash", "cudnn"),
        ("H100-80GB-SXM", "FA3", "cudnn"),
        ("H100-80GB-SXM", "sdpa", "flash2"),
        ("H100-80GB-SXM", "fused_softmax", "fused_softmax"),
        ("H100-80GB-SXM", "eager", "unfused"),
        ("H100-80GB-SXM", "anything", "cudnn"),
    ],
)
def test_kernels_are_read_by_what_they_contain(gpu: str, given: str, understood: str) -> None:
    software = read(gpu=gpu, attn_kernel=given).training.software
    assert software.kernel == understood
    assert software.fused_norm


@pytest.mark.parametrize(
    ("framework", "expected"),
    [
        ("Megatron-LM 2022", {"backward_overlap": True, "pipeline_overlap": False, "kernel": "fused_softmax"}),
        ("Megatron-LM (2021, Narayanan et al.)", {"pipeline_overlap": False, "gradient_bytes": 2}),
        ("Megatron-LM 2024-04", {"pipeline_overlap": True, "gradient_bytes": 4}),
        ("Megatron-DeepSpeed (ZeRO-1)", {"backward_overlap": False, "fused_gradients": False}),
        ("AA-Scaling", {"gathered_logits": True, "listed": (1, 2)}),
        ("NVIDIA NeMo 25.04", {"gradient_bytes": 2}),
        ("NeMo AutoModel (FSDP2)", {"partition_bytes": 4.0}),
        ("something new", {"tensor_overlap": True, "gradient_bytes": 4}),
    ],
)
def test_programs_are_known_by_how_their_names_begin(framework: str, expected: dict[str, Any]) -> None:
    software = read(framework=framework).training.software
    assert {name: getattr(software, name) for name in expected} == expected


def test_seconds_follow_from_tokens_a_second() -> None:
    assert read(step_s_any="", step_time_s=7.5).seconds == 7.5
    rate = {"step_s_any": "", "tokens_per_s_per_gpu": "1,024"}
    assert read(**rate).seconds == pytest.approx(256 * 2048 / 1024 / 64)
    assert read(step_s_any="").seconds is None
    assert read(status="OOM").seconds is None


@pytest.mark.parametrize(
    "odd",
    [
        {"n_gpus": "64.0", "gbs": "1,024"},
        {"vpp": 7},
        {"pp": 8, "vpp": 12},
        {"pp": 16, "tp": 1, "layers": 10},
        {"ep": 16, "tp": 1},
        {"mbs": 512},
        {"mbs": "", "cp": "", "dp": ""},
        {"seq": 1_048_576, "cp": 8, "pp": 1, "tp": 8, "gbs": 8},
        {"kind": "LoRA", "framework": "FSDP2"},
        {"recompute": "block, 5 layers"},
        {"recompute": "core_attn,mlp", "sp": "TRUE"},
        {"optimizer_sharding": "false"},
        {"gpu": "NVIDIA H100 SXM5 80GB"},
        {"gpu": "a100_40gb"},
        {"gpu": "H20-96GB"},
        {"gpu": "GB200 NVL72", "recompute": ""},
        {"heads": 0, "params_b": ""},
        {"params_b": "?", "step_s_any": "n/a"},
    ],
)
def test_odd_values_do_no_harm(odd: dict[str, Any]) -> None:
    runs, left_out = read_runs([row(), row(**odd)])
    assert answered(runs[0])
    if len(runs) == 2:
        assert answered(runs[1])
    else:
        assert "?" in odd.values(), left_out[0][1]


def test_a_row_that_cannot_be_asked_is_named_with_the_reason() -> None:
    bad = [row(**one) for one in ({"gpu": "V100"}, {"n_gpus": 100}, {"tp": ""}, {"hidden": ""}, {"seq": "x"})]
    kept, left_out = read_runs([row(), *bad])
    assert len(kept) == 1
    assert [why for _, why in left_out] == [
        "GPU V100 is not known",
        "100 GPUs cannot be divided into groups of 8",
        "tp is not given",
        "the model's sizes are not given",
        "seq is 'x', not a number",
    ]
