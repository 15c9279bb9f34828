"""How an RL recipe rolls out: modes, placement, engines, and how new weights reach them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.config.fields import NonNegativeInt, PositiveInt, Seconds, Section
from megarl.config.reward import Serving

LAG_MAX = 64  # far beyond what a correction makes good, and each version more keeps a step's groups more in memory


class Mode(Section):
    """How far rollouts may run ahead of training: synchronous, one step off, or asynchronous."""

    max_lag: Annotated[int, Field(ge=0, le=LAG_MAX)] = 0
    """Staleness: versions by which a group's oldest token may lag the weights that learn from it; 0: synchronous."""
    interrupt: bool = False
    """Responses under way go on with new weights when these come; else they are finished first, and training waits."""
    ask: PositiveInt | None = None
    """Most groups under way, waiting or in training at once; none: (max_lag + 1) x batch.prompts."""


class Journal(Section):
    sync: Literal["always", "group", "never"] = "group"
    """What is on disk before it counts, should a node die: every chunk of a response, finished groups, or nothing."""


class Colocated(Section):
    type: Literal["colocated"] = "colocated"
    """All ranks train, and engines are on all of them."""


class Disaggregated(Section):
    type: Literal["disaggregated"]
    """The first ranks train, and engines are on the others."""
    train_ranks: PositiveInt
    """How many ranks train, from rank 0 on."""


class Hybrid(Section):
    type: Literal["hybrid"]
    """Engines are on all ranks, of which the first train as well."""
    train_ranks: PositiveInt
    """How many ranks train, from rank 0 on."""


class Rollout(Serving):
    tensor_parallel: PositiveInt = 1
    """Ranks that share one SGLang engine; all that roll out (see placement) are divided into engines."""
    expert_parallel: PositiveInt = 1
    """Groups of an engine's ranks among which experts are divided; it divides tensor_parallel and the experts."""
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Sampling temperature of training rollouts, at least 0.01; the trainer scales its logits by it too."""
    max_new_tokens: PositiveInt
    """Longest response, in tokens."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """The engines' type of numbers; none: model.dtype. Weights are cast on their way."""
    fp8: bool = False
    """Linear layers are made FP8 on their way, in blocks of 128 x 128; needs GPUs, bfloat16 and publish.type direct."""
    policy: Literal["context", "divided", "least_loaded", "group_round_robin"] = "context"
    """Which response is generated next, and where; see docs/rollout.md."""
    chunk_tokens: PositiveInt | None = None
    """Most new tokens of a response at a time (context, divided); none: 0.8 x the root of the tokens in a cache."""
    stall_s: Seconds = 120.0
    """Seconds without progress after which an engine that owes answers is replaced; at most runtime.deadline_s / 2."""
    restarts: NonNegativeInt = 3
    """How often, in one step, engines that fail may be started anew; then the job ends."""


class DirectPublish(Section):
    type: Literal["direct"] = "direct"
    """Each rank of an engine is sent its own part, from the ranks that hold it, through memory shared on a node."""
    bucket_mib: PositiveInt = 256
    """Weights travel in parts; two of this size (MiB) are the most extra memory a rank takes for a moment."""
    changed_only: bool = False
    """Blocks that have not changed since the last version are not sent; for models of which much is frozen."""


class FullPublish(Section):
    type: Literal["full"]
    """All ranks, colocated, gather whole tensors; one that leads an engine sends it all, and the engine cuts them."""
    bucket_mib: PositiveInt = 256
    """Size (MiB) of the parts in which weights are gathered."""


class DiskPublish(Section):
    type: Literal["disk"]
    """The model is written to the run directory, which all nodes must see, and each engine reads it."""


Publish = DirectPublish | FullPublish | DiskPublish
