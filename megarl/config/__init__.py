"""The recipe: a typed tree read from YAML plus dotted overrides, and every check that can be made before a job runs.

Used by all rooms for their own section and by the entry points for the whole. Imports no torch, so it answers on a
login node in a fraction of a second.
"""

from megarl.config.checks import check_recipe
from megarl.config.errors import RecipeError
from megarl.config.load import dump_recipe, load_recipe
from megarl.config.model import (
    Activation,
    ClampedSwiglu,
    ExpertGroups,
    Experts,
    LatentAttention,
    LinearScaling,
    Llama3Scaling,
    ModelShape,
    Rope,
    RopeScaling,
    Window,
    YarnScaling,
    read_model_shape,
)
from megarl.config.placement import TrainPlace, engine_leaders, train_place
from megarl.config.recipe import (
    Checkpoint,
    ConstantDivisor,
    CosineSchedule,
    Evaluation,
    ExactMatch,
    ExpertBalance,
    Grpo,
    Layout,
    MathVerify,
    Model,
    Optimizer,
    RewardWorkers,
    RlRecipe,
    Rollout,
    SequenceMean,
    SftRecipe,
    TokenMean,
)

__all__ = [
    "Activation",
    "Checkpoint",
    "ClampedSwiglu",
    "ConstantDivisor",
    "CosineSchedule",
    "Evaluation",
    "ExactMatch",
    "ExpertBalance",
    "ExpertGroups",
    "Experts",
    "Grpo",
    "LatentAttention",
    "Layout",
    "LinearScaling",
    "Llama3Scaling",
    "MathVerify",
    "Model",
    "ModelShape",
    "Optimizer",
    "RecipeError",
    "RewardWorkers",
    "RlRecipe",
    "Rollout",
    "Rope",
    "RopeScaling",
    "SequenceMean",
    "SftRecipe",
    "TokenMean",
    "TrainPlace",
    "Window",
    "YarnScaling",
    "check_recipe",
    "dump_recipe",
    "engine_leaders",
    "load_recipe",
    "read_model_shape",
    "train_place",
]
