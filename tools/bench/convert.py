"""How fast checkpoints are converted, beside a plain copy of the same bytes, and in how much memory.

    .venv/bin/python tools/bench/convert.py [--quick] [--mbridge]

makes a random model of 2.2 GB (--quick: 0.75 GB) with a large vocabulary, and in turn copies it, imports it and exports
what was imported, several times. Copies and conversions read files that are in the page cache, write to the same disk,
and end when all is on it (fsync); what was written before is flushed first. The seconds of a conversion are those that
the tool prints, without the start of Python and torch. A ratio is the copy's median seconds over the conversion's.

--mbridge has mbridge take turns too, on the same files and cores. What it does is not quite the same: its import fills
a Megatron model in memory (made before the clock starts) and writes nothing, and its export starts from that model and
reads nothing. It has one process, with a thread a core, whose peak includes the model and all tensors of the source.
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
MBRIDGE = "mbridge==0.15.1"
MBRIDGE_PATH = ROOT / f".venv-{MBRIDGE}"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
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
"""A copy waits about as long as a conversion takes to start, so that all begin equally long after the one before."""
QUICK = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer rounds")
    parser.add_argument("--scratch", type=Path, help="where to write (default: the system's directory for such files)")
    parser.add_argument("--mbridge", action="store_true", help="beside mbridge, which is downloaded once")
    arguments = parser.parse_args()
    if arguments.mbridge and not MBRIDGE_PATH.exists():
        # it works with our versions of all that it needs, and nothing else should see it
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", MBRIDGE_PATH]
        subprocess.run([*pip, MBRIDGE], check=True)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        source = Path(scratch) / "source"
        config = CONFIG | (QUICK if arguments.quick else {})
        # in a process of its own: what this one has held counts as the peak of all that it starts
        with ProcessPoolExecutor(1) as pool:
            largest = pool.submit(write_random_model, source, config).result()
        total = sum(path.stat().st_size for path in source.iterdir())
        print(f"model: {total / 1e9:.2f} GB, largest tensor {largest / 1e6:.0f} MB; {os.cpu_count()} cores")
        seconds, rss = measure(source, Path(scratch), arguments.mbridge, repeats=3 if arguments.quick else 5)
    width = max(map(len, seconds))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        each = ", ".join(f"{value:.2f}" for value in values)
        print(f"{name:<{width}} median {medians[name]:.2f} s, {total / medians[name] / 1e9:.2f} GB/s ({each})")
    results = {f"{name}_ratio": f"{medians['copy'] / medians[name]:.2f}" for name in seconds if name != "copy"}
    results |= {name: f"{peak / 1e6:.0f}" for name, peak in (*rss.items(), ("largest_mb", largest))}
    print(*(f"{name}={value}" for name, value in results.items()))


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


def measure(source: Path, scratch: Path, mbridge: bool, repeats: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of each of `repeats` rounds, in which all take turns, and the peaks of the conversions' processes."""
    imported, exported, copied, bridged = (scratch / name for name in ("imported", "exported", "copied", "bridged"))
    turns = [
        ("rss_mb", ["import"], [TOOL, "import"], source, imported),
        ("rss_mb", ["export"], [TOOL, "export"], imported, exported),
    ]
    if mbridge:
        script = ROOT / "tools/bench/mbridge_convert.py"
        turns.append(("mbridge_rss_mb", ["mbridge_import", "mbridge_export"], [script], source, bridged))
    peaks: dict[str, int] = {}
    seconds: dict[str, list[float]] = {"copy": []}
    for _ in range(repeats):
        seconds["copy"].append(copy(source, copied))
        for peak, names, command, start, end in turns:
            prepare(start, end)
            text, held = run(*command, start, end)
            peaks[peak] = max(peaks.get(peak, 0), held)
            for name in names:
                took = re.search(rf"^{name}: .* in ([\d.]+) s", text, re.MULTILINE)
                assert took, text
                seconds.setdefault(name, []).append(float(took[1]))
        for path in source.iterdir():
            assert path.suffix != ".safetensors" or same_tensors(path, exported / path.name)
        if mbridge:
            run(TOOL, "verify", source, bridged)  # by name: it writes them in another order
    return seconds, peaks


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


def run(*command: str | Path) -> tuple[str, int]:
    """What a script says, and the bytes of its largest process at its peak."""
    arguments = [sys.executable, *map(str, command)]
    with tempfile.TemporaryFile("w+") as said:
        path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{MBRIDGE_PATH}"}
        process = subprocess.Popen(arguments, stdout=said, stderr=said, env=os.environ | path)
        _, process.returncode, usage = os.wait4(process.pid, 0)
        said.seek(0)
        text = said.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {process.returncode}:\n{text}")
    return text, usage.ru_maxrss * 1024


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
