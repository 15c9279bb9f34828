"""How fast checkpoints are converted, beside a plain copy of the same bytes, and in how much memory.

    .venv/bin/python tools/bench/convert.py [--quick]

makes a random model of 2.2 GB (--quick: 0.6 GB) with a large vocabulary, and in turn copies it, imports it and exports
what was imported, several times. Copies and conversions read files that are in the page cache, write to the same disk,
and end when all is on it (fsync); what was written before is flushed first. The seconds of a conversion are those that
the tool prints, without the start of Python and torch. A ratio is the copy's median seconds over the conversion's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from megarl.config import read_model_shape
from megarl.weights import HfWriter, hf_specs, model_parameters

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools/convert_checkpoint.py"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_669,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
_START_S = 3.0
"""A copy waits as long as a conversion takes to start: a virtual machine gives freed memory back to its host meanwhile,
and getting it again is slow."""
QUICK = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model, under a minute on two cores")
    parser.add_argument("--scratch", type=Path, help="where to write (default: the system's directory for such files)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        source = Path(scratch) / "source"
        config = CONFIG | (QUICK if arguments.quick else {})
        # in a process of its own: what this one has held counts as the peak of all that it starts
        with ProcessPoolExecutor(1) as pool:
            largest = pool.submit(write_random_model, source, config).result()
        total = sum(path.stat().st_size for path in source.iterdir())
        print(f"model: {total / 1e9:.2f} GB, largest tensor {largest / 1e6:.0f} MB; {os.cpu_count()} cores")
        seconds, rss = measure(source, Path(scratch), repeats=3 if arguments.quick else 5)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        each = ", ".join(f"{value:.2f}" for value in values)
        print(f"{name:<6} median {medians[name]:.2f} s, {total / medians[name] / 1e9:.2f} GB/s ({each})")
    ratios = {name: medians["copy"] / medians[name] for name in ("import", "export")}
    print(
        f"import_ratio={ratios['import']:.2f} export_ratio={ratios['export']:.2f} rss_mb={rss / 1e6:.0f}"
        f" largest_mb={largest / 1e6:.0f}"
    )


def write_random_model(directory: Path, config: dict[str, object]) -> int:
    """Returns the bytes of the largest tensor."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    specs = hf_specs(model_parameters(read_model_shape(directory), 1), lambda parameter: torch.bfloat16)
    writer = HfWriter(directory, specs)
    writer.create()
    for name, spec in specs.items():
        writer.write(name, torch.randn(spec.shape).bfloat16())
    writer.finish()
    return max(spec.nbytes for spec in specs.values())


def measure(source: Path, scratch: Path, repeats: int) -> tuple[dict[str, list[float]], int]:
    """Seconds of each of `repeats` rounds, in which all take turns, and the peak of the conversions' processes."""
    peak = 0
    seconds: dict[str, list[float]] = {"copy": [], "import": [], "export": []}
    imported, exported, copied = (scratch / name for name in ("imported", "exported", "copied"))
    for _ in range(repeats):
        seconds["copy"].append(copy(source, copied))
        for command, start, end in (("import", source, imported), ("export", imported, exported)):
            took, held = convert(command, start, end)
            seconds[command].append(took)
            peak = max(peak, held)
        for path in source.iterdir():
            assert path.suffix != ".safetensors" or same_tensors(path, exported / path.name)
    return seconds, peak


def copy(source: Path, target: Path) -> float:
    prepare(source, target)
    time.sleep(_START_S)
    begin = time.perf_counter()
    target.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)
        with (target / path.name).open("rb") as file:
            os.fsync(file.fileno())
    return time.perf_counter() - begin


def convert(command: str, source: Path, target: Path) -> tuple[float, int]:
    """Seconds, and the bytes of the largest process at its peak."""
    prepare(source, target)
    arguments = [sys.executable, str(TOOL), command, str(source), str(target)]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(arguments, stderr=said, env=os.environ | {"PYTHONPATH": str(ROOT)})
        _, process.returncode, usage = os.wait4(process.pid, 0)
        said.seek(0)
        text = said.read()
    match = re.search(rf"^{command}: .* in ([\d.]+) s", text, re.MULTILINE)
    if process.returncode or match is None:
        raise SystemExit(f"{' '.join(arguments)} ended with {process.returncode}:\n{text}")
    return float(match[1]), usage.ru_maxrss * 1024


def prepare(source: Path, target: Path) -> None:
    """Have no target, the source's files in the page cache, and nothing in it that waits to be written."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    for path in source.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def same_tensors(first: Path, second: Path) -> bool:
    with first.open("rb") as a, second.open("rb") as b:
        while True:
            one, other = a.read(1 << 24), b.read(1 << 24)
            if one != other:
                return False
            if not one:
                return True


if __name__ == "__main__":
    main()
