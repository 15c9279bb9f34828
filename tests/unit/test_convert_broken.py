"""What is wrong with a checkpoint or a target is told by name, with what to do, and leaves nothing behind."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import random
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace as replace_fields
from io import BytesIO
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, ChunkStorageMetadata, Metadata, MetadataIndex

from megarl.config import RecipeError
from megarl.weights import Progress, convert, open_source
from megarl.weights.dcp import DcpReader
from megarl.weights.dcp_metadata import _Unpickler
from megarl.weights.hf import INDEX, SINGLE
from tests.families import write_model

UP = "model.layers.0.mlp.up_proj.weight"
NORM = "decoder.final_layernorm.weight"
PART = "model-00002-of-"


def edit(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def replace(directory: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Change, add or remove a tensor of a single file."""
    tensors = load_file(directory / SINGLE)
    tensors.pop(name, None)
    save_file(tensors | ({} if tensor is None else {name: tensor}), directory / SINGLE, metadata={"format": "pt"})


def part(directory: Path) -> Path:
    return next(directory.glob(f"{PART}*"))


def last(directory: Path) -> Path:
    return max(directory.glob("model-*"))


def cut(path: Path, by: int = 1) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def overwrite(path: Path, data: bytes, at: int = 0) -> None:
    old = path.read_bytes()
    path.write_bytes(old[:at] + data + old[at + len(data) :])


def edit_index(directory: Path, **changes: str | None) -> None:
    path = directory / INDEX
    index = json.loads(path.read_text())
    index["weight_map"] |= changes
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file}
    path.write_text(json.dumps(index))


def forge(directory: Path, what: Any) -> None:
    (directory / ".metadata").write_bytes(pickle.dumps(what))


class Attribute:
    """What Python before 3.11.4 makes of an enumeration's member."""

    def __init__(self, owner: type, name: str) -> None:
        self._wanted = owner, name

    def __reduce__(self) -> Any:
        return getattr, self._wanted


