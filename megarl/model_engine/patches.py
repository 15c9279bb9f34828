"""Megatron-core 0.16.1 on any machine: what it does wrong and cannot be told otherwise. (`cpu.py` is for machines
without CUDA.)"""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils

_set_states = DistributedOptimizer._set_main_param_and_optimizer_states


def install() -> None:
    """Apply the patches; doing so again changes nothing."""
    DistributedOptimizer._set_main_param_and_optimizer_states = _set_states_with_torch_adam
    # multi_latent_attention.py:62 says that TransformerEngine is there when it is not, and :185 then fails
    multi_latent_attention.HAVE_TE = isinstance(multi_latent_attention.TELinear, type)
    # moe_utils.py:25 leaves the name undefined where TransformerEngine is missing, and :1192 asks for its value
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)


def _set_states_with_torch_adam(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    """distrib_optimizer.py:940 wants a value for each of the optimizer's states; torch's Adam has a step as well."""
    group, index = self.model_param_group_index_map[model_param]
    state = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
    _set_states(self, model_param, {**({"step": state["step"]} if "step" in state else {}), **tensors})
