"""Megatron-core 0.16.1 on any machine: what it does wrong and cannot be told otherwise. (`cpu.py` is for machines
without CUDA.)"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

_set_states, _state_dict = DistributedOptimizer._set_main_param_and_optimizer_states, DistributedOptimizer.state_dict
_gather_states = DistributedOptimizer.get_parameter_state_dp_zero


def install() -> None:
    """Apply the patches; doing so again changes nothing."""
    DistributedOptimizer._set_main_param_and_optimizer_states = _set_states_with_torch_adam
    DistributedOptimizer.state_dict = _state_dict_without_parameters
    DistributedOptimizer.get_parameter_state_dp_zero = _gather_states_with_padding
    # multi_latent_attention.py:62 says that TransformerEngine is there when it is not, and :185 then fails
    multi_latent_attention.HAVE_TE = isinstance(multi_latent_attention.TELinear, type)
    # moe_utils.py:25 leaves the name undefined where TransformerEngine is missing, and :1192 asks for its value
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)


def _state_dict_without_parameters(self: Any) -> dict[str, Any]:
    """distrib_optimizer.py:641 fails where torch's Adam has no parameters, as for experts on a stage without any."""
    if self.optimizer is None or self.optimizer.state or not isinstance(self.optimizer, torch.optim.Adam):
        return _state_dict(self)
    state = {name: value for name, value in self.optimizer.state_dict().items() if name != "state"}
    groups = [{name: value for name, value in group.items() if name != "params"} for group in state["param_groups"]]
    return {"optimizer": {**state, "param_groups": [{**group, "step": self.step_of_others} for group in groups]}}


def _gather_states_with_padding(self: Any, *arguments: Any, **others: Any) -> Any:
    """distrib_optimizer.py:1110 drops the padding between buckets, and :1501 looks for parameters as if it were there.

    Then a checkpoint holds others' numbers for all after the first padding, without a word: with embeddings tied over
    pipeline stages, which have a bucket of their own, or with `layout.overlap`.
    """
    state = _gather_states(self, *arguments, **others)
    for index, buffer in enumerate(self.buffers if state is not None else ()):
        for tensors in state[index].values():
            for name in ("param", "exp_avg", "exp_avg_sq"):
                tensors[name] = _spread(tensors[name], buffer)
    return state


def _spread(dense: Tensor, buffer: Any) -> Tensor:
    whole, start = dense.new_zeros(buffer.numel), 0
    for bucket in buffer.buckets:
        end = start + bucket.numel_unpadded
        whole[bucket.offset : bucket.offset + bucket.numel_unpadded] = dense[start:end]
        start = end
    return whole


def _set_states_with_torch_adam(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    """distrib_optimizer.py:940 wants a value for each of the optimizer's states; torch's Adam has a step as well."""
    group, index = self.model_param_group_index_map[model_param]
    state = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
    _set_states(self, model_param, {**({"step": state["step"]} if "step" in state else {}), **tensors})
