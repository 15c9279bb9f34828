"""A parameter of the weight tables, and the small pieces from which tables are put together."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.weights.layouts import GateUp, Layout, Split


@dataclass(frozen=True)
class Parameter:
    """A parameter of the whole model: its names, its layout and the shapes of its Hugging Face tensors.

    A name may end in an index, `experts.down_proj[3]`: the tensor is that slice of a stacked one.
    `engine` is the name under which SGLang holds it, fused as in Megatron; None where that is not known.
    `layer` is None outside the layers. A parameter of an `expert`, numbered in the whole model, is on the ranks that
    have that expert, and its layout splits it over the expert-tensor-parallel ranks. `float32` stays so whatever the
    model's type; it is a buffer of Megatron's, which no gradient reaches. What is `missing` in the checkpoint that is
    loaded starts as zeros.
    """

    megatron: str
    hf: tuple[str, ...]
    engine: str | None
    layout: Layout
    hf_shapes: tuple[tuple[int, ...], ...]
    layer: int | None = None
    last_stage: bool = False
    expert: int | None = None
    float32: bool = False
    missing: bool = False


@dataclass(frozen=True)
class Place:
    """Where the names of a layer's parameters, or of one of its experts', begin; an expert's end in its number."""

    megatron: str
    hf: str
    layer: int
    expert: int | None = None

    @staticmethod
    def of_layer(layer: int) -> Place:
        return Place(f"decoder.layers.{layer}.", f"model.layers.{layer}.", layer)

    def of_expert(self, expert: int, hf: str) -> Place:
        """The expert's place in Megatron; `hf` is what its own names begin with, within the layer."""
        return Place(f"{self.megatron}mlp.experts.", f"{self.hf}{hf}", self.layer, expert)

    def one(self, megatron: str, hf: str, layout: Layout, *size: int, float32: bool = False) -> Parameter:
        """A parameter made of one tensor."""
        return self.fused(megatron, (hf,), hf, layout, size, float32=float32)

    def fused(
        self,
        megatron: str,
        hf: tuple[str, ...],
        engine: str,
        layout: Layout,
        *sizes: tuple[int, ...],
        float32: bool = False,
    ) -> Parameter:
        """A parameter made of several tensors; `engine` is its name there, within the layer."""
        return Parameter(
            megatron=self.megatron + megatron + ("" if self.expert is None else f"[{self.expert}]"),
            hf=tuple(self.hf + name for name in hf),
            engine=None if self.expert is not None else self.hf + engine,
            layout=layout,
            hf_shapes=sizes,
            layer=self.layer,
            expert=self.expert,
            float32=float32,
        )

    def gated_mlp(
        self, megatron: str, hf: str, hidden: int, width: int, names: tuple[str, str, str] | None = None
    ) -> list[Parameter]:
        """A gated MLP without biases; `names` are those of its gate, up and down projections."""
        gate, up, down = names or ("gate_proj", "up_proj", "down_proj")
        both = (f"{hf}{gate}.weight", f"{hf}{up}.weight")
        fc1 = f"{megatron}linear_fc1.weight"
        return [
            self.fused(fc1, both, f"{hf}gate_up_proj.weight", GateUp(), (width, hidden), (width, hidden)),
            self.one(f"{megatron}linear_fc2.weight", f"{hf}{down}.weight", Split(dim=1), hidden, width),
        ]
