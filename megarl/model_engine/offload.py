"""Device memory of an engine's parts: given up between phases, so that rollout engines can use it, and taken again.

`ModelEngine.offload` and `onload` call it. It empties the storages of a part and later fills them in place, so that all
views stay what they were: parameters and buckets of Megatron's buffers, main_grad, float32 shards of the optimizer.
What has no storage must not be read (that ends the process), so the engine asks `require` first.

Of Megatron 0.16.1's hooks that of the gradient buffers is used; it zeroes them, as an update does anyway. Not used are
- optimizer.py:344: it copies to pageable memory, several times slower than pinned, and the shards of float32
  parameters, which are views of these, come back with memory of their own
- param_and_grad_buffer.py:964 for parameters: frozen models and the buffers of modules have none of its buffers, and
  its pinned memory, which torch rounds up to a power of two, is filled from a second copy
Without CUDA the first does nothing and the second fails.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, UntypedStorage

Part = Literal["parameters", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = get_args(Part)

HOST_CHUNK_BYTES = 1 << 30
"""Host memory is taken in chunks of this size: a power of two, to which torch would round up any pinned memory."""


class PartAwayError(RuntimeError):
    """The engine was used while a part that it needs was on the host."""


@dataclass(frozen=True)
class Held:
    """Bytes that one rank holds. `device` are those of the parts, `host` those of their copies, also after `onload`.

    `reserved` is what torch has taken from the GPU for anything in this process; 0 on a CPU.
    """

    device: dict[Part, int]
    host: int
    reserved: int

    @property
    def device_total(self) -> int:
        return sum(self.device.values())


@dataclass(frozen=True)
class Moved:
    """What `offload` or `onload` did on this rank."""

    before: Held
    after: Held
    seconds: float

    @property
    def moved_bytes(self) -> int:
        """Freed on the device, or taken again."""
        return abs(self.before.device_total - self.after.device_total)


class Offloader:
    """The parts of one engine, and which of them are away. A part that the engine does not have takes no memory."""

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        with_gradients: Sequence[Any],
        optimizers: Sequence[Any],
        device: torch.device,
        host_chunk_bytes: int = HOST_CHUNK_BYTES,
    ) -> None:
        """`with_gradients` are Megatron's wrappers of `model` that have gradient buffers; none if it is frozen."""
        self._device = device
        self._parts: dict[Part, _Copied | _Gradients] = {
            "parameters": _Copied(_Parameters(model), device, host_chunk_bytes),
            "gradients": _Gradients(with_gradients),
            "optimizer": _Copied(_OptimizerStates(optimizers, _Parameters(model)), device, host_chunk_bytes),
        }
        self._away: set[Part] = set()

    def offload(self, parts: Collection[Part]) -> Moved:
        """Parts that are away already stay so."""
        before, start = self._held(), time.perf_counter()
        self._synchronize()  # collectives have streams of their own
        for part in PARTS:
            if part in parts and part not in self._away:
                self._parts[part].offload()
                self._away.add(part)
        self._synchronize()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # else torch would keep what has become free
        return Moved(before, self._held(), time.perf_counter() - start)

    def onload(self, parts: Collection[Part]) -> Moved:
        """Parts that are there already stay so. Raises torch.OutOfMemoryError; what did not fit is still away then."""
        before, start = self._held(), time.perf_counter()
        for part in PARTS:
            if part in parts and part in self._away:
                self._parts[part].onload()
                self._away.remove(part)
        self._synchronize()
        return Moved(before, self._held(), time.perf_counter() - start)

    def require(self, use: str, *parts: Part) -> None:
        """Raise PartAwayError if one of the parts is away."""
        if missing := [part for part in parts if part in self._away]:
            names = ", ".join(f'"{part}"' for part in missing)
            raise PartAwayError(f"{use} needs what has been offloaded: call onload({names}) first")

    def _held(self) -> Held:
        return Held(
            device={name: part.device_bytes() for name, part in self._parts.items()},
            host=sum(part.host_bytes() for part in self._parts.values()),
            reserved=torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0,
        )

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _Parameters:
    """Parameters and buffers of the model's modules, also those that are no parameters to Megatron's buffers."""

    def __init__(self, model: Sequence[torch.nn.Module]) -> None:
        self._model = model

    def storages(self) -> dict[int, UntypedStorage]:
        return _storages(t for part in self._model for t in [*part.parameters(), *part.buffers()])


