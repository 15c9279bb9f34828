#!/usr/bin/env python
"""Peak memory and seconds of the log-probabilities of one micro-batch, forward and backward, chunked and naive.

    python tools/bench/logprob_memory.py             8,192 tokens, hidden size 1,024: some minutes on a CPU
    python tools/bench/logprob_memory.py --quick     1,024 tokens, hidden size 256: under a minute

Both over a vocabulary of 151,936. Chunked is megarl's `token_logprobs`; naive makes all logits in float32, and takes
log_softmax, gather and the entropy of them. Both differentiate the sum of log-probabilities and entropies with respect
to hidden states and weight. Each runs in a process of its own: on a GPU, if there is one, in bfloat16, with the peak
that PyTorch's allocator reports; otherwise in float32 on all cores, with the peak of the resident set less what it was
before the inputs were made. The limit is what any method must hold: weight, hidden states, and the gradients of both.

Where the naive one does not fit into the memory that is free, its numbers are extrapolated, the memory on a line
through two smaller sizes and the seconds in proportion, and the headline says `naive_extrapolated=1`. The memory is
then a lower bound: the peak is the largest of several moments' needs, each a line, and with more tokens a steeper one
may overtake.

Seconds are of a single pass: on a machine that others use, run it again before believing their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Literal

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

VOCAB = 151_936
GIB = 1 << 30

NAIVE_BUFFERS = 6
"""Buffers of tokens x vocabulary in float32 to have room for: the naive method needs 5 at once."""

FREE_SHARE = 0.8
"""Of the free memory that may be used: others use the machine as well."""

Method = Literal["chunked", "naive"]


@dataclass(frozen=True)
class Measured:
    """`gradient` and `loss` are there to see that both methods computed the same."""

    peak_bytes: float
    seconds: float
    loss: float
    gradient: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer tokens and a smaller hidden size: under a minute")
    parser.add_argument("--tokens", type=int, help="instead of the size's own")
    parser.add_argument("--hidden", type=int, help="hidden size, instead of the size's own")
    parser.add_argument("--only", choices=["chunked", "naive"], help="measure this one here and print it as JSON")
    args = parser.parse_args()
    tokens = args.tokens or (1024 if args.quick else 8192)
    hidden = args.hidden or (256 if args.quick else 1024)
    if args.only:
        print(json.dumps(asdict(measure(args.only, tokens, hidden))))
        return
    print(f"{tokens} tokens, vocabulary {VOCAB}, hidden size {hidden}, on {device()} in {dtype()}", flush=True)
    chunked = in_own_process("chunked", tokens, hidden)
    most = most_naive_tokens(hidden)
    if most < 2:
        sys.exit(f"{free_bytes() / GIB:.1f} GiB of free memory do not hold the naive method even for 2 tokens")
    if tokens <= most:
        naive = in_own_process("naive", tokens, hidden)
        print(f"loss {naive.loss:.6g} and {chunked.loss:.6g}, gradient {naive.gradient:.6g} and {chunked.gradient:.6g}")
    else:
        naive = extrapolated(tokens, most, hidden)
    report(chunked, naive, tokens, hidden, tokens > most)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dtype() -> torch.dtype:
    return torch.bfloat16 if device().type == "cuda" else torch.float32


def limit_bytes(tokens: int, hidden: int) -> int:
    """Weight, hidden states, and the gradients of both."""
    return 2 * (VOCAB + tokens) * hidden * dtype().itemsize


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if device().type == "cuda" else psutil.virtual_memory().available


def most_naive_tokens(hidden: int) -> int:
    """For how many tokens the naive method surely fits, as a power of 2."""
    room = free_bytes() * FREE_SHARE - limit_bytes(0, hidden)
    tokens = int(room / (NAIVE_BUFFERS * 4 * VOCAB + 2 * hidden * dtype().itemsize))
    return 1 << tokens.bit_length() - 1 if tokens > 0 else 0


def in_own_process(method: Method, tokens: int, hidden: int) -> Measured:
    command = [
        sys.executable,
        "-W",
        "ignore",
        __file__,
        "--only",
        method,
        "--tokens",
        str(tokens),
        "--hidden",
        str(hidden),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"the {method} method at {tokens} tokens ended with {done.returncode}; -9 means out of memory")
    result = Measured(**json.loads(done.stdout.splitlines()[-1]))
    print(f"{method}, {tokens} tokens: {result.peak_bytes / GIB:.3f} GiB, {result.seconds:.2f} s", flush=True)
    return result


def extrapolated(tokens: int, most: int, hidden: int) -> Measured:
    """Bytes on the line through the most tokens that fit and half as many; seconds in proportion to the tokens."""
    print(f"naive does not fit: {free_bytes() / GIB:.1f} GiB are free; EXTRAPOLATED from {most // 2} and {most} tokens")
    small, large = (in_own_process("naive", count, hidden) for count in (most // 2, most))
    steps = (tokens - most) / (most - most // 2)
    return Measured(
        peak_bytes=large.peak_bytes + steps * (large.peak_bytes - small.peak_bytes),
        seconds=large.seconds * tokens / most,
        loss=float("nan"),
        gradient=float("nan"),
    )


def measure(method: Method, tokens: int, hidden_size: int) -> Measured:
    from megarl.model_engine import token_logprobs  # here: it takes seconds, and --help needs none of it

    torch.set_num_threads(os.cpu_count() or 1)
    backend = "nccl" if device().type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    before = psutil.Process().memory_info().rss
    torch.manual_seed(0)
    weight = torch.empty(VOCAB, hidden_size, dtype=dtype(), device=device()).normal_(std=hidden_size**-0.5)
    hidden = torch.empty(tokens, hidden_size, dtype=dtype(), device=device()).normal_()
    targets = torch.randint(VOCAB, (tokens,), device=device())
    weight.requires_grad_()
    hidden.requires_grad_()

    def once(count: int) -> tuple[float, float]:
        weight.grad = hidden.grad = None
        start, states, wanted = time.perf_counter(), hidden[:count], targets[:count]
        if method == "naive":
            logprobs, entropies = naive_logprobs(states, weight, wanted)
        else:
            logprobs, entropies = token_logprobs(states, weight, wanted, vocab=VOCAB, temperature=1.0, group=group)
        loss = (logprobs + entropies).sum()
        loss.backward()
        value = loss.item()  # waits for a GPU's forward pass only
        if device().type == "cuda":
            torch.cuda.synchronize()
        return value, time.perf_counter() - start

    once(min(tokens, 8))  # libraries load and choose their kernels
    if device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    loss, seconds = once(tokens)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before  # Linux counts in KiB
    if device().type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    assert weight.grad is not None
    return Measured(peak, seconds, loss, float(weight.grad.norm()))


def naive_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax((hidden @ weight.T).float(), -1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def report(chunked: Measured, naive: Measured, tokens: int, hidden: int, is_extrapolated: bool) -> None:
    if is_extrapolated:
        print(f"naive, {tokens} tokens, EXTRAPOLATED: {naive.peak_bytes / GIB:.3f} GiB, {naive.seconds:.2f} s")
    limit = limit_bytes(tokens, hidden)
    figures = {
        "chunked_gib": f"{chunked.peak_bytes / GIB:.3f}",
        "naive_gib": f"{naive.peak_bytes / GIB:.3f}",
        "naive_extrapolated": str(int(is_extrapolated)),
        "memory_ratio": f"{naive.peak_bytes / chunked.peak_bytes:.2f}",
        "limit_gib": f"{limit / GIB:.3f}",
        "chunked_over_limit": f"{chunked.peak_bytes / limit:.2f}",
        "chunked_s": f"{chunked.seconds:.2f}",
        "naive_s": f"{naive.seconds:.2f}",
        "seconds_ratio": f"{chunked.seconds / naive.seconds:.2f}",
    }
    print(" ".join(f"{name}={value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
