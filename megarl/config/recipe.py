"""The recipe: every knob of a run as one typed tree.

A field's docstring is its help text. Checks that need one field or one section stand beside it; those that join
sections, the model or the world size are in `checks.py`. A choice is a union on `type`. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megarl.config.algorithm import Algorithm, NoCorrection
from megarl.config.fields import (
    Decay,
    Fraction,
    Location,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Roles,
    Seconds,
    Section,
)
from megarl.config.model import HeadName
from megarl.config.reward import Model, Reward
from megarl.config.rollout import Colocated, DirectPublish, Disaggregated, Hybrid, Journal, Mode, Publish, Rollout


class Layout(Section):
    tensor: PositiveInt = 1
    """Tensor-parallel size: each layer's matrices, and the activations between them, are split over this many ranks."""
    pipeline: PositiveInt = 1
    """Pipeline-parallel size: the layers are split into this many stages."""
    interleave: PositiveInt = 1
    """Parts of each pipeline stage (virtual pipeline); more parts idle less at the start and the end of a step."""
    context: PositiveInt = 1
    """Context-parallel size: each sequence is split over this many ranks."""
    expert: PositiveInt = 1
    """Expert-parallel size: each layer's experts are spread over this many ranks of the layer's pipeline stage."""
    expert_tensor: PositiveInt = 1
    """Tensor-parallel size of the experts."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What is computed again in the backward pass instead of kept: nothing, attention, or whole layers."""
    overlap: bool = False
    """Gradients are summed and new weights gathered, over data-parallel ranks, while others are still computed."""

    @property
    def model_ranks(self) -> int:
        """Ranks that hold the model once; the others repeat it (data-parallel)."""
        return self.tensor * self.pipeline * self.context


class ConstantSchedule(Section):
    type: Literal["constant"] = "constant"
    """The learning rate stays at its value after the warm-up."""


class CosineSchedule(Section):
    type: Literal["cosine"] = "cosine"
    """The learning rate falls along half a cosine from the end of the warm-up to the last step."""
    final_ratio: Fraction = 0.1
    """Learning rate of the last step as a fraction of the peak."""


class Optimizer(Section):
    learning_rate: PositiveFloat
    """Peak learning rate of Adam."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly from zero."""
    schedule: ConstantSchedule | CosineSchedule = Field(default=ConstantSchedule(), discriminator="type")
    """What the learning rate does after the warm-up."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    """Adam's decay rates of the first and second moment."""
    epsilon: PositiveFloat = 1e-8
    """Adam's term for numerical stability."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices; norms and biases do not decay."""
    clip: PositiveFloat = 1.0
    """Largest norm of the whole gradient; a longer one is scaled down to it."""


class ExpertBalance(Section):
    """What keeps the load of a mixture of experts even. All of it counts real tokens of the whole global batch."""

    balance_coefficient: NonNegativeFloat = 0.0
    """Weight of the balance loss of each layer: the mean over sequences of DeepSeek-V3's (arXiv 2412.19437, eq. 17)."""
    z_coefficient: NonNegativeFloat = 0.0
    """Weight of the router's z-loss of each layer: the mean over tokens (arXiv 2202.08906, eq. 5)."""
    bias_update_rate: NonNegativeFloat = 0.0
    """By how much each update moves a router's correction bias towards an even load; 0: the bias stays as it is."""


class Checkpoint(Section):
    every: NonNegativeInt = 0
    """Save model, optimizer and run state after each this many steps; 0: only at the end."""
    export_every: NonNegativeInt = 0
    """Write the model as a Hugging Face directory, hf_step_N, after each this many steps, while training goes on."""
    final: bool = True
    """Save them after the last step, so that the run can be resumed with more steps."""


class Runtime(Section):
    deadline_s: Seconds = 1800.0
    """Seconds a rank waits for the others, or for a batch, before the job is ended with the missing one's name."""


