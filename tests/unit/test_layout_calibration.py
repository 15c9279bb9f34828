"""A machine made from measurements gives those back, and what lies between them; bad tables are refused in words."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megarl.config import Layout
from megarl.layout import (
    KNOWN,
    Ask,
    Counts,
    Decoder,
    Dtype,
    Exchange,
    Kind,
    Layer,
    Load,
    Products,
    Table,
    Training,
    Work,
    gated_mlp,
    grouped_attention,
    read_table,
    step_time,
    trainings,
    write_table,
)
from megarl.simulator import measured
from tools import tune_layout

ROWS, WIDTHS = [64, 1024], [128, 512, 2048]
LATENCY_S, BYTES_PER_S = 1e-4, 1e9
START_S, MEMORY = 5e-6, 1e10


def rate(rows: int, inputs: int, outputs: int) -> float:
    """FLOPs a second that rise with every size, so that none can be mistaken for another."""
    return 1e9 * rows**0.1 * inputs**0.2 * outputs**0.3


def products(times: float) -> Products:
    sizes = itertools.product(ROWS, WIDTHS, WIDTHS)
    seconds = [times * 2.0 * rows * inputs * outputs / rate(rows, inputs, outputs) for rows, inputs, outputs in sizes]
    return Products(ROWS, WIDTHS, WIDTHS, seconds)


def exchange(kind: Kind, ranks: int, busy: int, nodes: int = 1, speed: float = BYTES_PER_S) -> Exchange:
    """A ring: each rank waits for all others and moves the bytes that are not its own."""
    share = 1.0 if kind == "send" else (ranks - 1) / ranks
    latency = LATENCY_S * (1 if kind == "send" else ranks - 1)
    return Exchange(kind, ranks, nodes, busy, [(sent, latency + share * sent / speed) for sent in (1e3, 1e5, 1e7)])


def table(device: str = "cpu", ranks_per_node: int = 4, more: list[Exchange] | None = None) -> Table:
    """Two cores: four ranks are half as fast as two. Two ranks of four exchange at once at half the speed."""
    kinds: list[Kind] = ["all_gather", "reduce_scatter", "all_to_all", "send"]
    exchanges = [exchange(kind, 2, busy, speed=2 * BYTES_PER_S / busy) for kind in kinds for busy in (2, 4)]
    exchanges += [exchange(kind, 4, 4, speed=BYTES_PER_S / 2) for kind in kinds if kind != "send"]
    memory = [(192.0, START_S), (1e5, START_S + 1e5 / MEMORY), (1e8, START_S + 1e8 / MEMORY)]
    loads = []
    for ranks in (1, 2, 4):
        times = max(1.0, ranks / 2)
        gemm: dict[Dtype, Products] = {"fp32": products(times), "bf16": products(2 * times)}
        loads.append(Load(ranks, gemm, {"fp32": 2e9 / times, "bf16": 1e9 / times}, memory))
    return Table("a machine", device, 80e9, ranks_per_node, loads, [*exchanges, *(more or [])])  # type: ignore[arg-type]


def test_products_are_as_measured_and_between_them() -> None:
    machine = table().machine(1, "fp32")
    for rows, inputs, outputs in itertools.product(ROWS, WIDTHS, WIDTHS):
        seconds = 2.0 * rows * inputs * outputs / rate(rows, inputs, outputs)
        assert machine.gemm_s(rows, inputs, outputs, "fp32") == pytest.approx(seconds)
        assert machine.gemm_s(rows, inputs, outputs, "bf16", count=3) == pytest.approx(6 * seconds)
    # of a power law, lines between logarithms miss nothing
    assert machine.gemm_s(256, 300, 700, "fp32") == pytest.approx(2.0 * 256 * 300 * 700 / rate(256, 300, 700))
    beyond = machine.gemm_s(8192, 4096, 1, "fp32")
    assert beyond == pytest.approx(2.0 * 8192 * 4096 / rate(1024, 2048, 128)), "as fast as the nearest measured"
    assert machine.flops("fp32") == pytest.approx(rate(1024, 2048, 2048)) == pytest.approx(machine.gpu.flops_16)
    with pytest.raises(ValueError, match="products in fp8 were not measured"):
        machine.gemm_s(64, 128, 128, "fp8")


def test_memory_is_as_measured_without_the_start_of_an_operation() -> None:
    machine = table().machine(1, "fp32")
    for moved in (1.0, 1e5, 3e6, 1e9):
        assert machine.memory_s(moved) == pytest.approx(moved / MEMORY)
    assert machine.shares.kernel_s == START_S


def test_a_machine_is_as_busy_as_the_job_makes_it() -> None:
    one, two, three, four = (table().machine(ranks, "fp32").gemm_s(64, 128, 128, "fp32") for ranks in (1, 2, 3, 4))
    assert one == two == pytest.approx(three / 2) == pytest.approx(four / 2)
    assert table().machine(2).gpu.memory == 40e9, "ranks of a CPU share the node's memory"
    assert table("cuda").machine(2).gpu.memory == 80e9


def test_collectives_are_lines_through_the_measured_points() -> None:
    machine = table().machine(4, "fp32")
    for sent in (0.0, 5e4, 1e6, 1e9):
        assert machine.collective_s(sent, 2, 1) == pytest.approx(LATENCY_S + sent / 2 / (BYTES_PER_S / 2))
        assert machine.collective_s(sent, 4, 1) == pytest.approx(3 * LATENCY_S + sent * 3 / 4 / (BYTES_PER_S / 2))
        assert machine.send_s(sent, 2, 4) == pytest.approx(LATENCY_S + sent / (BYTES_PER_S / 2))
    alone = table().machine(2, "fp32")
    assert alone.collective_s(1e6, 2, 1) == pytest.approx(LATENCY_S + 1e6 / 2 / BYTES_PER_S)
    assert alone.collective_s(1e6, 1, 1) == alone.exchange_s(1e6, (2, 8), 1, 1, once=True) == 0
    # one expert of the other rank for each token; both are on one rank with 2 x 1/2 x 3/7
    assert alone.exchange_s(1e6, (2, 8), 2, 1, once=False) == pytest.approx(LATENCY_S + 2e6 / 2 / BYTES_PER_S)
    assert alone.exchange_s(1e6, (2, 8), 2, 1, once=True) == pytest.approx(LATENCY_S + 11 / 7 * 1e6 / 2 / BYTES_PER_S)


def test_larger_groups_are_longer_rings() -> None:
    few = table(ranks_per_node=8)
    assert few.machine(8, "fp32").collective_s(1e6, 8, 1) == pytest.approx(
        7 * LATENCY_S + 1e6 * 7 / 8 / (BYTES_PER_S / 2)
    )


def test_groups_on_several_nodes_have_their_own_measurements() -> None:
    with pytest.raises(ValueError, match="is of one node of 4 ranks, not of 8: run tools/calibrate_machine.py"):
        table().machine(8)
    between: list[Kind] = ["all_gather", "reduce_scatter", "all_to_all", "send"]
    network = [exchange(kind, 2, 4, nodes=2, speed=1e8) for kind in between]
    machine = table(more=network).machine(16)
    assert machine.collective_s(1e6, 2, 4) == pytest.approx(LATENCY_S + 1e6 / 2 / 1e8)
    assert machine.collective_s(1e6, 4, 4) == pytest.approx(3 * LATENCY_S + 1e6 * 3 / 4 / 1e8)
    far, near = LATENCY_S + 1e6 / 1e8, machine.send_s(1e6, 1, 4)
    assert machine.send_s(1e6, 4, 16) == pytest.approx(far)
    assert machine.send_s(1e6, 1, 16) == pytest.approx(far / 4 + near * 3 / 4), "the last of a node's four"


def test_ranks_that_were_measured_alone_are_no_job() -> None:
    alone = Table("a machine", "cpu", 8e9, 1, table().loads[:1], [])
    assert alone.machine(1).collective_s(1e6, 1, 1) == 0
    assert table().machine(2).link_bytes_s == pytest.approx(BYTES_PER_S)
    with pytest.raises(ValueError, match="is of one node of 1 ranks, not of 2"):
        alone.machine(2)


def small(layers: int = 4) -> Decoder:
    layer = Layer(grouped_attention(512, 8, 8, 64), gated_mlp(512, 1024), 1024)
    return Decoder("small", 512, 1024, (layer,), (0,) * layers, final_norm=512)


def test_a_step_is_predicted_from_it() -> None:
    """Two ranks have a core each; four have half of one, so that their products take as long."""
    steps = {}
    for ranks, tensor in ((1, 1), (2, 1), (2, 2), (4, 2)):
        training = Training(
            small(), Layout(tensor=tensor), ranks, 512, 8, precision="fp32", sequence_parallel=tensor > 1
        )
        steps[ranks, tensor] = step_time(training, table().machine(ranks, "fp32"))
    one = steps[1, 1]
    assert one.work.tensor == one.data == 0
    assert steps[2, 1].work.gemm == pytest.approx(one.work.gemm / 2)
    assert steps[2, 2].work.gemm > steps[2, 1].work.gemm, "narrow products are slower"
    assert steps[4, 2].work.gemm == pytest.approx(steps[2, 2].work.gemm)
    assert steps[4, 2].data > steps[2, 2].data
    assert steps[2, 2].seconds > steps[2, 1].seconds > one.seconds / 2


def test_a_bubble_costs_less_where_others_take_its_cores() -> None:
    """Four ranks on two cores: two that wait leave theirs to the others."""
    training = Training(small(), Layout(pipeline=2), 4, 512, 8, precision="fp32")
    shared = table().machine(4, "fp32")
    assert shared.bubble == pytest.approx(0.5)
    assert table().machine(2, "fp32").bubble == 1.0
    alone = step_time(training, replace(shared, bubble=1.0))
    assert step_time(training, shared).bubble == pytest.approx(alone.bubble / 2)
    assert step_time(training, shared).work == alone.work


def test_layouts_are_searched_on_it() -> None:
    found = trainings(Ask(KNOWN["qwen3-0.6b"], table("cuda").machine(4), 4, Work((512,) * 8, 40_000)), Counts())
    assert found[0].seconds > 0
    assert {one.training.layout.tensor for one in found} == {1, 2, 4}


def test_a_table_is_kept_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    write_table(file, table())
    assert read_table(file) == table()
    assert list(tmp_path.iterdir()) == [file]


def test_an_engine_in_a_table_can_be_simulated(tmp_path: Path) -> None:
    engine = {"name": "of it", "kv_tokens": 100, "max_running": 2, "decode": [[1, 10, 0.01], [2, 10, 0.02]]}
    file = tmp_path / "machine.json"
    write_table(file, table())
    with pytest.raises(ValueError, match=r"machine\.json: no table of an engine .* --engine MODEL measures one"):
        measured(file)
    whole = json.loads(file.read_text()) | {"engine": engine}
    file.write_text(json.dumps(whole))
    assert read_table(file).engine == engine
    assert measured(file).decode_s[2] == pytest.approx(0.02)


def changed(*path: Any, value: Any) -> Any:
    def change(whole: Any) -> None:
        inner = whole
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (changed("loads", value=[]), r"Expected `array` of length >= 1 - at `\$.loads`"),
        (changed("device", value="tpu"), r"Invalid enum value 'tpu' - at `\$.device`"),
        (changed("speed", value=1), "unknown field `speed`"),
        (changed("loads", 1, "gemm", "fp32", "seconds", value=[1.0]), r"1 seconds of 18 products - at `\$.loads"),
        (changed("loads", 0, "gemm", "fp32", "seconds", 3, value=-1.0), "Expected `float` > 0.0"),
        (changed("loads", 0, "gemm", "fp32", "rows", value=[64, 64]), "sizes rise, these do not: 64, 64"),
        (changed("loads", 0, "attention", value={"bf16": 1.0}), "no attention in fp32"),
        (changed("exchanges", 0, "points", value=[[10, 1], [5, 1]]), "sizes rise, these do not: 10, 5"),
        (changed("exchanges", 0, "ranks", value=1), "Expected `int` >= 2"),
    ],
)
def test_bad_tables_are_refused_in_words(change: Any, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    write_table(file, table())
    whole = json.loads(file.read_text())
    change(whole)
    file.write_text(json.dumps(whole))
    with pytest.raises(ValueError, match=rf"machine\.json: no table of a machine: .*{complaint}"):
        read_table(file)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"machine\.json: No such file or directory; tools/calibrate_machine.py"):
        read_table(tmp_path / "machine.json")
    (tmp_path / "machine.json").write_text("{")
    with pytest.raises(ValueError, match=r"machine\.json: no table of a machine: Input data was truncated"):
        read_table(tmp_path / "machine.json")


ENGINE = {"kv_tokens": 50_000, "max_running": 64, "decode": [[1, 100, 0.01], [64, 100, 0.05]]}


def test_engines_have_memory_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 7 GB each: on GPUs, CUDA's contexts and graphs leave none; processes of a CPU have no such things."""
    file = tmp_path / "machine"
    work = ["--model", "qwen3-0.6b", "--stage", "grpo", "batch.prompts=4", "rollout.max_new_tokens=64"]
    given = ["tune_layout", "--gpu", str(file), *work, "--fix", "train_ranks=4", "--json"]
    monkeypatch.setattr("sys.argv", given)
    node = table("cuda", ranks_per_node=8)
    write_table(file, msgspec.structs.replace(node, memory=7e9, engine=ENGINE))
    with pytest.raises(SystemExit, match="training alone fits on 4 GPUs"):
        tune_layout.main()
    write_table(file, msgspec.structs.replace(node, device="cpu", memory=8 * 7e9, engine=ENGINE))
    tune_layout.main()
    assert all(row["engines"]["fraction"] > 0.5 for row in json.loads(capsys.readouterr().out))


def test_the_tuner_takes_a_measured_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its engine, too; a step on more ranks than cores is no faster."""
    write_table(tmp_path / "machine.json", msgspec.structs.replace(table(), engine=ENGINE))
    seconds = []
    for nodes in ("2", "4"):
        arguments = ["--gpu", str(tmp_path / "machine.json"), "--gpus-per-node", nodes, "--model", "qwen3-0.6b"]
        work = ["--stage", "grpo", "batch.prompts=4", "batch.group_size=8", "rollout.max_new_tokens=64"]
        monkeypatch.setattr("sys.argv", ["tune_layout", *arguments, *work, "--json"])
        tune_layout.main()
        found = json.loads(capsys.readouterr().out)
        assert {row["engines"]["tensor"] for row in found} == {1}
        seconds.append(next(row["phases_s"]["update"] for row in found if row["layout"]["tensor"] == 1))
    assert seconds[1] > 0.95 * seconds[0], "two cores, of which four ranks have no more; half were there four"
