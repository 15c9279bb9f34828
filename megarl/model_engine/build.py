"""Building Megatron's model, gradient buffers and optimizer from a recipe."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config import CosineSchedule, ExpertBalance, Layout, ModelShape, Optimizer
from megarl.model_engine import cpu, patches
from megarl.model_engine.architecture import make_config, model_arguments
from megarl.model_engine.attention import PackedRope
from megarl.model_engine.heads import OutputHead
from megarl.model_engine.routing import tell_routers
from megarl.model_engine.specification import block_specification


def init_model_parallel(layout: Layout, device: torch.device, seed: int, deadline_s: float) -> None:
    """Make Megatron's process groups, whose collectives wait `deadline_s` at most; torch's default group must exist."""
    if device.type == "cpu":
        cpu.install()
    patches.install()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.interleave if layout.interleave > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=deadline_s / 60,
    )
    model_parallel_cuda_manual_seed(seed)


def check_model_parallel(layout: Layout) -> None:
    """Raise ValueError unless Megatron's process groups, of which a process has one set, are those of `layout`."""
    found = Layout(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        interleave=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        context=parallel_state.get_context_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_world_size(),
        recompute=layout.recompute,
        overlap=layout.overlap,
    )
    if found != layout:
        raise ValueError(f"all models of a process share one layout; the first has ({found}), this one ({layout})")


def transformer_config(
    shape: ModelShape, layout: Layout, dtype: torch.dtype, device: torch.device
) -> TransformerConfig:
    """Megatron's configuration of the model; fusions that need TransformerEngine or apex are off."""
    return make_config(
        shape,
        **_parallelism(layout),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
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


def _parallelism(layout: Layout) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tensor,
        "sequence_parallel": layout.tensor > 1,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.interleave if layout.interleave > 1 else None,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "moe_token_dispatcher_type": "alltoall",  # dense models too: the default refuses variable lengths
        # each micro-batch is as long as its own sequences; between interleaved stages the exchange of shapes deadlocks
        "variable_seq_lengths": layout.interleave == 1,
        "batch_p2p_comm": False,  # True computes wrong numbers with interleaved stages, without a word
    }
    if layout.recompute == "full":
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if layout.recompute == "selective":
        settings |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return settings


def build_model(
    config: TransformerConfig, shape: ModelShape, layout: Layout, balance: ExpertBalance, head: OutputHead
) -> list[GPTModel]:
    """This rank's part of the model, with weights still to be loaded: one network for each part of its stage."""
    # finalize_model_grads moves the bias by the counts that routers keep
    config.moe_router_bias_update_rate = balance.bias_update_rate
    parts = [_build_part(config, shape, layout, balance, part) for part in range(layout.interleave)]
    for part in parts:
        if part.post_process:
            head.attach(part)
        _mark_shards(part)
    return parts


def _build_part(
    config: TransformerConfig, shape: ModelShape, layout: Layout, balance: ExpertBalance, part: int
) -> GPTModel:
    where = part if layout.interleave > 1 else None
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_specification(config, shape, balance, where),
        vocab_size=shape.padded_vocab(layout.tensor),
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=where),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=where),
        parallel_output=True,
        vp_stage=where,
        **model_arguments(shape),
    )
    _set_rope(model, shape)
    if model.pre_process and shape.embedding_scale != 1.0:
        scale = torch.tensor(shape.embedding_scale, dtype=config.params_dtype)
        model.embedding.register_forward_hook(lambda _, __, output: output * scale.to(output.device))
    tell_routers(model)
    return model


def _set_rope(model: GPTModel, shape: ModelShape) -> None:
    if shape.latent is None:
        own = [model.rotary_pos_emb]
        if shape.window is not None and shape.window.rope is not None:
            own.append(
                RotaryEmbedding(
                    shape.head_dim,
                    shape.window.rope.fraction,
                    rotary_base=shape.window.rope.theta,
                    use_cpu_initialization=True,
                )
            )
        model.rotary_pos_emb = PackedRope(own, shape.max_positions)
        return
    rope = None
    for layer in model.decoder.layers:
        attention = layer.self_attention
        # one table for all layers
        rope = rope or PackedRope([attention.rotary_pos_emb], shape.max_positions, latent=True)
        attention.rotary_pos_emb = rope
        attention.kv_layernorm.eps = shape.latent.norm_epsilon
        if shape.latent.query_rank is not None:
            attention.q_layernorm.eps = shape.latent.norm_epsilon


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
    for name, parameter in model.named_parameters():
        if name.endswith(".softmax_offset"):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)


def add_gradients(model: list[GPTModel], layout: Layout) -> list[DistributedDataParallel]:
    """Give each part float32 gradient buffers; data-parallel ranks sum them and divide the optimizer among them."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=layout.overlap,
        overlap_param_gather=layout.overlap,
        average_in_collective=False,
    )
    # buckets are for overlap; of the parts of a stage only the first is used last in the backward pass
    return [
        DistributedDataParallel(
            config=part.config, ddp_config=settings, module=part, disable_bucketing=not layout.overlap or index > 0
        )
        for index, part in enumerate(model)
    ]


def build_optimizer(recipe: Optimizer, model: list[DistributedDataParallel]) -> MegatronOptimizer:
    """Adam over float32 main weights, with clipping by the global norm."""
    config = model[0].config
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
            use_distributed_optimizer=True,
            overlap_param_gather=model[0].ddp_config.overlap_param_gather,
        ),
        model,
        use_gloo_process_groups=False,
    )
    _start_adam(optimizer)
    config.finalize_model_grads_func = _sum_gradients
    config.grad_scale_func = optimizer.scale_loss
    if model[0].ddp_config.overlap_grad_reduce:
        config.no_sync_func = [part.no_sync for part in model]
        config.grad_sync_func = [part.start_grad_sync for part in model]
        config.param_sync_func = [part.start_param_sync for part in model]
        if len(model) == 1:
            for name in ("no_sync_func", "grad_sync_func", "param_sync_func"):
                setattr(config, name, getattr(config, name)[0])
    return optimizer


def _start_adam(optimizer: MegatronOptimizer) -> None:
    """Make the moments of torch's Adam before the first step: Megatron cannot save or load without them."""
    for one in optimizer.chained_optimizers:
        if isinstance(one.optimizer, torch.optim.Adam):
            for parameter in (p for group in one.optimizer.param_groups for p in group["params"]):
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                one.optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}


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