class SftData(Section):
    train: Location
    """JSON lines, {"messages": [...]} or {"prompt": ..., "response": ...}; used in order, again from the top."""
    roles: Roles = ("assistant",)
    """Roles whose messages are learned; a prompt is a message of the user, a response one of the assistant."""


class SftBatch(Section):
    sequences: PositiveInt
    """Sequences in the global batch of one optimizer step."""
    max_tokens_per_rank: PositiveInt = 8192
    """Most tokens a rank takes in one forward and backward pass; a longer sequence goes alone. Changes memory only."""


class PreferenceData(Section):
    train: Location
    """JSON lines, each {"prompt": ..., "chosen": ..., "rejected": ...}, maybe with a "margin"."""
    test: Location
    """JSON lines of the same form, held out."""


class PreferenceBatch(Section):
    pairs: PositiveInt
    """Pairs in the global batch of one optimizer step."""
    max_tokens_per_rank: PositiveInt = 8192
    """Most tokens a rank takes in one forward and backward pass; a longer sequence goes alone. Changes memory only."""


class RlData(Section):
    train: Location
    """JSON lines, each {"prompt": ..., "answer": ...}; used in order, again from the top when they end."""
    test: Location
    """JSON lines of the same form, held out; for the evaluations."""


class AllGroups(Section):
    type: Literal["all"] = "all"
    """The step's prompts in their order, whatever their samples are worth."""


class InformativeGroups(Section):
    type: Literal["informative"]
    """Dynamic sampling (DAPO, arXiv 2503.14476, eq. 11): groups that are all right or all wrong are replaced."""
    low: Fraction = 0.0
    """A group is taken if more than this share of its samples scores above 0 by the rule."""
    high: Fraction = 1.0
    """And less than this."""
    waves: Annotated[int, Field(ge=2, le=100)] = 3
    """How often a step asks for new groups at most; it has the next waves x `ask` rows of the data for that."""
    ask: PositiveInt | None = None
    """Prompts asked at a time, batch.prompts or more: over-sampling, which needs fewer waves; none: batch.prompts."""


class RlBatch(Section):
    prompts: PositiveInt
    """Prompts in one step; each makes one group."""
    group_size: PositiveInt
    """Samples of each prompt; 2 or more with the advantages that compare them."""
    sampling: AllGroups | InformativeGroups = Field(default=AllGroups(), discriminator="type")
    """Which groups are worth a step."""
    max_tokens_per_rank: PositiveInt = 8192
    """Most tokens a rank takes in one forward and backward pass; a longer sequence goes alone. Changes memory only."""


class Evaluation(Section):
    problems: NonNegativeInt = 256
    """Held-out problems, the first of data.test, or all if it has fewer; 0: no evaluation."""
    every: NonNegativeInt = 0
    """Evaluate after each this many steps; 0: only before the first and after the last."""


class Stage(Section):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*$", max_length=200)
    """Short name (the recipe file's, if none is given); the default run directory is runs/<name>."""
    run_dir: Location | None = None
    """Where logs, metrics, checkpoints and the trained model are written."""
    seed: NonNegativeInt = 0
    """Seed of everything random."""
    steps: PositiveInt
    """Steps to train."""
    model: Model
    """The initial policy."""
    layout: Layout = Layout()
    """How the model is spread over the ranks; what is left over is data-parallel."""
    optimizer: Optimizer
    """How weights follow gradients."""
    balance: ExpertBalance = ExpertBalance()
    """How the load of experts is kept even, in models that have them."""
    checkpoint: Checkpoint = Checkpoint()
    """When the run is saved."""
    runtime: Runtime = Runtime()
    """Deadlines."""

    def train_ranks(self, world: int) -> int:
        """The first so many of `world` ranks train."""
        return world

    @property
    def head(self) -> HeadName:
        """What kind of model is trained."""
        return "policy"

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.run_dir if self.run_dir is not None else Path("runs") / self.name


class SftRecipe(Stage):
    type: Literal["sft"]
    """Supervised fine-tuning on demonstrations."""
    data: SftData
    """The demonstrations."""
    batch: SftBatch
    """How many sequences a step takes."""


