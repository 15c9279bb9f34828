"""The weight table of a model: one declarative list of its parameters.

The table alone names weights. It drives import, export, what is sent to the engines, and the checks of all three.
Layers and experts are numbered in the whole model.
"""

from __future__ import annotations

from megarl.config import ModelShape, PolicyHead
from megarl.weights.families import layer_parameters
from megarl.weights.layouts import Replicated, Vocabulary
from megarl.weights.parameter import Parameter


def model_parameters(shape: ModelShape, tensor: int) -> list[Parameter]:
    """All parameters of a model, in a fixed order; `tensor` decides the vocabulary's padding.

    Their places in an engine, where they are known, are those of SGLang 0.5.23, its stacks of experts as the Triton
    kernels want them, its shared experts apart (`--disable-shared-experts-fusion`) and without
    SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED. With tied embeddings there is no output parameter: a last pipeline stage holds a
    copy of the embedding.
    """
    vocabulary = Vocabulary(dim=0, vocab=shape.vocab, padded=shape.padded_vocab(tensor))
    table, final = ((shape.vocab, shape.hidden),), "model.norm.weight"
    embedding, output = "model.embed_tokens.weight", "lm_head.weight"
    parameters = [
        Parameter(
            "embedding.word_embeddings.weight",
            (embedding,),
            embedding,
            vocabulary,
            table,
            engine_whole=shape.unit_norms,  # Gemma's
        ),
        *(parameter for layer in range(shape.layers) for parameter in layer_parameters(shape, layer)),
        Parameter("decoder.final_layernorm.weight", (final,), final, Replicated(), ((shape.hidden,),), last_stage=True),
    ]
    if not isinstance(shape.head, PolicyHead):
        return [*parameters, *_scalar_head(shape)]
    if not shape.tied:
        parameters.append(Parameter("output_layer.weight", (output,), output, vocabulary, table, last_stage=True))
    return parameters


def _scalar_head(shape: ModelShape) -> list[Parameter]:
    """One row, and maybe its bias, on every rank of the last stage."""
    assert not isinstance(shape.head, PolicyHead)
    sizes: dict[str, tuple[int, ...]] = {"score.weight": (1, shape.hidden), "score.bias": (1,)}
    return [
        Parameter(
            name.replace("score", "output_layer"),
            (name,),
            None,
            Replicated(),
            (sizes[name],),
            last_stage=True,
            missing=name in shape.head.missing,
        )
        for name in shape.head.tensors
    ]
