"""The two kinds of checkpoint, seen alike: a model's parameters, each given as its Hugging Face tensors.

What a source says it has, it has checked: names, shapes and dtypes of everything, before a single tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megarl.config import HeadName, ModelShape, RecipeError, read_model_shape
from megarl.weights.dcp import DcpReader
from megarl.weights.hf import HfReader, shorten
from megarl.weights.keys import EXTRA, Place, checkpoint_place, stacked_place
from megarl.weights.layouts import Replicated, Vocabulary
from megarl.weights.parameter import Parameter
from megarl.weights.table import model_parameters


class Source(Protocol):
    """A checkpoint to read.

    `parameters` are those of the weight table, and one each for the tensors that it does not know and that are kept;
    `ignored` are the tensors that are not. `config` is the directory with configuration and tokenizer.
    """

    directory: Path
    config: Path
    shape: ModelShape
    parameters: list[Parameter]
    ignored: list[str]

    def dtype(self, parameter: Parameter) -> torch.dtype: ...

    def tensors(self, parameter: Parameter) -> list[Tensor]:
        """The parameter's Hugging Face tensors, of `parameter.hf_shapes`."""

    def files(self) -> list[Path]:
        """All files that the result depends on."""


class HfSource:
    """A Hugging Face directory."""

    def __init__(self, directory: Path) -> None:
        """Raises RecipeError: a tensor that is missing, unknown, or not what config.json says."""
        self.directory = self.config = directory
        self.shape = read_model_shape(directory, stored_head(directory), fp8=True)
        self.reader = HfReader(directory)
        table = model_parameters(self.shape, 1)
        known = {spec for parameter in table for spec in _whole_names(parameter)}
        unknown = [name for name in self.reader.specs if name not in known]
        self.ignored = [name for name in unknown if name.endswith(".rotary_emb.inv_freq")]
        kept = [name for name in unknown if _is_extra(name, self.shape)]
        if wrong := sorted(set(unknown) - set(self.ignored) - set(kept)):
            raise RecipeError(
                f"{directory}: {_tensors(wrong)} not of a {self.shape.family} model as config.json describes it; take"
                " the right config.json, or leave these out"
            )
        self.parameters = [*table, *(extra_parameter(name, self.reader.specs[name].shape) for name in kept)]
        self._dtypes = {parameter.megatron: self._check(parameter) for parameter in self.parameters}

    def dtype(self, parameter: Parameter) -> torch.dtype:
        return self._dtypes[parameter.megatron]

    def tensors(self, parameter: Parameter) -> list[Tensor]:
        named = zip(parameter.hf, parameter.hf_shapes, strict=True)
        return [self.reader.tensor(name, shape) for name, shape in named]

    def files(self) -> list[Path]:
        return [path for path in sorted(self.directory.iterdir()) if path.is_file()]

    def _check(self, parameter: Parameter) -> torch.dtype:
        dtypes = [
            self.reader.spec(name, shape).dtype for name, shape in zip(parameter.hf, parameter.hf_shapes, strict=True)
        ]
        if len(set(dtypes)) > 1:
            named = zip(parameter.hf, dtypes, strict=True)
            found = ", ".join(f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in named)
            raise RecipeError(f"{self.directory}: {found}: they make one parameter; expected the same dtype")
        return dtypes[0]


