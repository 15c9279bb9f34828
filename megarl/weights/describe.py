"""What a directory of weights is, in words."""

from __future__ import annotations

from collections import Counter

from megarl.weights.convert import nbytes
from megarl.weights.places import Place, open_place
from megarl.weights.sources import HfSource, MegatronSource


def describe(place: Place) -> dict[str, str]:
    """Labels and values, in the order to show them. Raises RecipeError: the checkpoint cannot be read."""
    source = open_place(place)
    shape = source.shape
    dtypes: Counter[str] = Counter()
    for parameter in source.parameters:
        dtypes[str(source.dtype(parameter)).removeprefix("torch.")] += nbytes(source, parameter)
    extras = [parameter.hf[0] for parameter in source.parameters if parameter.megatron == f"hf.{parameter.hf[0]}"]
    size = sum(path.stat().st_size for path in place.weights.iterdir() if path.is_file())
    layout = [f"{name} {value}" for name, value in place.layout.items() if type(value) is int and value > 1]
    about = {
        "directory": str(place.weights),
        "kind": "Megatron distributed checkpoint" if place.megatron else "Hugging Face directory",
        "step": "" if place.step is None else str(place.step),
        "layout of the run": ", ".join(layout),
        "configuration": str(place.config) if place.megatron else "",
        "family": shape.family,
        "head": shape.head.name,
        "parameters": f"{shape.parameters:,}",
        "layers": str(shape.layers),
        "vocabulary": f"{shape.vocab:,}{', tied' if shape.tied else ''}",
        "dtypes": ", ".join(f"{name} ({count:,} bytes)" for name, count in dtypes.most_common()),
        "size on disk": f"{size:,} bytes",
        "extras": f"{len(extras)} tensors that no layer has, such as {extras[0]}" if extras else "",
        "ignored": ", ".join(source.ignored[:3]),
    }
    if isinstance(source, MegatronSource):
        about["saved with"] = _layout(source)
    elif isinstance(source, HfSource) and source.reader.quantized:
        about["quantized"] = f"{len(source.reader.quantized)} tensors are FP8, read as bfloat16"
    return {label: value for label, value in about.items() if value}


def _layout(source: MegatronSource) -> str:
    """What the boxes tell: into how many parts the rows of the embedding and the experts are divided."""
    stored = source.reader.tensors
    files = {chunk.file for tensor in stored.values() for chunk in tensor.chunks}
    told = [f"tensor {len(stored['embedding.word_embeddings.weight'].chunks)}"]
    experts = source.shape.experts
    keys = [key for key in stored if key.endswith("mlp.experts.experts.linear_fc2.weight")]
    if experts is not None and keys:
        told.append(f"expert tensor {len({chunk.offsets[-1] for chunk in stored[keys[0]].chunks})}")
    if any(key.startswith("decoder.layers.self_attention") for key in stored):
        told.append("all layers stacked")
    return f"{', '.join(told)}; {len(files)} files"
