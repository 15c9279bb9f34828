"""What the engine makes of the last hidden states: log-probabilities, or one value at each token.

A head puts the output layer on the last pipeline stage, and turns what that layer returns into what a loss function is
given. Which head a model has is the choice of its `ModelShape`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

from jaxtyping import Float
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megarl.config import CriticHead, ModelShape, PolicyHead, RewardHead
from megarl.model_engine.logprobs import token_divergences, token_logprobs
from megarl.model_engine.microbatch import MicroBatch, RemoteTokens, TokenSequence
from megarl.model_engine.modules import HiddenOutput, ScalarOutput


class OutputHead(ABC):
    """One way to end a model. `outputs` begins with what stands at each predicted response token."""

    @abstractmethod
    def attach(self, network: GPTModel) -> None:
        """Give a network that ends the model its output layer."""

    @abstractmethod
    def outputs(self, model: Any, output: Float[Tensor, "1 T K"], batch: MicroBatch) -> tuple[Float[Tensor, " T"], ...]:
        """What a loss function gets beside the micro-batch, in float32; `output` is the output layer's."""

    def fed(self, sequences: list[TokenSequence]) -> list[TokenSequence]:
        """The sequences as the model reads them: all but their last tokens."""
        return sequences


class LogprobHead(OutputHead):
    """The log-probability of each target and the entropy there."""

    def __init__(self, vocab: int, temperature: float) -> None:
        self._vocab, self._temperature = vocab, temperature

    def attach(self, network: GPTModel) -> None:
        network.output_layer.__class__ = HiddenOutput

    def outputs(
        self, model: Any, output: Float[Tensor, "1 T H"], batch: MicroBatch
    ) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
        return token_logprobs(
            output[0],
            _output_weight(model),
            batch.targets,
            vocab=self._vocab,
            temperature=self._temperature,
            group=parallel_state.get_tensor_model_parallel_group(),
        )

    def divergences(
        self, model: Any, output: Float[Tensor, "1 T H"], reference: Any, reference_output: Float[Tensor, "1 T R"]
    ) -> Float[Tensor, " T"]:
        """From `model` to a reference, at this head's temperature; with a gradient for `model` alone."""
        return token_divergences(
            output[0],
            _output_weight(model),
            reference_output[0],
            _output_weight(reference),
            vocab=self._vocab,
            temperature=self._temperature,
            group=parallel_state.get_tensor_model_parallel_group(),
        )


class ValueHead(OutputHead):
    """A critic's values: where a token is predicted, that of the sequence before it."""

    def __init__(self, *, bias: bool) -> None:
        self._bias = bias

    def attach(self, network: GPTModel) -> None:
        network.output_layer = ScalarOutput(network.config, bias=self._bias)

    def outputs(self, model: Any, output: Float[Tensor, "1 T 1"], batch: MicroBatch) -> tuple[Float[Tensor, " T"]]:
        return (output[0, :, 0],)


class ScoreHead(ValueHead):
    """A reward model's scores. The score stands where a token behind the sequence would be predicted."""

    def __init__(self, head: RewardHead) -> None:
        super().__init__(bias=False)
        self._head = head

    def fed(self, sequences: list[TokenSequence]) -> list[TokenSequence]:
        """Without the padding at their ends, and with one more token, which is not read, as the response."""
        read = [self._scored(sequence.input_ids) for sequence in sequences]
        return [
            replace(sequence, input_ids=ids, prompt_length=len(ids) - 1)
            for sequence, ids in zip(sequences, read, strict=True)
        ]

    def _scored(self, ids: list[int] | Tensor | RemoteTokens) -> list[int] | RemoteTokens:
        padding = self._head.padding
        if isinstance(ids, RemoteTokens):
            last, times = ids.ending
            length = max(ids.length - times, 1) if last == padding else ids.length
            return replace(ids, length=length, then=(padding,))
        return [*self._head.scored(list(ids)), padding]


def output_head(shape: ModelShape, temperature: float) -> OutputHead:
    """The head of `shape`; a policy's divides its logits by `temperature`."""
    match shape.head:
        case PolicyHead():
            return LogprobHead(shape.vocab, temperature)
        case CriticHead():
            return ValueHead(bias=True)
        case RewardHead() as head:
            return ScoreHead(head)


def _output_weight(model: Any) -> Float[Tensor, "shard H"]:
    """The rows of the vocabulary that this rank's last stage projects to."""
    network = getattr(model, "module", model)
    return (
        network.shared_embedding_or_output_weight()
        if network.share_embeddings_and_output_weights
        else network.output_layer.weight
    )
