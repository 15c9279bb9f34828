"""Six rollout phases with the engines that serve them.

`reasoning`, `early_rl` and `middle` differ in how far the prompt tells the length. The other three have the published
means, caps, request counts, group sizes and GPUs of Seer (arXiv 2511.14617, on H800). How many GPUs one engine has, how
long prompts are, and how lengths spread within and between groups are not taken from there: groups are as alike as in
`reasoning`, and engines are the smallest usual ones that hold the weights with a useful cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megarl.simulator.speed import GPUS, MODELS, EngineModel, Placement, roofline
from megarl.simulator.workload import LengthModel


@dataclass(frozen=True)
class Preset:
    """A workload on `engines` engines of one kind."""

    lengths: LengthModel
    model: str
    gpu: str
    engines: int
    place: Placement

    def engine_model(self) -> EngineModel:
        return roofline(f"{self.model} on {self.place.gpus} {self.gpu}", MODELS[self.model], GPUS[self.gpu], self.place)


_ONE = Placement(1)
_REASONING = LengthModel(9_400, 16_384, 0.77, 0.23, groups=128, group_size=8)

PRESETS = {
    "reasoning": Preset(_REASONING, "qwen3-8b", "H800", 16, _ONE),
    "early_rl": Preset(LengthModel(580, 10_000, 0.23, 0.89, groups=256, group_size=16), "qwen3-8b", "H800", 8, _ONE),
    "middle": Preset(LengthModel(4_000, 16_384, 0.6, 0.4, groups=256, group_size=8), "qwen3-8b", "H800", 16, _ONE),
    "moonlight": Preset(
        replace(_REASONING, mean=22_386, cap=65_536, groups=400), "moonlight-16b-a3b", "H800", 32, _ONE
    ),
    "qwen2_vl_72b": Preset(
        replace(_REASONING, mean=7_615, cap=40_960, groups=600, group_size=16, prompt=1024),
        "qwen2-vl-72b",
        "H800",
        32,
        Placement(4),
    ),
    "kimi_k2": Preset(
        replace(_REASONING, mean=38_959, cap=98_304, groups=800),
        "kimi-k2",
        "H800",
        8,
        Placement(32, attention_data=True),
    ),
}
