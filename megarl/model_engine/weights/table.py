"""The weight tables: one declarative list for each architecture family.

The table alone names weights. It drives import, export, what is sent to the engines, and the checks of all three.
`{layer}` in a name is the layer's number in the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import ModelShape
from megarl.model_engine.weights.layouts import GateUp, Layout, QueryKeyValue, Replicated, Split, Vocabulary


@dataclass(frozen=True)
class Parameter:
    """A parameter of the whole model: its names, its layout and the shapes of its Hugging Face tensors.

    `engine` is the name under which SGLang holds it, fused as in Megatron. `layer` is None outside the layers.
    """

    megatron: str
    hf: tuple[str, ...]
    engine: str
    layout: Layout
    hf_shapes: tuple[tuple[int, ...], ...]
    layer: int | None = None
    last_stage: bool = False


def model_parameters(shape: ModelShape, tensor: int) -> list[Parameter]:
    """All parameters of a model, in a fixed order; `tensor` decides the vocabulary's padding.

    With tied embeddings there is no output parameter: a last pipeline stage holds a copy of the embedding.
    """
    vocabulary = Vocabulary(dim=0, vocab=shape.vocab, padded=shape.padded_vocab(tensor))
    table = (shape.vocab, shape.hidden)
    before = [_single("embedding.word_embeddings.weight", "model.embed_tokens.weight", vocabulary, table)]
    after = [_single("decoder.final_layernorm.weight", "model.norm.weight", Replicated(), (shape.hidden,), last=True)]
    if not shape.tied:
        after.append(_single("output_layer.weight", "lm_head.weight", vocabulary, table, last=True))
    layers = [parameter for layer in range(shape.layers) for parameter in _layer(shape, layer)]
    return [*before, *layers, *after]


def _single(
    megatron: str, hf: str, layout: Layout, size: tuple[int, ...], layer: int | None = None, *, last: bool = False
) -> Parameter:
    return Parameter(megatron, (hf,), hf, layout, (size,), layer, last)


def _layer(shape: ModelShape, layer: int) -> list[Parameter]:
    megatron, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    hidden, ffn = shape.hidden, shape.ffn
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    qkv = QueryKeyValue(shape.heads, shape.kv_heads, shape.head_dim)
    projections = tuple(f"{hf}self_attn.{part}_proj" for part in "qkv")

    def attention(kind: str, *columns: int) -> Parameter:
        return Parameter(
            megatron=f"{megatron}self_attention.linear_qkv.{kind}",
            hf=tuple(f"{name}.{kind}" for name in projections),
            engine=f"{hf}self_attn.qkv_proj.{kind}",
            layout=qkv,
            hf_shapes=tuple((rows, *columns) for rows in (query, key_value, key_value)),
            layer=layer,
        )

    def one(name: str, hf_name: str, layout: Layout, *size: int) -> Parameter:
        return _single(f"{megatron}{name}.weight", f"{hf}{hf_name}.weight", layout, size, layer)

    gate_up = Parameter(
        megatron=f"{megatron}mlp.linear_fc1.weight",
        hf=(f"{hf}mlp.gate_proj.weight", f"{hf}mlp.up_proj.weight"),
        engine=f"{hf}mlp.gate_up_proj.weight",
        layout=GateUp(),
        hf_shapes=((ffn, hidden), (ffn, hidden)),
        layer=layer,
    )
    parameters = [
        one("input_layernorm", "input_layernorm", Replicated(), hidden),
        attention("weight", hidden),
        one("self_attention.linear_proj", "self_attn.o_proj", Split(dim=1), hidden, query),
        one("pre_mlp_layernorm", "post_attention_layernorm", Replicated(), hidden),
        gate_up,
        one("mlp.linear_fc2", "mlp.down_proj", Split(dim=1), hidden, ffn),
    ]
    if shape.qkv_bias:
        parameters.append(attention("bias"))
    if shape.qk_norm:
        for part in "qk":
            norm = one(f"self_attention.{part}_layernorm", f"self_attn.{part}_norm", Replicated(), shape.head_dim)
            parameters.append(norm)
    return parameters
