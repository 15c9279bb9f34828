"""Storages that are emptied and filled again; tests/distributed/test_offload.py has Megatron's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megarl.model_engine import PartAwayError
from megarl.model_engine.offload import PARTS, Offloader


class Tied(torch.nn.Module):
    """Two parameters of one storage, one of another type, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(30)
        self.first = torch.nn.Parameter(flat[:12].view(3, 4))
        self.second = torch.nn.Parameter(flat[20:])
        self.small = torch.nn.Parameter(torch.randn(7).bfloat16())
        self.register_buffer("bias", torch.randn(5))


def offloader(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, chunk_bytes: int) -> Offloader:
    optimizers = [SimpleNamespace(optimizer=optimizer)]
    return Offloader([model], [], optimizers, torch.device("cpu"), host_chunk_bytes=chunk_bytes)


def everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [*model.parameters(), *model.buffers(), *states]


@pytest.mark.parametrize("chunk_bytes", [1, 16, 100, 1 << 20])
def test_all_comes_back_bit_by_bit_into_the_same_tensors(chunk_bytes: int) -> None:
    torch.manual_seed(0)
    model = Tied()
    main = model.small.detach().float()  # what the optimizer steps for a parameter of half precision
    optimizer = torch.optim.Adam([model.first, model.second, main])
    for parameter in (model.first, model.second, main):
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    tensors = [*everything(model, optimizer), main]
    before, views = (
        [tensor.detach().clone() for tensor in tensors],
        [tensor.detach()[..., :2] for tensor in tensors[:3]],
    )
    parts = offloader(model, optimizer, chunk_bytes)
    for _ in range(2):
        moved = parts.offload(PARTS)
        assert moved.before.device == {
            "parameters": 30 * 4 + 7 * 2 + 5 * 4,
            "gradients": 0,
            "optimizer": 7 * 4 + 2 * 4 * (12 + 10 + 7) + 3 * 4,  # main weights, moments, steps
        }
        assert moved.moved_bytes == moved.after.host == moved.before.device_total
        assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
        assert parts.onload(PARTS).after.device == moved.before.device
        assert all(torch.equal(was, now) for was, now in zip(before, tensors, strict=True))
        assert all(torch.equal(view, tensor[..., :2]) for view, tensor in zip(views, tensors, strict=False))


def test_parts_go_and_come_back_singly() -> None:
    model = Tied()
    optimizer = torch.optim.Adam([model.small.detach().float()])
    parts = offloader(model, optimizer, 64)
    both = parts.offload(["optimizer"]).before.device
    assert parts.offload(["parameters", "optimizer"]).after.device_total == 0
    assert parts.onload(["parameters"]).after.device == both | {"optimizer": 0}
    parts.require("this", "parameters")
    with pytest.raises(PartAwayError, match=r'^that needs .* onload\("optimizer"\) first$'):
        parts.require("that", "parameters", "optimizer")
    assert parts.onload(PARTS).after.device == both


def test_a_part_that_has_changed_its_size_is_copied_whole() -> None:
    """As when a checkpoint is loaded, or Adam makes its moments at the first step."""
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    parts = offloader(model, optimizer, 64)
    parts.offload(PARTS)
    parts.onload(PARTS)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = [tensor.detach().clone() for tensor in everything(model, optimizer)]
    assert parts.offload(PARTS).after.device_total == 0
    parts.onload(PARTS)
    assert all(torch.equal(was, now) for was, now in zip(before, everything(model, optimizer), strict=True))
