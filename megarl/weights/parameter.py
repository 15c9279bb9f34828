"""A parameter of the weight tables, and the small pieces from which tables are put together."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.weights.layouts import GateUp, Layout, Replicated, Split


@dataclass(frozen=True)
class Parameter:
    """A parameter of the whole model: its names, its layout and the shapes of its Hugging Face tensors.

    A name may end in an index, `experts.down_proj[3]`: the tensor is that slice of a stacked one.
    `engine` is the name under which SGLang holds it, fused as in Megatron, or the slice of its stack of experts; None
    where that is not known. It begins there in `engine_row`, below other parameters. All ranks of an engine hold an
    `engine_whole` one, however the trainer splits it.
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
    engine_row: int = 0
    engine_whole: bool = False

    @property
    def engine_layout(self) -> Layout:
        return Replicated() if self.engine_whole else self.layout


@dataclass(frozen=True)
class Place:
    """Where the names of a layer's parameters, or of one of its experts', begin; an expert's end in its number.

    `engine` is None where SGLang's layout is not known.
    """

    megatron: str
    hf: str
    engine: str | None
    layer: int
    expert: int | None = None

    @staticmethod
    def of_layer(layer: int) -> Place:
        hf = f"model.layers.{layer}."
        return Place(f"decoder.layers.{layer}.", hf, hf, layer)

    def of_expert(self, expert: int, hf: str, engine: str | None) -> Place:
        """The expert's place in Megatron; `hf` and `engine` are what its names begin with, within the layer."""
        engine = None if engine is None else f"{self.hf}{engine}"
        return Place(f"{self.megatron}mlp.experts.", f"{self.hf}{hf}", engine, self.layer, expert)

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
        index = "" if self.expert is None else f"[{self.expert}]"
        return Parameter(
            megatron=self.megatron + megatron + index,
            hf=tuple(self.hf + name for name in hf),
            engine=None if self.engine is None else self.engine + engine + index,
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
        stacks = self.expert is not None
        w13, w2 = ("w13_weight", "w2_weight") if stacks else (f"{hf}gate_up_proj.weight", f"{hf}{down}.weight")
        fc1, fc2 = f"{megatron}linear_fc1.weight", f"{megatron}linear_fc2.weight"
        return [
            self.fused(fc1, both, w13, GateUp(), (width, hidden), (width, hidden)),
            self.fused(fc2, (f"{hf}{down}.weight",), w2, Split(dim=1), (hidden, width)),
        ]