class Command:
    """A pickle that runs a command when it is loaded."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/should-never-be",)


Break = Callable[[Path], object]


def edit_header(directory: Path, change: Callable[[bytes], bytes]) -> None:
    raw = (directory / SINGLE).read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = change(raw[8:end])
    (directory / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + raw[end:])


def edit_metadata(directory: Path, change: Callable[[Any], object]) -> None:
    metadata = pickle.loads((directory / ".metadata").read_bytes())  # noqa: S301  our own
    change(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def norm_storage(metadata: Any) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == NORM)


HF: dict[str, tuple[Break, str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), r"has neither config\.json, as a Hugging Face directory"),
    "config is no json": (lambda d: (d / "config.json").write_text("{"), r"config\.json: line 1 is not JSON"),
    "unknown architecture": (
        lambda d: edit(d, architectures=["MambaForCausalLM"]),
        "architecture MambaForCausalLM is not supported; known are LlamaForCausalLM",
    ),
    "no weights": (lambda d: (d / SINGLE).unlink(), f"no weights; expected {SINGLE} or {INDEX}"),
    "empty file": (lambda d: (d / SINGLE).write_bytes(b""), r"model\.safetensors: cannot read the header: 0 bytes"),
    "cut short": (
        lambda d: cut(d / SINGLE),
        r"has \d+ bytes, but its header says \d+; copy or download",
    ),
    "header is no json": (lambda d: overwrite(d / SINGLE, b"xx", at=8), r"safetensors: the header is not JSON"),
    "header is endless": (lambda d: overwrite(d / SINGLE, b"\xff" * 7), r"the first 8 say \d+ bytes of header"),
    "wrong offsets": (
        lambda d: overwrite(d / SINGLE, b"9", at=(d / SINGLE).read_bytes().index(b'"data_offsets":[') + 16),
        r"safetensors: (header entry|tensor) .*(expected|starts)",
    ),
    "infinite shape": (
        lambda d: edit_header(d, lambda header: header.replace(b"[48,32]", b"[1e999,32]")),
        r"safetensors: header entry .*inf.*; expected a dtype of",
    ),
    "fractional shape": (
        lambda d: edit_header(d, lambda header: header.replace(b"[48,32]", b"[48.5,32]")),
        r"safetensors: header entry .*48\.5.*; expected a dtype of",
    ),
    "a tensor twice in the header": (
        lambda d: edit_header(d, lambda header: header.replace(b"{", b'{"%b":{},' % UP.encode(), 1)),
        rf"safetensors: the header is not JSON \('{UP}' comes twice\)",
    ),
    "wrong shape": (
        lambda d: replace(d, UP, torch.zeros(48, 31)),
        rf"{UP} has shape \(48, 31\), but config\.json says \(48, 32\)",
    ),
    "whole numbers": (
        lambda d: replace(d, UP, torch.zeros(48, 32, dtype=torch.int32)),
        rf"{UP} is int32, which no weight has",
    ),
    "mixed dtypes": (
        lambda d: replace(d, UP, torch.zeros(48, 32).half()),
        rf"gate_proj\.weight float32, {UP} float16: they make one parameter; expected the same dtype",
    ),
    "missing tensor": (lambda d: replace(d, UP, None), f"tensor {UP} is missing"),
    "unexpected tensor": (
        lambda d: replace(d, "model.layers.9.up.weight", torch.zeros(2)),
        r"tensor model\.layers\.9\.up\.weight is not of a llama model as config\.json describes it",
    ),
    "fp8 without scales": (
        lambda d: replace(d, UP, torch.zeros(48, 32).to(torch.float8_e4m3fn)),
        rf"{UP} is float8_e4m3fn, and there is no {UP}_scale_inv",
    ),
    "fp8 without a block size": (
        lambda d: (
            replace(d, UP, torch.zeros(48, 32).to(torch.float8_e4m3fn)),
            replace(d, f"{UP}_scale_inv", torch.ones(3, 2)),
        ),
        "quantization_config is None; expected quant_method 'fp8' and weight_block_size",
    ),
    "fp8 scales of another size": (
        lambda d: (
            replace(d, UP, torch.zeros(48, 32).to(torch.float8_e4m3fn)),
            replace(d, f"{UP}_scale_inv", torch.ones(3, 3)),
            edit(d, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]}),
        ),
        rf"{UP}_scale_inv is torch\.float32 \(3, 3\); expected torch\.float32 \(3, 2\)",
    ),
    "another quantization": (
        lambda d: edit(d, quantization_config={"quant_method": "awq"}),
        r"the weights are quantized \('awq'\), which is not supported; take the original",
    ),
}

SHARDED: dict[str, tuple[Break, str]] = {
    "missing shard": (lambda d: part(d).unlink(), rf"1 of \d weight files are missing: {PART}"),
    "shard cut short": (lambda d: cut(part(d)), rf"{PART}.*: has \d+ bytes, but its header says"),
    "index names a tensor that is not there": (
        lambda d: edit_index(d, extra=part(d).name),
        rf"{INDEX}: says that extra is in {PART}.*, which does not have it",
    ),
    "index leaves out a tensor": (
        lambda d: edit_index(d, **{UP: None}),
        f"{INDEX}: does not list {UP}, which the files",
    ),
    "a tensor in two files": (
        lambda d: save_file(load_file(last(d)) | {UP: torch.zeros(48, 32)}, last(d)),
        f"several files have {UP}; remove what is not",
    ),
    "index names a tensor twice": (
        lambda d: (d / INDEX).write_text((d / INDEX).read_text().replace("{", '{"weight_map": {},', 1)),
        rf"{INDEX}: cannot read the index: .*'weight_map' comes twice",
    ),
    "index nested without end": (lambda d: (d / INDEX).write_text("[" * 100_000), f"{INDEX}: cannot read the index"),
    "index leads elsewhere": (lambda d: edit_index(d, extra="../other"), f"{INDEX}: cannot read the index"),
}

MEGATRON: dict[str, tuple[Break, str]] = {
    "no metadata": (lambda d: (d / ".metadata").unlink(), r"\.metadata: cannot read: No such file"),
    "metadata cut short": (lambda d: cut(d / ".metadata", 50), r"\.metadata: damaged .*; copy the checkpoint again"),
    "metadata is something else": (lambda d: forge(d, [1, 2]), r"\.metadata: damaged"),
    "metadata that runs a command": (
        lambda d: forge(d, Command()),
        r"\.metadata: asks for posix\.system, which has no place there and could run any code; not loaded",
    ),
    "metadata that reaches for more than it names": (
        lambda d: forge(d, Attribute(Metadata, "__init__")),
        r"\.metadata: asks for '__init__' of .*Metadata.*, which has no place there; not loaded",
    ),
    "metadata with a name that is none": (
        lambda d: edit_metadata(d, lambda m: m.state_dict_metadata.update({b"x": m.state_dict_metadata[NORM]})),
        r"\.metadata: damaged",
    ),
    "metadata with a dtype that is none": (
        lambda d: edit_metadata(d, lambda m: setattr(m.state_dict_metadata[NORM].properties, "dtype", "float32")),
        rf"\.metadata: damaged: '{NORM}' is not a tensor with its parts",
    ),
    **{
        f"metadata with a part at {start!r}": (
            lambda d, start=start: edit_metadata(d, lambda m: setattr(norm_storage(m), "offset", start)),
            rf"\.metadata: damaged: '{NORM}' is not a tensor with its parts",
        )
        for start in (-7, "x", 1.5)
    },
    **{
        f"metadata with a part of {sizes}": (
            lambda d, sizes=sizes: edit_metadata(
                d, lambda m: setattr(m.state_dict_metadata[NORM].chunks[0], "sizes", sizes)
            ),
            rf"\.metadata: damaged: '{NORM}' is not a tensor with its parts",
        )
        for sizes in ((32, 1), (-32,), ("a",), (64,))
    },
    "backend nested without end": (lambda d: (d / "metadata.json").write_text("[" * 100_000), "not JSON; copy"),
    "no backend": (lambda d: (d / "metadata.json").unlink(), r"metadata\.json: cannot read: No such file"),
    "another backend": (
        lambda d: (d / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        r"metadata\.json: the checkpoint is of .*zarr.*; only .*torch_dist",
    ),
    "file cut short": (
        lambda d: cut(d / "__0_0.distcp"),
        r"__0_0\.distcp: has \d+ bytes, but \.metadata says at least",
    ),
    "missing file": (lambda d: (d / "__0_0.distcp").unlink(), r"__0_0\.distcp: missing, but \.metadata names it"),
    "another model's": (
        lambda d: edit(d, num_hidden_layers=5),
        r"decoder\.layers\.4\..* is missing; is .*config",
    ),
    "a deeper model's": (lambda d: edit(d, num_hidden_layers=3), r"tensors decoder\.layers\.3\..* are not of a llama"),
    "a wider model's": (
        lambda d: edit(d, intermediate_size=50),
        r"linear_fc1\.weight has shape \(96, 32\), but .* \(100, 32\)",
    ),
    "no config": (lambda d: (d / "config.json").unlink(), r"has no config\.json; give .* with --config"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    model = write_model("llama", directory / "hf")
    model.save_pretrained(directory / "sharded", max_shard_size=30_000)
    convert(open_source(directory / "hf"), directory / "megatron", to="megatron", workers=1)
    return directory


def copy(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


TABLES = {"hf": HF, "sharded": SHARDED, "megatron": MEGATRON}
CASES = {f"{kind}: {name}": (kind, *case) for kind, table in TABLES.items() for name, case in table.items()}


@pytest.mark.parametrize(("kind", "spoil", "message"), CASES.values(), ids=CASES)
def test_what_is_wrong_with_a_checkpoint_is_named(
    kind: str, spoil: Break, message: str, whole: Path, tmp_path: Path
) -> None:
    source = copy(whole / kind, tmp_path / "source")
    open_source(source)
    spoil(source)
    with pytest.raises(RecipeError, match=message) as caught:
        open_source(source)
    assert str(source) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path("/tmp/should-never-be").exists()


def test_damage_inside_a_file_is_named(whole: Path, tmp_path: Path) -> None:
    source = copy(whole / "megatron", tmp_path / "source")
    overwrite(source / "__0_0.distcp", b"\0" * 2000)
    with pytest.raises(RecipeError, match=r"__0_0\.distcp: damaged at byte 0 .*; copy the checkpoint again"):
        convert(open_source(source), tmp_path / "target", to="hf", workers=1)
    assert not (tmp_path / "target").exists()


def save_parts(directory: Path, parts: dict[int, torch.Tensor], legacy: bool = False) -> None:
    """Make the final norm one of `parts`, each with where it begins."""
    metadata = pickle.loads((directory / ".metadata").read_bytes())  # noqa: S301  our own
    like, storage = norm_storage(metadata), metadata.storage_data
    metadata.state_dict_metadata[NORM].chunks[:] = [
        ChunkStorageMetadata(torch.Size([start]), part.shape) for start, part in parts.items()
    ]
    for start, part in parts.items():
        path = directory / f"__{start + 90}_0.distcp"
        torch.save(part, path, _use_new_zipfile_serialization=not legacy)
        more = {"relative_path": path.name, "offset": 0, "length": path.stat().st_size}
        storage[MetadataIndex(NORM, torch.Size([start]))] = replace_fields(like, **more)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ((0, 16), None),
        ((0,), "parts have 16 elements, and leave some out or overlap; copy"),
        ((0, 8), "parts have 32 elements, and leave some out or overlap; copy"),
    ],
    ids=["whole", "gap", "overlap and gap"],
)
def test_parts_that_are_not_the_tensor_are_refused(
    starts: tuple[int, ...], message: str | None, whole: Path, tmp_path: Path
) -> None:
    source = copy(whole / "megatron", tmp_path / "source")
    norm = load_file(whole / "hf" / SINGLE)["model.norm.weight"]
    save_parts(source, {start: norm[start : start + 16].clone() for start in starts})
    if message is None:
        assert torch.equal(DcpReader(source).read(NORM), norm)
    else:
        with pytest.raises(RecipeError, match=message):
            DcpReader(source).read(NORM)


def test_a_file_that_may_not_be_read_is_named_before_the_work(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read everything
    with pytest.raises(RecipeError, match=r"distcp: cannot read: Permission denied; ask its owner for a copy"):
        open_source(whole / "megatron")


def test_blobs_of_an_old_torch_are_refused(whole: Path, tmp_path: Path) -> None:
    source = copy(whole / "megatron", tmp_path / "source")
    save_parts(source, {0: torch.ones(32)}, legacy=True)
    with pytest.raises(RecipeError, match=r"__90_0\.distcp: byte 0 is of a torch before 1\.6"):
        DcpReader(source).read(NORM)


@pytest.mark.filterwarnings("ignore")
def test_any_damage_of_a_blob_is_named(whole: Path, tmp_path: Path) -> None:
    """Or else is in the elements alone, or in what nobody reads."""
    source, dice = copy(whole / "megatron", tmp_path / "source"), random.Random(0)
    reader = DcpReader(source)
    chunk = reader.tensors[NORM].chunks[0]
    file = source / chunk.file
    before = file.read_bytes()
    for _ in range(500):
        file.write_bytes(before)
        overwrite(file, dice.randbytes(1), at=chunk.start + dice.randrange(chunk.length))
        with suppress(RecipeError):
            assert reader.read(NORM).shape == (32,)


@pytest.mark.parametrize("what", ["file", "nothing"])
def test_what_is_no_directory_is_refused(what: str, tmp_path: Path) -> None:
    if what == "file":
        (tmp_path / "source").write_text("")
    with pytest.raises(RecipeError, match=r"source is (a file|not there); expected a directory"):
        open_source(tmp_path / "source")


def test_a_directory_of_no_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"has neither config\.json, .* nor checkpoints/, as a run; give one of these"
    ):
        open_source(tmp_path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    with pytest.raises(RecipeError, match=r"it is a run that left no checkpoint; give .*/hf$"):
        open_source(tmp_path)


def test_an_existing_target_is_kept_unless_told(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "precious").write_text("yes")
    with pytest.raises(RecipeError, match="target exists; give another directory, or --overwrite to replace it"):
        convert(open_source(whole / "hf"), tmp_path / "target", to="hf", workers=1)
    assert os.listdir(tmp_path) == ["target"]
    assert os.listdir(tmp_path / "target") == ["precious"]
    convert(open_source(whole / "hf"), tmp_path / "target", to="hf", workers=1, overwrite=True)
    assert not (tmp_path / "target" / "precious").exists()
    assert os.listdir(tmp_path) == ["target"]


@pytest.mark.parametrize("kind", ["file", "link", "link to nothing"])
def test_a_target_that_is_no_directory_is_not_replaced(kind: str, whole: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    if kind == "file":
        target.write_text("precious")
    else:
        target.symlink_to(whole if kind == "link" else tmp_path / "none")
    with pytest.raises(RecipeError, match="target is a file or a link, which is not replaced; give another directory"):
        convert(open_source(whole / "hf"), target, to="hf", workers=1, overwrite=True)
    assert os.listdir(tmp_path) == ["target"]


@pytest.mark.parametrize("above", [".", ".."])
def test_a_target_that_has_the_source_is_refused(above: str, whole: Path, tmp_path: Path) -> None:
    source = copy(whole / "hf", tmp_path / "source")
    with pytest.raises(RecipeError, match="which is read, in it; give another directory"):
        convert(open_source(source), (source / above).resolve(), to="hf", workers=1, overwrite=True)
    assert os.listdir(tmp_path) == ["source"]


def test_a_source_that_changes_meanwhile_is_refused(whole: Path, tmp_path: Path) -> None:
    source = copy(whole / "hf", tmp_path / "source")

    def change(progress: Progress) -> None:
        os.utime(source / SINGLE)

    with pytest.raises(RecipeError, match="source was changed meanwhile; run the same command again"):
        convert(open_source(source), tmp_path / "target", to="hf", workers=1, progress=change)
    assert not (tmp_path / "target").exists()
    convert(open_source(source), tmp_path / "target", to="hf", workers=1)


def test_a_target_in_a_file_cannot_be_written(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r"cannot be written: (Not a directory|File exists); give another directory"):
        convert(open_source(whole / "hf"), tmp_path / "file" / "target", to="hf", workers=1)


def test_two_at_once_are_refused(whole: Path, tmp_path: Path) -> None:
    notes = tmp_path / "target.partial" / ".convert"
    notes.mkdir(parents=True)
    with (notes / "lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RecipeError, match=r"another process is writing .*target\.partial; wait for it, or end it"):
            convert(open_source(whole / "hf"), tmp_path / "target", to="hf", workers=1)


def limited(source: Path, target: Path, said: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    try:
        convert(open_source(source), target, to="megatron", workers=1, unit_bytes=20_000)
    except RecipeError as error:
        said.write_text(str(error))


def test_a_full_disk_keeps_what_is_finished(whole: Path, tmp_path: Path) -> None:
    """As a limit on the size of files stops a writer, so does a full disk."""
    source = copy(whole / "hf", tmp_path / "source")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        replace(source, name, torch.ones(700, 32))
    edit(source, vocab_size=700)
    process = get_context("fork").Process(target=limited, args=(source, tmp_path / "target", tmp_path / "said"))
    process.start()
    process.join(30)
    said = (tmp_path / "said").read_text()
    assert "cannot write: File too large; make room" in said
    assert "what is finished is kept" in said
    assert not (tmp_path / "target").exists()
    convert(open_source(source), tmp_path / "target", to="megatron", workers=1, unit_bytes=20_000)


def test_metadata_of_older_pythons_is_read() -> None:
    member = pickle.dumps(Attribute(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"))
    assert _Unpickler(BytesIO(member)).load() is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
