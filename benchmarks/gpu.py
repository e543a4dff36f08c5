"""What the GPU benchmarks share: how time and errors are measured, and how results are written.

Shapes: B batch rows, K KV heads, H query heads, D head_dim, T tokens.

Times are of CUDA graphs over rotating buffers (so that L2 holds none of them), contenders taking turns, medians. Without a GPU
Triton's interpreter runs the kernels: scripts can be tried with tiny shapes, and times mean nothing.
"""
# ruff: noqa: E402 - the interpreter must be chosen before any kernel is imported

import csv
import gc
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import transformers
import triton
import triton.language as tl

from kvcompile.codec import LayerCache
from kvcompile.kernels.triton_operands import loop_end

Call = Callable[[], object]
L2_BYTES = 60 << 20
_CALLS = 16
"""Fewest calls in a graph, so that the start of a replay does not show."""


def copies(nbytes: int) -> int:
    """Copies of a buffer that together are four times L2; at least two."""
    return max(2, math.ceil(4 * L2_BYTES / max(nbytes, L2_BYTES // 16)))


def in_turns(
    contenders: Mapping[str, Sequence[Call]], *, rounds: int = 9, replays: int = 4, calls: int = _CALLS
) -> tuple[dict[str, float], dict[str, str]]:
    """Median microseconds of one call of each contender, and why those failed that cannot run here.

    Each is a list of calls on buffers of their own, repeated to at least `calls` and captured into one graph.
    """
    if DEVICE == "cpu":  # the interpreter is slow, and its times mean nothing
        contenders, rounds, calls = {name: sequence[:1] for name, sequence in contenders.items()}, 1, 1
    found: dict[str, tuple[Call, int]] = {}
    failed: dict[str, str] = {}
    for name, sequence in contenders.items():
        repeated = [*sequence] * math.ceil(calls / len(sequence))
        try:
            found[name] = captured(repeated), len(repeated)
        except Exception as error:  # a baseline may be absent on this GPU
            failed[name] = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            print(f"    {name} failed: {failed[name]}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, (replay, count) in found.items():
            times[name].append(elapsed_us(replay, replays) / count)
    return {name: statistics.median(values) for name, values in times.items()}, failed


def captured(calls: Sequence[Call]) -> Call:
    """All calls as one: the replay of a CUDA graph. Without CUDA, the calls themselves."""

    def run() -> None:
        for call in calls:
            call()

    if DEVICE == "cpu":
        calls[0]()
        return run
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def elapsed_us(call: Call, times: int = 1) -> float:
    """Microseconds of one call among `times` in a row, on the device's clock."""
    if DEVICE == "cpu":
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e6
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / times


def microseconds(calls: list[Call], replays: int = 20) -> float:
    """Median time of one call; the calls, each on buffers of its own, are captured into one graph of at least 8."""
    calls = calls * math.ceil(8 / len(calls))
    replay = captured(calls)
    return statistics.median(elapsed_us(replay) / len(calls) for _ in range(replays))


@triton.jit
def _read_kernel(x_ptr, out_ptr, num_words, BLOCK: tl.constexpr):
    """Sum of every num_programs-th block of 32-bit words."""
    step = tl.num_programs(0) * BLOCK
    first = tl.program_id(0) * BLOCK
    sums = tl.zeros([BLOCK], tl.int32)
    for i in tl.range(0, loop_end((num_words - first - 1) // step + 1)):
        word = first + i * step + tl.arange(0, BLOCK)
        sums += tl.load(x_ptr + word, mask=word < num_words, other=0)
    tl.store(out_ptr + tl.program_id(0), tl.sum(sums, axis=0))


def reads(nbytes: int) -> dict[str, list[Call]]:
    """Contenders that read as many bytes and do nothing else: one block of words per program, or few programs that loop."""
    words = max(nbytes // 64 * 16, 16)  # a multiple of 16 lets Triton read 16 bytes at once
    buffers = [torch.empty(words, dtype=torch.int32, device=DEVICE).random_() for _ in range(copies(nbytes))]

    def call(x: Tensor, programs: int, block: int, out: Tensor) -> None:
        _read_kernel[(programs,)](x, out, words, BLOCK=block)

    contenders: dict[str, list[Call]] = {}
    for block, per_sm in ((4096, 0), (4096, 8), (2048, 16), (8192, 8)):
        programs = math.ceil(words / block)
        programs = min(programs, per_sm * num_sms()) if per_sm else programs
        out = torch.empty(programs, dtype=torch.int32, device=DEVICE)
        name = f"read by {programs} programs of {block}"
        contenders[name] = [lambda x=x, p=programs, b=block, o=out: call(x, p, b, o) for x in buffers]
    return contenders


def read_bandwidth(nbytes: int = 2**32) -> float:
    """Bytes per second that the best plain read of a large buffer takes in."""
    times, _ = in_turns(reads(nbytes if DEVICE == "cuda" else 2**16), calls=2)
    return (nbytes if DEVICE == "cuda" else 2**16) / min(times.values()) * 1e6


def rows(*shape: int) -> Tensor:
    """Normal bfloat16 numbers on the device."""
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def num_sms() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count if DEVICE == "cuda" else 2


def exact_attention(q_HD: Tensor, k_KTD: Tensor, v_KTD: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """float64 attention of one query per head, and the log of its weights' sum."""
    logits_KGT = q_HD.double().unflatten(0, (k_KTD.shape[0], -1)) @ k_KTD.double().transpose(1, 2) * scaling
    return (logits_KGT.softmax(dim=-1) @ v_KTD.double()).flatten(0, 1), logits_KGT.logsumexp(dim=-1).flatten()


def relative_error(out_HD: Tensor, exact_HD: Tensor) -> float:
    """Largest error of a head's output, relative to its norm; infinite where it is not finite."""
    error_H = (out_HD.double() - exact_HD).norm(dim=-1) / exact_HD.norm(dim=-1).clamp_min(1e-30)
    return error_H.max().item() if error_H.isfinite().all() else math.inf


def decode_errors(
    attended: tuple[Tensor, Tensor], q_BHD: Tensor, layer: LayerCache, scaling: float, rows: Iterable[int]
) -> tuple[float, float]:
    """Largest relative error of a head's output against float64 on the same codes, and error of the log of its weights."""
    (out_BHD, lse_BH), largest, largest_lse = attended, 0.0, 0.0
    for row in rows:
        k_KTD, v_KTD = layer.dense_row(row)
        exact_HD = torch.zeros_like(out_BHD[row], dtype=torch.float64)
        if k_KTD.shape[1]:
            exact_HD, lse_H = exact_attention(q_BHD[row], k_KTD, v_KTD, scaling)
            error = (lse_BH[row].double() - lse_H).abs().max().item()
            largest_lse = max(largest_lse, error if math.isfinite(error) else math.inf)
        elif not (lse_BH[row] == -math.inf).all():
            largest_lse = math.inf
        largest = max(largest, relative_error(out_BHD[row], exact_HD))
    return largest, largest_lse


def machine() -> str:
    """GPU, versions and date, as results name them."""
    gpu = torch.cuda.get_device_name() if DEVICE == "cuda" else "no GPU (interpreter)"
    versions = f"torch {torch.__version__}, triton {triton.__version__}, transformers {transformers.__version__}"
    return f"{gpu}, {versions}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}"


def command() -> str:
    """The command line that made a result."""
    module = Path(sys.argv[0]).stem
    return " ".join(["python", "-m", f"benchmarks.{module}", *sys.argv[1:]])


def release() -> None:
    """Give memory that nothing holds any more back to the device."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One line per row; columns in order of appearance."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [list(header), ["---"] * len(header), *([str(cell) for cell in row] for row in rows)]
    return [f"| {' | '.join(cells)} |" for cells in lines]
