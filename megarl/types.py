"""What flows round the ring: prompts become groups of trajectories, which become batches.

Plain structs of plain values, so that every process can hold them and msgpack can carry them. No torch, no numpy:
this module loads in milliseconds on a login node.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# The number of optimizer updates that have been finished; the initial weights are version 0.
WeightVersion = int

FinishReason = Literal["stop", "length"]


class Prompt(msgspec.Struct, frozen=True):
    """One problem: what the policy is asked and what rules compare with.

    `index` is the prompt's place in its run's sequence, so it names the prompt uniquely and repeatably. `dataset` says
    which reward sources score it.
    """

    index: int
    text: str
    input_ids: list[int]
    answer: str
    dataset: str = ""


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens `start` to `end` (exclusive) were sampled by weights `version`."""

    version: WeightVersion
    start: int
    end: int


class Completion(msgspec.Struct):
    """What engines answer for one sample. `logprobs[i]` is the log-probability (nats) of `output_ids[i]`."""

    output_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    versions: list[VersionSpan]

    def extend(self, chunk: Completion) -> None:
        """Add what came after; the spans of `chunk` count from its first token."""
        offset = len(self.output_ids)
        self.output_ids += chunk.output_ids
        self.logprobs += chunk.logprobs
        self.finish_reason = chunk.finish_reason
        for span in chunk.versions:
            start = offset + span.start
            if self.versions and self.versions[-1].version == span.version:
                start = self.versions.pop().start
            self.versions.append(VersionSpan(span.version, start, offset + span.end))


class Trajectory(msgspec.Struct):
    """One response. `engine_logprobs` are the engine's, in nats, one for each output token.

    `scores` are by reward source: those that are known as soon as the response is there. Models on the ranks that train
    add theirs later.
    """

    output_ids: list[int]
    engine_logprobs: list[float]
    versions: list[VersionSpan]
    finish_reason: FinishReason
    text: str
    scores: dict[str, float]


class Group(msgspec.Struct):
    """All samples of one prompt; the unit that enters and leaves the transfer queue.

    `greedy_scores` are those of its greedy answer, where it was asked for.
    """

    prompt: Prompt
    trajectories: list[Trajectory]
    greedy_scores: dict[str, float] | None = None

    @property
    def oldest_version(self) -> WeightVersion:
        """The version of the oldest token of any trajectory."""
        return min(span.version for trajectory in self.trajectories for span in trajectory.versions)


class TrajectoryHeader(msgspec.Struct):
    """A trajectory without what it has for each token: all that a rank knows of one that another rank reads.

    `length` is of the response. `ending` is the last token of prompt and response, and how often it stands at the end.
    """

    length: int
    ending: tuple[int, int]
    versions: list[VersionSpan]
    finish_reason: FinishReason
    scores: dict[str, float]


class GroupHeader(msgspec.Struct):
    """A group without its tokens and texts; `index` and `dataset` are its prompt's."""

    index: int
    dataset: str
    prompt_length: int
    trajectories: list[TrajectoryHeader]
    greedy_scores: dict[str, float] | None = None


class Offer(msgspec.Struct):
    """One step's groups as the transfer queue offers them: headers for all ranks, and where each fetches its share.

    `server_key` is the public key of who answers at `endpoint`; `metrics` are what is logged of the queue.
    """

    step: int
    groups: list[GroupHeader]
    endpoint: str
    server_key: str
    metrics: dict[str, float]
