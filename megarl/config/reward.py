"""The recipe's `reward`: what scores a response, and how scores become one reward."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.config.fields import (
    AnswerPattern,
    AnyFloat,
    FunctionName,
    JsonObject,
    Location,
    NonNegativeInt,
    PositiveInt,
    Seconds,
    Section,
)


class Model(Section):
    path: Location
    """Hugging Face directory with config.json, *.safetensors and the tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the parameters; gradients are accumulated and the optimizer steps in float32."""


class Serving(Section):
    """SGLang engines of one kind."""

    tensor_parallel: PositiveInt = 1
    """Ranks that share one engine."""
    start_timeout_s: Seconds = 300.0
    """Seconds an engine may take from its start until it is healthy."""
    server_args: JsonObject = {}
    """Further SGLang server arguments by their ServerArgs names, such as mem_fraction_static."""


class Source(Section):
    weight: AnyFloat = 1.0
    """What its score counts in the reward; 0: it is only logged."""
    datasets: Annotated[list[str], Field(min_length=1)] | None = None
    """It scores the rows whose `dataset` is one of these; none: all rows."""
    standardise: bool = False
    """Of the step's scores the mean is taken away and the rest divided by their deviation, before they are weighed."""

    def scores(self, dataset: str) -> bool:
        """Whether it scores the rows of `dataset`."""
        return self.datasets is None or dataset in self.datasets


class ExactMatch(Source):
    type: Literal["exact_match"]
    """1 if the last match of `pattern`'s group equals the answer, else 0."""
    pattern: AnswerPattern = r"<answer>\s*(.*?)\s*</answer>"
    """Regular expression with one group that finds the answer in the response."""


class MathVerify(Source):
    type: Literal["math_verify"]
    """1 if math-verify finds the response's final expression equal to the answer, else 0."""


class OwnRule(Source):
    type: Literal["own"]
    """A function of your own, of response and answer, that returns a number; it runs in the reward workers."""
    function: FunctionName
    """Where it is, as module:function; its directory must be on PYTHONPATH."""
    options: JsonObject = {}
    """What it is given by name."""


class RewardModel(Source):
    type: Literal["model"]
    """A reward model that is scored on the ranks that train."""
    model: Model
    """Result of a recipe of type reward_model; its tokenizer must be the policy's."""


class RewardEngine(Source, Serving):
    type: Literal["engine"]
    """A reward model with an SGLang engine of its own, which scores each response as soon as it is there."""
    model: Model
    """Result of a recipe of type reward_model; its tokenizer must be the policy's."""


Rule = ExactMatch | MathVerify | OwnRule
AnySource = Annotated[ExactMatch | MathVerify | OwnRule | RewardModel | RewardEngine, Field(discriminator="type")]
SourceName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$", max_length=60)]


class Reward(Section):
    sources: Annotated[dict[SourceName, AnySource], Field(min_length=1)]
    """What scores a response, by a name of your choice; the reward is the weighted sum of those that score the row."""
    workers: PositiveInt = 1
    """Processes that apply the rules: exact_match, math_verify and your own."""
    timeout_s: Seconds = 5.0
    """Seconds a rule may take for one response; then the worker is killed and the score is 0."""
    overlong_buffer: NonNegativeInt = 0
    """Last tokens before rollout.max_new_tokens, over which the reward falls by 1 (arXiv 2503.14476, eq. 13)."""

    @property
    def rules(self) -> dict[str, Rule]:
        """The sources that the reward workers apply."""
        return {name: source for name, source in self.sources.items() if isinstance(source, Rule)}

    @property
    def models(self) -> dict[str, RewardModel]:
        """The sources that the ranks score."""
        return {name: source for name, source in self.sources.items() if isinstance(source, RewardModel)}

    @property
    def engines(self) -> dict[str, RewardEngine]:
        """The sources that have an engine."""
        return {name: source for name, source in self.sources.items() if isinstance(source, RewardEngine)}

    def judge(self, dataset: str) -> str | None:
        """The rule that says whether an answer to a row of `dataset` is right: the first that scores it."""
        return next((name for name, rule in self.rules.items() if rule.scores(dataset)), None)
