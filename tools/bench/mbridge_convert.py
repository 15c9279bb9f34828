"""The baseline of convert.py: mbridge loads a Qwen3 directory into a Megatron model in memory, and saves it from there.

    python mbridge_convert.py SOURCE TARGET

One rank on the CPU, with mbridge's defaults. Prints the seconds of both, without the making of the model, whose weights
are not initialised; what is saved is on disk when the clock stops.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch starts: a copy from a GPU is not what is measured

import torch
from mbridge import AutoBridge
from mbridge.core import register_model
from mbridge.models.qwen3 import Qwen3Bridge
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from transformers import AutoConfig

from megarl.model_engine import cpu


@register_model("qwen3")
class LocalBridge(Qwen3Bridge):
    """mbridge takes Transformer Engine's layers, which need a GPU; Megatron's own have other names for their norms."""

    _MLP_MAPPING = Qwen3Bridge._MLP_MAPPING | {
        "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"]
    }
    _OTHER_MAPPING = {"input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"]}

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> object:
        self.has_vp_stage = True
        return get_gpt_decoder_block_spec(
            self.config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
        )


def main() -> None:
    source, target = sys.argv[1:]
    torch.set_num_threads(os.cpu_count() or 1)  # ours has a process for each core
    cpu.install()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    config = AutoConfig.from_pretrained(source)
    config.rope_theta = config.rope_parameters["rope_theta"]  # where mbridge looks for it, as transformers 4 had it
    bridge = AutoBridge.from_config(config)
    bridge.set_extra_args(perform_initialization=False)
    model = bridge.get_model()
    begin = time.perf_counter()
    bridge.load_weights(model, source)
    imported = time.perf_counter()
    bridge.save_weights(model, target)
    for path in Path(target).iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    exported = time.perf_counter()
    print(f"mbridge_import: {source} in {imported - begin:.2f} s")
    print(f"mbridge_export: {target} in {exported - imported:.2f} s")


if __name__ == "__main__":
    main()
