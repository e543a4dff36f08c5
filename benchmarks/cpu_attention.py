"""How fast is decode attention over the packed cache on this CPU? One new token, batch 1, one layer, head_dim 128.

    python benchmarks/cpu_attention.py --out benchmarks/results

Contenders: torch SDPA on a BF16 cache, with `enable_gqa` and with the query heads of a KV head viewed as query rows
(the fair baseline: it reads every key once); the codec in plain torch; the compiled kernel, on keys by token and on
keys by channel (KIVI: groups of 32). All but the codec take turns, on rotating buffers; the kernel's error is against
float64 on the same codes. With --out, writes cpu_attention.csv and cpu_attention.md. On a machine that does other things
at the same time, read the fastest call.
"""

import argparse
import csv
import itertools
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvcompile.codec import LayerCache, PageFormat, RowFormat, attend_layer, encode_pages
from kvcompile.kernels import cpu
from kvcompile.kernels.compiler import find_compiler

HEAD_DIM, QUERIES, SINK, RECENT = 128, 4, 64, 256
SCALING = HEAD_DIM**-0.5
BUFFERS = 3
BASELINE = "SDPA bf16, grouped view"
FORMATS = {
    **{f"{b} bits": PageFormat(RowFormat(HEAD_DIM, b, HEAD_DIM), RowFormat(HEAD_DIM, b, HEAD_DIM)) for b in (2, 4)},
    "2 bits by channel": PageFormat(RowFormat(HEAD_DIM, 2, 32, axis="channel"), RowFormat(HEAD_DIM, 2, 32), tokens=128),
}


def pack(k: Tensor, v: Tensor, fmt: PageFormat) -> LayerCache:
    """Keys and values [1, K, n, D] as a layer whose pages lie in random order; the newest 256 or so stay in BF16."""
    num_kv_heads, context = k.shape[1:3]
    num_pages, ring_slots = (context - SINK - RECENT) // fmt.tokens, RECENT + fmt.tokens
    end = SINK + fmt.tokens * num_pages
    table_BN = torch.randperm(num_pages).int()[None]
    k_paged, v_paged = (x[0, :, SINK:end].unflatten(1, (-1, fmt.tokens)).transpose(0, 1) for x in (k, v))
    pages_PKX = torch.empty(num_pages, num_kv_heads, fmt.page_bytes, dtype=torch.uint8)
    pages_PKX[table_BN[0].long()] = encode_pages(k_paged, v_paged, fmt)
    rings = [torch.zeros(1, num_kv_heads, ring_slots, HEAD_DIM, dtype=torch.bfloat16) for _ in "kv"]
    for ring, x in zip(rings, (k, v), strict=True):
        ring[:, :, torch.arange(end - SINK, context - SINK) % ring_slots] = x[:, :, end:]
    counts = (torch.tensor([n], dtype=torch.int32) for n in (num_pages, context))
    sinks = (x[:, :, :SINK].contiguous() for x in (k, v))
    return LayerCache(fmt, pages_PKX, table_BN, *counts, *sinks, *rings)


def error_of(q_BHD: Tensor, layer: LayerCache) -> float:
    """Relative error of the kernel against float64 on the same codes."""
    k_KTD, v_KTD = (x.double() for x in layer.dense_row(0))
    q_KGD = q_BHD[0].double().unflatten(0, (k_KTD.shape[0], -1))
    exact = ((q_KGD @ k_KTD.mT * SCALING).softmax(-1) @ v_KTD).flatten(0, 1)
    return float((cpu.attend(q_BHD, layer, SCALING)[0][0] - exact).norm() / exact.norm())


