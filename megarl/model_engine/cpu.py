"""Megatron-core 0.16.1 on a machine without CUDA: the whole shim, in one place.

Megatron names "cuda" as the device in many calls. Each patch below redirects one kind of call; line numbers are of
megatron/core. `install()` must run after megatron is imported and before anything is built with it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import megatron.core.tensor_parallel.mappings as mappings
import megatron.core.tensor_parallel.random as megatron_random
import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
import torch
import torch._dynamo
import torch.utils._device as torch_device

_CPU = torch.device("cpu")
_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "rand", "randn", "empty_like", "zeros_like")
_installed = False


def install() -> None:
    """Apply the patches, once; refuses on a machine that has a GPU."""
    global _installed
    if torch.cuda.is_available():
        raise RuntimeError("the CPU shim is only for machines without a GPU")
    if _installed:
        return
    _installed = True
    # p2p_communication.py:313, rotary_pos_embedding.py:162, mappings.py:141, param_and_grad_buffer.py:800
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    # p2p_communication.py:398, fully_parallel.py:272
    torch.cuda.synchronize = lambda *_, **__: None
    # schedules.py:596, optimizer.py:481, clip_grads.py:103, dist_checkpointing/exchange_utils.py:98
    # `with torch.device(...)` knows the factories by a set that is made once: it must hold the real ones
    torch_device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # language_module.py:244 moves tied embeddings between pipeline stages
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    # optimizer.py:671 and clip_grads.py:167 compare a parameter's type with torch.cuda.FloatTensor
    torch.Tensor.type = _cuda_type(torch.Tensor.type)  # type: ignore[method-assign]
    # token_dispatcher.py:445, 871 overlap the copying of token counts, and :862 leaves them tensors off CUDA
    torch.cuda.Stream = torch.cuda.Event = _Nothing  # type: ignore[assignment,misc]
    torch.cuda.current_stream = _Nothing  # type: ignore[assignment]
    torch.cuda.stream = contextlib.nullcontext  # type: ignore[assignment]
    token_dispatcher.maybe_move_tensor_to_cpu = _to_list
    # router.py:531 compiles a sum, for which a laptop need not have a compiler
    torch._dynamo.config.disable = True
    # mappings.py:150, 221: gloo exchanges equal parts alone, and experts have unequal numbers of tokens
    mappings._gather_along_first_dim = _gather
    mappings._reduce_scatter_along_first_dim = _reduce_scatter
    # random.py:235, 447: dropout and initialisation draw from per-purpose states of the CUDA generator
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    megatron_random.CudaRNGStatesTracker.fork = _fork


def _on_cpu(factory: Any) -> Any:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)  # rope_utils.py:62
        return factory(*args, **kwargs)

    return wrapped


def _cuda_type(original: Any) -> Any:
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    return type_


class _Nothing:
    """A stream or event of a device that does one thing after the other."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def _nothing(self, *_: Any) -> None: ...

    wait_stream = wait_event = record = wait = synchronize = _nothing

    def record_event(self, *_: Any) -> _Nothing:
        return _Nothing()


def _to_list(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


_gather_equal, _reduce_scatter_equal = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim


def _gather(part: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
    if output_split_sizes is None:
        return _gather_equal(part, group, None, use_global_buffer)
    sizes = [int(size) for size in output_split_sizes]
    padded = part.new_zeros(max(sizes), *part.shape[1:])
    padded[: len(part)] = part
    gathered = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(gathered, padded, group=group)
    return torch.cat([whole[:size] for whole, size in zip(gathered, sizes, strict=True)])


def _reduce_scatter(whole: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
    if input_split_sizes is None:
        return _reduce_scatter_equal(whole, group, None, use_global_buffer)
    total = whole.contiguous().clone()
    torch.distributed.all_reduce(total, group=group)
    return total.split([int(size) for size in input_split_sizes])[group.rank()].contiguous()


@contextlib.contextmanager
def _fork(self: Any, name: str = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
    """The tracker's own fork insists that the CPU generator is untouched, which here is the one in use."""
    outer = torch.get_rng_state()
    torch.set_rng_state(self.states_[name])
    try:
        yield
    finally:
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(outer)