class NoCritic(Section):
    type: Literal["none"] = "none"
    """No critic is built."""


class Critic(Section):
    type: Literal["critic"]
    """Values of the sequence before each token, for the gae advantage."""
    model: Model
    """What it starts from: a reward model, a policy, or a critic."""
    optimizer: Optimizer
    """How its weights follow gradients."""
    clip: PositiveFloat | None = None
    """Its new values may leave the old ones by this much."""
    warmup_steps: NonNegativeInt = 0
    """First steps in which it alone learns."""


class RewardModelRecipe(Stage):
    type: Literal["reward_model"]
    """A model that scores answers, learned from preferences."""
    data: PreferenceData
    """Pairs of answers."""
    batch: PreferenceBatch
    """How many pairs a step takes."""
    centring: NonNegativeFloat = 0.0
    """Weight of (chosen + rejected)^2, which keeps scores around 0 (arXiv 2312.09244)."""
    evaluation_every: NonNegativeInt = 0
    """Measure the accuracy on data.test after each this many steps; 0: only after the last."""

    @property
    def head(self) -> HeadName:
        return "reward"


class RlRecipe(Stage):
    type: Literal["rl"]
    """Reinforcement learning from verifiable rewards."""
    data: RlData
    """The problems."""
    batch: RlBatch
    """How many samples a step takes."""
    mode: Mode = Mode()
    """How far rollouts may run ahead of training."""
    placement: Colocated | Disaggregated | Hybrid = Field(default=Colocated(), discriminator="type")
    """Which ranks train, and which have engines; see docs/placement.md."""
    rollout: Rollout
    """The engines and how they sample."""
    journal: Journal = Journal()
    """The record of rollouts in the run directory, from which a run that ended goes on."""
    publish: Publish = Field(default=DirectPublish(), discriminator="type")
    """How new weights reach the engines."""
    reward: Reward
    """How responses are scored."""
    critic: NoCritic | Critic = Field(default=NoCritic(), discriminator="type")
    """The model that the gae advantage needs."""
    algorithm: Algorithm = Algorithm()
    """How rewards become a loss."""
    evaluation: Evaluation = Evaluation()
    """Accuracy on held-out problems."""

    def train_ranks(self, world: int) -> int:
        return world if isinstance(self.placement, Colocated) else self.placement.train_ranks

    def rollout_ranks(self, world: int) -> range:
        """Those of `world` ranks on which engines are."""
        return range(self.train_ranks(world) if isinstance(self.placement, Disaggregated) else 0, world)

    @property
    def sequences(self) -> int:
        """Sequences in one step."""
        return self.batch.prompts * self.batch.group_size

    @property
    def takes_turns(self) -> bool:
        """Whether rollouts wait while the model trains, on the same ranks."""
        return not isinstance(self.placement, Disaggregated)

    def engines_that_wait(self, numbers: Iterable[int]) -> list[int]:
        """Those of these engines that are on ranks that train, where rollouts and training take turns."""
        if isinstance(self.placement, Hybrid):
            return [one for one in numbers if one * self.rollout.tensor_parallel < self.placement.train_ranks]
        return list(numbers)

    @property
    def learns_uncorrected(self) -> bool:
        """Whether old tokens count as if the present weights had sampled them."""
        return self.mode.max_lag > 0 and isinstance(self.algorithm.correction, NoCorrection)

    @property
    def most_groups(self) -> int:
        """Groups that are under way, waiting or in training at once, at most."""
        return self.mode.ask or (self.mode.max_lag + 1) * self.batch.prompts

    @property
    def engine_dtype(self) -> Literal["float32", "bfloat16"]:
        """That of the engines' numbers."""
        return self.rollout.dtype or self.model.dtype


AnyRecipe = SftRecipe | RewardModelRecipe | RlRecipe
Recipe = Annotated[AnyRecipe, Field(discriminator="type")]
