"""Training steps of a small model at several layouts, measured and predicted: is the predicted order the real one?

    python tools/bench/layout_order.py             12 layouts on up to 4 ranks: some minutes
    python tools/bench/layout_order.py --quick     6 of them, fewer steps: about a minute on 2 quiet cores

Four real Megatron ranks on the CPU in float32 first measure the machine (tools/calibrate_machine.py): products, memory,
collectives, while 1, 2 and 4 ranks do so at once. Then as many of them as a layout needs take whole training steps of
a random Llama model. `megarl.layout` predicts these from the machine's table and the model's sizes alone; nothing is
fitted to a measured step.

Columns:
  measured    seconds of a step, the least after a first one, as whatever else runs can only add to it
  median, most  of those steps
  predicted   seconds;  error: of them, relative to the measured ones
  where       what most of the predicted seconds go to

Pairs are separated if one layout takes at least a quarter longer than the other. The exit code is 1 if the prediction
has any of those pairs the wrong way round.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megarl.config import Layout, read_model_shape  # noqa: E402
from megarl.layout import MEGARL_CPU, Step, Table, Training, decoder, read_table, step_time  # noqa: E402
from tests.distributed.launch import started  # noqa: E402 - it leaves no process behind
from tests.distributed.layout_order import Case, Measured, Plan  # noqa: E402
from tools.bench.layout_accuracy import spearman  # noqa: E402

CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
}
CASES = {
    "1 rank": Case(1, {}),
    "1 rank, recompute": Case(1, {"recompute": "full"}),
    "tp2": Case(2, {"tensor": 2}),
    "pp2": Case(2, {"pipeline": 2}),
    "dp2": Case(2, {}),
    "tp4": Case(4, {"tensor": 4}),
    "cp2": Case(2, {"context": 2}),
    "dp2, recompute": Case(2, {"recompute": "full"}),
    "pp2, two at once": Case(2, {"pipeline": 2}, micro_batch=2),
    "tp2 dp2": Case(4, {"tensor": 2}),
    "pp2 dp2": Case(4, {"pipeline": 2}),
    "dp4": Case(4, {}),
}
QUICK = 6
"""The first ones."""
SEQUENCES, TOKENS = 4, 512
SEPARATED = 1.25
QUIET = 0.1
LIMIT_S = 900.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} layouts, 2 steps of each")
    parser.add_argument("--table", type=Path, metavar="FILE", help="keep the machine's table")
    arguments = parser.parse_args()
    cases = dict(itertools.islice(CASES.items(), QUICK)) if arguments.quick else CASES
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        write_model(model)
        steps, interval_s = (2, 0.004) if arguments.quick else (7, 0.03)
        measured, others, table = measure(model, cases, steps, interval_s, Path(directory))
        if arguments.table is not None:
            arguments.table.write_bytes((Path(directory) / "table.json").read_bytes())
        predicted = {name: predict(model, case, table) for name, case in cases.items()}
    if others > QUIET:
        print(f"other programs had {others:.0%} of the cores: seconds are theirs as much as the layouts'")
    return report(measured, predicted)


def write_model(path: Path) -> None:
    import torch  # here: they take seconds, and --help needs none of it
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).float().save_pretrained(path)


def measure(
    model: Path, cases: dict[str, Case], steps: int, interval_s: float, directory: Path
) -> tuple[dict[str, list[float]], float, Table]:
    plan = Plan(model, cases, SEQUENCES, TOKENS, steps, interval_s, directory)
    plan.write(directory / "plan.json")
    ranks = max(case.ranks for case in cases.values())
    payload = "tests.distributed.payload_layout_order"
    with started("mpirun", ranks, payload, directory / "plan.json", log=directory / "log") as launch:
        if launch.wait(LIMIT_S):
            sys.exit(launch.output()[-6000:])
    measured = Measured.read(directory / "measured.json")
    return measured.seconds, measured.others, read_table(directory / "table.json")


def predict(model: Path, case: Case, table: Table) -> Step:
    layout = Layout.model_validate(case.layout)
    training = Training(
        decoder(read_model_shape(model)),
        layout,
        case.ranks,
        TOKENS,
        SEQUENCES,
        case.micro_batch,
        precision="fp32",
        sequence_parallel=layout.tensor > 1,
        software=MEGARL_CPU,
    )
    return step_time(training, table.machine(case.ranks, "fp32"))


def report(measured: dict[str, list[float]], steps: dict[str, Step]) -> int:
    """Print the table and the headline; returns the exit code."""
    print(f"{'layout':20}{'ranks':>6}{'measured':>10}{'median':>8}{'most':>8}{'predicted':>11}{'error':>8}  where")
    least = {name: min(seconds) for name, seconds in measured.items()}
    errors = {name: steps[name].seconds / least[name] - 1 for name in least}
    for name in sorted(least, key=lambda one: least[one]):
        print(
            f"{name:20}{CASES[name].ranks:6}{least[name]:10.3f}{statistics.median(measured[name]):8.3f}{max(measured[name]):8.3f}"
            f"{steps[name].seconds:11.3f}{errors[name]:8.1%}  {largest(steps[name])}"
        )
    pairs = [(a, b) for a, b in itertools.permutations(least, 2) if least[b] >= SEPARATED * least[a]]
    wrong = [(a, b) for a, b in pairs if steps[b].seconds <= steps[a].seconds]
    for faster, slower in wrong:
        print(f"wrong: {faster} is faster than {slower}")
    correlation = spearman([least[name] for name in least], [steps[name].seconds for name in least])
    sizes = [abs(error) for error in errors.values()]
    print(
        f"layouts={len(least)} separated_pairs={len(pairs)} right={len(pairs) - len(wrong)}"
        f" rank_correlation={correlation:.3f} error_median={statistics.median(sizes):.3f} error_max={max(sizes):.3f}"
    )
    return 1 if wrong else 0


def largest(step: Step) -> str:
    parts = asdict(step.work) | {name: value for name, value in vars(step).items() if name != "work"}
    names = sorted((name for name in parts if parts[name] > 0.01 * step.seconds), key=lambda name: -parts[name])
    return ", ".join(f"{name} {parts[name]:.2f}" for name in names[:5])


if __name__ == "__main__":
    sys.exit(main())