class MegatronSource:
    """A Megatron distributed checkpoint, saved at any layout."""

    def __init__(self, directory: Path, config: Path, head: HeadName | None = None) -> None:
        """`config` has the model's config.json, or of one that differs in its head alone, where `head` is given.

        Raises RecipeError: not that model's checkpoint, or a damaged one.
        """
        self.directory, self.config = directory, config
        self.shape = read_model_shape(config, head or stored_head(config), fp8=True)
        self.reader = DcpReader(directory)
        self.ignored: list[str] = []
        stored = self.reader.tensors
        extras = [key.removeprefix(EXTRA) for key in stored if key.startswith(EXTRA)]
        extra_parameters = [extra_parameter(name, stored[EXTRA + name].spec.shape) for name in extras]
        self.parameters = [*model_parameters(self.shape, 1), *extra_parameters]
        self._places = {parameter.megatron: self._place(parameter) for parameter in self.parameters}
        last = dict(self._places.values())  # of each key, as parameters come in order
        unknown = [key for key in stored if key not in last and not _is_optimizer(key)]
        if unknown:
            raise RecipeError(
                f"{directory}: {_tensors(sorted(unknown))} not of a {self.shape.family} model as {config}/config.json"
                " describes it; give the config of the model that was saved"
            )
        for key, index in last.items():
            found, expected = stored[key].spec.shape[: len(index)], tuple(i + 1 for i in index)
            if found != expected:
                raise RecipeError(
                    f"{directory}: {key} stacks {found} layers or experts, but {config}/config.json says {expected};"
                    " give the config of the model that was saved"
                )

    def dtype(self, parameter: Parameter) -> torch.dtype:
        return self.reader.tensors[self._places[parameter.megatron][0]].spec.dtype

    def tensors(self, parameter: Parameter) -> list[Tensor]:
        whole, layout = self.reader.read(*self._places[parameter.megatron]), parameter.layout
        return layout.to_hf(whole)

    def files(self) -> list[Path]:
        own = [path for path in sorted(self.directory.iterdir()) if path.is_file()]
        return own + ([] if self.config == self.directory else [self.config / "config.json"])

    def _place(self, parameter: Parameter) -> Place:
        place = checkpoint_place(self.shape, parameter)
        found = next((p for p in (place, stacked_place(place)) if p[0] in self.reader.tensors), None)
        if found is None:
            raise RecipeError(f"{self.directory}: {place[0]} is missing; is {self.config}/config.json of this model?")
        key, index = found
        shape, expected = self.reader.tensors[key].spec.shape, parameter.layout.whole_shape(parameter.hf_shapes)
        own, rows = shape[len(index) :], slice(None)
        if isinstance(parameter.layout, Vocabulary) and own[:1] >= expected[:1]:
            rows = slice(1, None)  # padded to whatever the layout it was saved at needed
        if own[rows] != expected[rows] or any(i >= size for i, size in zip(index, shape, strict=False)):
            raise RecipeError(
                f"{self.directory}: {key} has shape {shape}, but {self.config}/config.json says {expected}"
                f"{f' at {index}' if index else ''}; give the config of the model that was saved"
            )
        return found


def stored_head(directory: Path) -> HeadName:
    """The head that the config.json in `directory` names; what is wrong with it is left to its reader."""
    try:
        text = (directory / "config.json").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return "policy"
    if '"architectures"' in text and re.search(r'ForTokenClassification"', text):
        return "critic"
    return "reward" if re.search(r'ForSequenceClassification"', text) else "policy"


def extra_parameter(name: str, shape: Iterable[int]) -> Parameter:
    """A tensor that no weight table knows, as a parameter."""
    return Parameter(EXTRA + name, (name,), None, Replicated(), (tuple(shape),))


def _whole_names(parameter: Parameter) -> list[str]:
    return [re.sub(r"\[\d+\]$", "", name) for name in parameter.hf]


def _is_extra(name: str, shape: ModelShape) -> bool:
    """Multi-token-prediction layers, and the copy of a tied embedding that some files have."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    if match is None:
        return shape.tied and name == "lm_head.weight"
    return shape.layers <= int(match[1]) < shape.layers + shape.mtp_layers


def _is_optimizer(key: str) -> bool:
    return re.match(r"(chained_\d+\.)?optimizer\.", key) is not None


def _tensors(names: list[str]) -> str:
    return f"tensor {names[0]} is" if len(names) == 1 else f"tensors {shorten(names)} are"
