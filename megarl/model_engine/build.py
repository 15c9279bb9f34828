"""Building Megatron's model, gradient buffers and optimizer from a recipe."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config import CosineSchedule, Layout, ModelShape, Optimizer
from megarl.model_engine import cpu
from megarl.model_engine.architecture import make_config, model_arguments
from megarl.model_engine.modules import CausalAttention, RMSNorm


def init_model_parallel(layout: Layout, device: torch.device, seed: int, deadline_s: float) -> None:
    """Make Megatron's process groups, whose collectives wait `deadline_s` at most; torch's default group must exist."""
    if device.type == "cpu":
        cpu.install()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=deadline_s / 60,
    )
    model_parallel_cuda_manual_seed(seed)


def transformer_config(
    shape: ModelShape, layout: Layout, dtype: torch.dtype, device: torch.device
) -> TransformerConfig:
    """Megatron's configuration of the model; fusions that need TransformerEngine or apex are off."""
    return make_config(
        shape,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        moe_token_dispatcher_type="alltoall",  # dense models too: the default refuses variable lengths
        variable_seq_lengths=True,  # each micro-batch is as long as its own longest sequence
        batch_p2p_comm=False,
        calculate_per_token_loss=True,  # data-parallel gradients are summed; the loss is already divided
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,  # weights are loaded
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def build_model(config: TransformerConfig, shape: ModelShape, layout: Layout) -> GPTModel:
    """This rank's part of the model, with weights still to be loaded."""
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    block = TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)
    model = GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=shape.padded_vocab(layout.tensor),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        **model_arguments(shape),
    )
    _mark_shards(model)
    return model


def _mark_shards(model: GPTModel) -> None:
    """Mark the weights of which each tensor-parallel rank has its own part, so that the gradient norm counts all parts.

    Megatron does this while it initialises them, which is not done here.
    """
    split = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
    for module in model.modules():
        # an output layer that is tied to an embedding on the same stage has no weight of its own
        if isinstance(module, split) and module.weight is not None:
            dim = 1 if isinstance(module, RowParallelLinear) else 0
            set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=dim, stride=1)


def add_gradients(model: GPTModel) -> DistributedDataParallel:
    """Give the model float32 gradient buffers that are summed over data-parallel ranks."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, average_in_collective=False
    )
    return DistributedDataParallel(config=model.config, ddp_config=settings, module=model)


def build_optimizer(recipe: Optimizer, model: DistributedDataParallel) -> MegatronOptimizer:
    """Adam over float32 main weights, with clipping by the global norm."""
    config = model.config
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            adam_beta1=recipe.betas[0],
            adam_beta2=recipe.betas[1],
            adam_eps=recipe.epsilon,
            clip_grad=recipe.clip,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
        ),
        [model],
        use_gloo_process_groups=False,
    )
    config.finalize_model_grads_func = _sum_gradients
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = partial(model.no_sync)
    return optimizer


def learning_rate(recipe: Optimizer, update: int, updates: int) -> float:
    """Learning rate of update `update` (from 0) of `updates`: linear warm-up, then the schedule."""
    if update < recipe.warmup_steps:
        return recipe.learning_rate * (update + 1) / recipe.warmup_steps
    if not isinstance(recipe.schedule, CosineSchedule):
        return recipe.learning_rate
    progress = (update - recipe.warmup_steps) / max(updates - 1 - recipe.warmup_steps, 1)
    floor = recipe.schedule.final_ratio
    return recipe.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def _sum_gradients(model: list[DistributedDataParallel], num_tokens: Any, **kwargs: Any) -> None:
    """Megatron would divide by the tokens it counted; the loss is divided by the global batch's normaliser already."""
    finalize_model_grads(model, None, **kwargs)