class _OptimizerStates:
    """Main weights and moments. Loading a checkpoint replaces some, so they are looked up each time."""

    def __init__(self, optimizers: Sequence[Any], parameters: _Parameters) -> None:
        self._optimizers, self._parameters = optimizers, parameters

    def storages(self) -> dict[int, UntypedStorage]:
        """Without those of float32 main weights, which are the parameters themselves."""
        parameters = self._parameters.storages()
        return {key: storage for key, storage in _storages(self._tensors()).items() if key not in parameters}

    def _tensors(self) -> Iterator[Tensor]:
        for one in (optimizer.optimizer for optimizer in self._optimizers if optimizer.optimizer is not None):
            yield from (parameter for group in one.param_groups for parameter in group["params"])
            yield from (value for state in one.state.values() for value in state.values() if torch.is_tensor(value))


class _Copied:
    """A part that is kept in host memory while it is away. The memory is kept for the next time: pinning is slow."""

    def __init__(self, what: _Parameters | _OptimizerStates, device: torch.device, chunk_bytes: int) -> None:
        self._what, self._device, self._chunk_bytes = what, device, chunk_bytes
        self._chunks: list[Tensor] = []
        self._left: list[tuple[UntypedStorage, int]] = []

    def device_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._on_device())

    def host_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks)

    def offload(self) -> None:
        self._left = [(storage, storage.nbytes()) for storage in self._on_device() if storage.nbytes()]
        self._take_host_memory(sum(nbytes for _, nbytes in self._left))
        for device, host in self._pieces():
            host.copy_(device, non_blocking=True)
        # only what the device runs after its copies can be given this memory
        for storage, _ in self._left:
            storage.resize_(0)

    def onload(self) -> None:
        try:
            for storage, nbytes in self._left:
                storage.resize_(nbytes)
        except torch.OutOfMemoryError:
            for storage, _ in self._left:
                storage.resize_(0)
            raise
        for device, host in self._pieces():
            device.copy_(host, non_blocking=True)
        self._left = []

    def _on_device(self) -> list[UntypedStorage]:
        """Not the step of torch's Adam, which is on the host anyway."""
        return [storage for storage in self._what.storages().values() if storage.device.type == self._device.type]

    def _take_host_memory(self, nbytes: int) -> None:
        if self.host_bytes() != nbytes:
            self._chunks = []  # before the new ones are made
            pinned = self._device.type == "cuda"
            for start in range(0, nbytes, self._chunk_bytes):
                size = min(nbytes - start, self._chunk_bytes)
                self._chunks.append(torch.empty(size, dtype=torch.uint8, pin_memory=pinned))

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes on the device and where on the host they belong, one storage after the other."""
        at = 0
        for storage, nbytes in self._left:
            whole, done = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), 0
            while done < nbytes:
                chunk, start = divmod(at, self._chunk_bytes)
                size = min(nbytes - done, self._chunk_bytes - start)
                yield whole[done : done + size], self._chunks[chunk][start : start + size]
                done, at = done + size, at + size


class _Gradients:
    """Megatron's buffers, which come back full of zeros."""

    def __init__(self, model: Sequence[Any]) -> None:
        self._model = model

    def device_bytes(self) -> int:
        buffers = [buffer for part in self._model for buffer in [*part.buffers, *part.expert_parallel_buffers]]
        return sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)

    def host_bytes(self) -> int:
        return 0

    def offload(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "TypedStorage is deprecated")
            for part in self._model:
                part.offload_grad_buffers()

    def onload(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "TypedStorage is deprecated")
            for part in self._model:
                part.restore_grad_buffers()


def _storages(tensors: Iterable[Tensor]) -> dict[int, UntypedStorage]:
    """Each storage once; its address in C++ is the same for all tensors of it, also while it is empty."""
    return {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