def milliseconds(contenders: Mapping[str, Callable[[int], object]], repetitions: int) -> dict[str, list[float]]:
    """Times of calls with the number of a buffer, after two calls for warming up; contenders take turns."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(-2, repetitions):
        for name, function in contenders.items():
            start = time.perf_counter()
            function(turn % BUFFERS)
            if turn >= 0:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def measure(num_kv_heads: int, context: int, repetitions: int) -> list[dict[str, object]]:
    """One row of the table per contender."""
    q_BHD = torch.randn(1, num_kv_heads * QUERIES, HEAD_DIM)
    dense = [torch.randn(2, 1, num_kv_heads, context, HEAD_DIM).bfloat16() for _ in range(BUFFERS)]
    packed = {name: [pack(k, v, fmt) for k, v in dense] for name, fmt in FORMATS.items()}
    q_BF16 = q_BHD.bfloat16()

    def attend_dense(i: int, queries: int) -> Tensor:
        k, v = dense[i]
        return sdpa(q_BF16.view(1, -1, queries, HEAD_DIM), k, v, scale=SCALING, enable_gqa=queries == 1)

    def attend_packed(name: str) -> Callable[[int], object]:
        return lambda i: cpu.attend(q_BHD, packed[name][i], SCALING)

    contenders = {
        "SDPA bf16, enable_gqa": lambda i: attend_dense(i, 1),
        BASELINE: lambda i: attend_dense(i, QUERIES),
        **{f"kernel, {name}": attend_packed(name) for name in packed},
    }
    errors = {f"kernel, {name}": error_of(q_BHD, layers[0]) for name, layers in packed.items()}
    times = milliseconds(contenders, repetitions)
    codec = {"codec, 2 bits": lambda i: attend_layer(q_BHD, packed["2 bits"][i], SCALING)}
    times |= milliseconds(codec, -(-repetitions // 10))  # apart: it leaves nothing of the others in the caches
    baseline = statistics.median(times[BASELINE])

    def megabytes(name: str) -> float:
        if name.startswith("SDPA"):
            return dense[0].nbytes / 1e6
        layer = packed[name.split(", ")[1]][0]
        return sum(x.nbytes for x in vars(layer).values() if isinstance(x, Tensor)) / 1e6

    return [
        {
            "KV heads": num_kv_heads,
            "context": context,
            "contender": name,
            "median ms": f"{statistics.median(taken):.3f}",
            "fastest ms": f"{min(taken):.3f}",
            "speed-up": f"{baseline / statistics.median(taken):.2f}",
            "cache MB": f"{megabytes(name):.2f}",
            "error": f"{errors[name]:.1e}" if name in errors else "",
            "calls": len(taken),
        }
        for name, taken in times.items()
    ]


def markdown(rows: list[dict[str, object]], notes: list[str]) -> str:
    """The rows as a table, under the notes."""
    lines = ["# Decode attention on a CPU", "", *[f"- {note}" for note in notes], ""]
    lines += ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(str(x) for x in row.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def processor() -> str:
    """Its name where Linux tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="directory for cpu_attention.csv and cpu_attention.md")
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--repetitions", type=int, default=60)
    args = parser.parse_args()
    if not cpu.is_available():
        sys.exit("No working C compiler: install gcc or set CC.")
    torch.manual_seed(0)
    cores, threads, simd = os.cpu_count(), torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    notes = [
        f"{processor()}, {cores} cores, {threads} threads, {simd}",
        f"Python {platform.python_version()}, torch {torch.__version__}, {find_compiler()[1].splitlines()[0]}",
        f"batch 1, one layer, head_dim {HEAD_DIM}, {QUERIES} query heads per KV head, sink {SINK}, recent {RECENT}",
        f"{args.repetitions} turns over {BUFFERS} buffers, load average {os.getloadavg()[0]:.1f} at the start",
        f"speed-up: median of '{BASELINE}' over median",
        f"`python {shlex.join(sys.argv)}`",
    ]
    rows = []
    for num_kv_heads, context in itertools.product(args.kv_heads, args.contexts):
        print(f"measuring {num_kv_heads} KV heads, context {context}", file=sys.stderr)
        rows += measure(num_kv_heads, context, args.repetitions)
    report = markdown(rows, notes)
    print(report)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "cpu_attention.md").write_text(report)
        with open(args.out / "cpu_attention.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0], "machine"])
            writer.writeheader()
            writer.writerows({**row, "machine": "; ".join(notes)} for row in rows)


if __name__ == "__main__":
    main()
