"""Convert checkpoints between Hugging Face directories and Megatron's distributed checkpoints, exactly.

import  HF_DIRECTORY TARGET    make a Megatron checkpoint
export  CHECKPOINT TARGET      make a Hugging Face directory
verify  FIRST SECOND           compare two, name by name and bit by bit
inspect DIRECTORY              say what a directory is

A checkpoint may be a Hugging Face directory, a Megatron one saved at any layout, RUN/checkpoints/step_N of a training
run, or RUN itself, which means its newest. No GPU is needed, and memory for a few tensors. The result appears under its
name only when it is whole; after a kill, the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from megarl.config import RecipeError
from megarl.observe import show_transfer
from megarl.runtime import die_with_parent
from megarl.weights import HfSource, Progress, Source, compare, convert, describe, find_place, open_source

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tiktoken.model")
_TEXT_TOKENS = 512  # that the logits are compared on


def main() -> int:
    """0: done, or equal; 1: refused or failed, or different; 130: interrupted."""
    arguments = _parser().parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    console = Console(stderr=True)
    try:
        result = int(arguments.run(arguments, console))
        sys.stdout.flush()
        return result
    except RecipeError as error:
        return _fail(console, str(error))
    except BrokenPipeError:  # nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(console, f"{error.filename or 'output'}: {error.strerror}; give a path that can be used")
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on where it was", highlight=False)
        return 130


def _fail(console: Console, message: str) -> int:
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)  # names may have any characters
    console.print(f"error: {line}", markup=False, highlight=False, soft_wrap=True)
    return 1


def _convert(arguments: argparse.Namespace, console: Console) -> int:
    source = _open(arguments.source, arguments.config, console)
    if not _has_tokenizer(source):
        console.print(f"warning: no tokenizer in {source.config}, so that the result will have none", soft_wrap=True)
    target = Path(os.path.abspath(arguments.target))
    with show_transfer(arguments.command, console) as show:
        convert(
            source,
            target,
            to="megatron" if arguments.command == "import" else "hf",
            overwrite=arguments.overwrite,
            file_bytes=arguments.max_file_size,
            say=partial(console.print, highlight=False, soft_wrap=True),
            **_in_parallel(arguments, show),
        )
    console.print(f"{target} is whole", highlight=False, soft_wrap=True)
    return 0


def _verify(arguments: argparse.Namespace, console: Console) -> int:
    sources = [_open(path, arguments.config, console) for path in (arguments.first, arguments.second)]
    tokens = _tokens(sources, arguments.logits) if arguments.logits else None
    with show_transfer("verify", console) as show:
        lines = compare(*sources, **_in_parallel(arguments, show))
    for line in lines:
        print(line)
    print("different" if lines else "equal: the same names, dtypes and bits")
    if tokens is not None:
        print(f"largest difference of logits: {_logit_difference(sources, tokens):.3g}")
    return 1 if lines else 0


def _inspect(arguments: argparse.Namespace, console: Console) -> int:
    about = describe(find_place(arguments.directory, arguments.config))
    for label, value in about.items():
        print(f"{label:<14} {value}")
    return 0


def _open(directory: Path, config: Path | None, console: Console) -> Source:
    source = open_source(directory, config)
    if source.ignored:
        names = f"{source.ignored[0]} and {len(source.ignored) - 1} more like it"
        console.print(f"{directory}: ignoring {names}, which are computed from config.json", soft_wrap=True)
    return source


def _has_tokenizer(source: Source) -> bool:
    return any((source.config / name).exists() for name in _TOKENIZERS)


def _in_parallel(arguments: argparse.Namespace, show: Callable[[int, int, int], None]) -> dict[str, Any]:
    def progress(now: Progress) -> None:
        show(now.done, now.total, now.before)

    # a worker must not outlive a killed parent, and go on writing beside the next attempt
    return {
        "workers": arguments.workers,
        "worker_start": partial(die_with_parent, os.getpid()),
        "progress": progress,
    }


def _tokens(sources: list[Source], text: Path) -> Any:
    """The first tokens of a text, by the tokenizer of the first checkpoint that has one."""
    from transformers import AutoTokenizer

    source = next((source for source in sources if _has_tokenizer(source)), None)
    if source is None:
        raise RecipeError("--logits: neither checkpoint has a tokenizer with it; put one beside config.json")
    try:
        tokens = AutoTokenizer.from_pretrained(source.config)(text.read_text(), return_tensors="pt").input_ids
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"--logits: cannot read {text}: {error!r:.120}; expected a text file") from None
    if not tokens.numel():
        raise RecipeError(f"--logits: {text} has no tokens; expected a text file that is not empty")
    return tokens[:, :_TEXT_TOKENS]


def _logit_difference(sources: list[Source], tokens: Any) -> float:
    """The largest absolute difference of what the models' heads say of these tokens, in float32."""
    import torch
    import transformers

    heads, sizes = [source.shape.head.name for source in sources], [source.shape.vocab for source in sources]
    if heads[0] != heads[1] or sizes[0] != sizes[1]:
        raise RecipeError(
            f"--logits: a {heads[0]} with {sizes[0]} tokens and a {heads[1]} with {sizes[1]} cannot be compared;"
            " expected the same head and vocabulary"
        )
    auto = {
        "policy": transformers.AutoModelForCausalLM,
        "critic": transformers.AutoModelForTokenClassification,
        "reward": transformers.AutoModelForSequenceClassification,
    }[heads[0]]
    logits = []
    for source in sources:
        with tempfile.TemporaryDirectory() as scratch:
            directory = source.directory
            # transformers multiplies FP8 with its scales in another precision
            if not isinstance(source, HfSource) or source.reader.quantized:
                directory = Path(scratch) / "hf"
                convert(source, directory, to="hf", workers=1)
            model = auto.from_pretrained(directory, dtype=torch.float32)
        with torch.no_grad():
            logits.append(model(tokens).logits)
    return float((logits[0] - logits[1]).abs().max())


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def command(name: str, about: str, run: Callable[[argparse.Namespace, Console], int]) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=about, description=about)
        one.set_defaults(run=run)
        one.add_argument(
            "--config",
            type=Path,
            metavar="HF_DIRECTORY",
            help="config.json and tokenizer of a Megatron checkpoint that has none with it (`import` puts them there,"
            " and a training run remembers its model)",
        )
        return one

    for name, about in (("import", "make a Megatron checkpoint"), ("export", "make a Hugging Face directory")):
        one = command(name, about, _convert)
        one.add_argument("source", type=Path, help="the checkpoint to read")
        one.add_argument("target", type=Path, help="the directory to make")
        one.add_argument("--overwrite", action="store_true", help="replace the target if it exists")
        one.add_argument(
            "--max-file-size",
            type=_bytes,
            default="4GB",
            metavar="SIZE",
            help="of a Hugging Face directory's weight files, such as 500MB (default 4GB)",
        )
        _add_workers(one)
    one = command("verify", "compare two checkpoints of any kind; exit code 1 if they differ", _verify)
    one.add_argument("first", type=Path)
    one.add_argument("second", type=Path)
    one.add_argument(
        "--logits", type=Path, metavar="TEXT_FILE", help="also run both on this text, and print how far logits differ"
    )
    _add_workers(one)
    one = command("inspect", "say what a directory is: family, parameters, dtypes, layout, step", _inspect)
    one.add_argument("directory", type=Path)
    return parser


def _add_workers(parser: argparse.ArgumentParser) -> None:
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=_count, default=cores, help=f"processes (default: one a core, {cores} here)")


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes; expected 1 or more")
    return int(text)


def _bytes(text: str) -> int:
    units = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
    match = re.fullmatch(r"(\d+)\s*([KMG]B)?", text.upper())
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; expected a whole number and KB, MB or GB, such as 500MB"
        )
    return int(match[1]) * units[match[2] or ""]


if __name__ == "__main__":
    sys.exit(main())
