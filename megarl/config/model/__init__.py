"""What a Hugging Face config.json says of the model: the numbers that layouts divide and Megatron needs.

Reads JSON only, so that a recipe is checked on a login node before any model is built. A model that cannot be trained
exactly as transformers computes it is refused here, by the name of what is in the way.
"""

from megarl.config.model.heads import CriticHead, Head, HeadName, PolicyHead, RewardHead, head_config
from megarl.config.model.read import read_model_shape
from megarl.config.model.types import (
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
)

__all__ = [
    "Activation",
    "ClampedSwiglu",
    "CriticHead",
    "ExpertGroups",
    "Experts",
    "Head",
    "HeadName",
    "LatentAttention",
    "LinearScaling",
    "Llama3Scaling",
    "ModelShape",
    "PolicyHead",
    "RewardHead",
    "Rope",
    "RopeScaling",
    "Window",
    "YarnScaling",
    "head_config",
    "read_model_shape",
]
