"""One rank that trains with the real ModelEngine and publishes to running SGLang engines.

Its argument is a file with a `publication_plan.Plan`.
"""

from __future__ import annotations

import contextlib
import json
import urllib.request
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from megarl.checkpoint_engine import Engines, Precision, Publisher, Training
from megarl.config import Layout, ModelShape, Publish, read_model_shape
from megarl.model_engine import MicroBatch, ModelEngine, TokenSequence
from megarl.rollout_engine import EngineAddress, EngineControl
from megarl.runtime import ControlPlane, Links, connect, init_process_groups, rank_info
from tests.distributed import numerics
from tests.distributed.payload_numerics import CPU, engine
from tests.engine.publication_plan import KEY, Plan, Seen
from tests.publication import flipped_bit

DEADLINE_S = 120.0


def main(file: str) -> None:
    plan = Plan.read(Path(file))
    info = rank_info()
    control = connect(info, DEADLINE_S)
    links = init_process_groups(control, CPU, one_node=True, deadline_s=DEADLINE_S)
    layout, shape = Layout.model_validate(plan.layout), read_model_shape(plan.model)
    model = engine(plan.model, shape, layout)
    for count in plan.counts:
        seen = Publications(plan, control, links, model, layout, shape, count).run()
        if info.rank == 0:
            seen.write(plan.out / f"seen_{count}.json")
    dist.destroy_process_group()
    control.close()


class Publications:
    """To the first `count` engines."""

    def __init__(
        self,
        plan: Plan,
        control: ControlPlane,
        links: Links,
        model: ModelEngine,
        layout: Layout,
        shape: ModelShape,
        count: int,
    ) -> None:
        self.plan, self.control, self.model, self.rank = plan, control, model, control.rank
        self.addresses, self.ranks = plan.engines[:count], plan.ranks[:count]
        self.publisher = Publisher(
            TypeAdapter(Publish).validate_python(plan.publish),
            shape,
            Training(layout, control.world),
            Engines(tuple(map(tuple, self.ranks))),
            control,
            links,
            precision=Precision(torch.float32),
            device=CPU,
            ranks_per_node=control.world,
            timeout_s=DEADLINE_S,
        )
        self.number = next((number for number, ranks in enumerate(self.ranks) if ranks[0] == self.rank), None)
        self.target = None
        if self.number is not None:
            size = len(plan.ranks[0])
            self.target = EngineControl(self.addresses[self.number], KEY, tensor_parallel=size, timeout_s=60.0)
        weights = zip(numerics.rows(), numerics.token_weights(), strict=True)
        self.sequences = [TokenSequence(row, 1, {"weight": weight}) for row, weight in weights]
        self.seen = Seen([], [], [], {})

    def run(self) -> Seen:
        directory = self.plan.out / "version" if self.plan.publish["type"] == "disk" else None
        for version in range(1, self.plan.updates + 1):
            self.model.update(self.sequences, loss)
            if directory is not None:
                self.model.export_hf(directory)
            found = self.publisher.publish(version, self.model.weights, self.target, directory=directory)
            assert found.failed == {}, found.failed
            self.seen.nbytes.append(found.nbytes)
            self.ask()
        if self.plan.publish["type"] == "direct":
            self.corrupt()
        return self.seen

    def ask(self) -> None:
        """What engines say of the rows that were learned, against what the trainer says."""
        expected = self.model.logprobs(self.sequences)
        if self.rank == 0:
            answers = [logprobs(address, numerics.rows()) for address in self.addresses]
            self.seen.errors.append([float((given - expected).abs().max()) for given, _ in answers])
            self.seen.versions.append([said for _, said in answers])
        self.control.barrier("answers")

    def corrupt(self) -> None:
        with flipped_bit() if self.rank == self.ranks[-1][-1] else contextlib.nullcontext():
            self.seen.corrupted = self.publisher.publish(self.plan.updates + 1, self.model.weights, self.target).failed
        if self.target is not None and self.number in self.seen.corrupted:
            self.target.end_update(0)  # instead of a new engine
        again = self.publisher.publish(self.plan.updates + 2, self.model.weights, self.target)
        assert again.failed == {}, again.failed
        self.ask()


def loss(batch: MicroBatch, logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    total = -(batch.columns["weight"] * logprobs).sum()
    return total, {"loss": total.detach()}, {}


def logprobs(address: EngineAddress, rows: list[list[int]]) -> tuple[Tensor, str]:
    """Of all but the first token of each row, and the version that the engine says it has."""
    body = {
        "input_ids": rows,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    request = urllib.request.Request(
        f"{address.url}/generate",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        infos = [one["meta_info"] for one in json.load(answer)]
    values = [value for info in infos for value, *_ in info["input_token_logprobs"][1:]]
    (version,) = {info["weight_version"] for info in infos}
    return torch.tensor(values), version
