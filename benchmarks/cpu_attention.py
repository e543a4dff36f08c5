"""How fast is decode attention over the packed cache on this CPU? One new token, batch 1, one layer, head_dim 128.

    python benchmarks/cpu_attention.py --out benchmarks/results

Contenders: torch SDPA on a BF16 cache, with `enable_gqa` and with the query heads of a KV head viewed as G query rows
(the fair baseline: it reads every key once); the codec in plain torch; the compiled kernel. All take turns in one run, on
rotating buffers, after a check of the kernel against float64 on the same codes. With --out, writes cpu_attention.csv and
cpu_attention.md.
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
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvcompile.codec import PAGE_TOKENS, LayerCache, PageFormat, RowFormat, attend_layer, encode_pages
from kvcompile.kernels import cpu

HEAD_DIM, QUERIES, SINK, RING = 128, 4, 64, 320
SCALING = HEAD_DIM**-0.5
BUFFERS = 3
BASELINE = "SDPA bf16, grouped view"


def build(num_kv_heads: int, context: int, bits: int) -> tuple[Tensor, Tensor, Tensor, LayerCache]:
    """A query [1, H, D], a BF16 cache [1, K, n, D] and the same tokens packed, pages in random order."""
    q_BHD = torch.randn(1, num_kv_heads * QUERIES, HEAD_DIM)
    k, v = (torch.randn(1, num_kv_heads, context, HEAD_DIM).bfloat16() for _ in "kv")
    fmt = PageFormat(RowFormat(HEAD_DIM, bits, HEAD_DIM), RowFormat(HEAD_DIM, bits, HEAD_DIM))
    num_pages = (context - SINK) // PAGE_TOKENS - 4  # 256 to 319 recent tokens stay in BF16
    end = SINK + PAGE_TOKENS * num_pages
    table_BN = torch.randperm(num_pages).int()[None]
    paged = [x[0, :, SINK:end].unflatten(1, (num_pages, PAGE_TOKENS)).transpose(0, 1) for x in (k, v)]
    pages_PKX = torch.empty(num_pages, num_kv_heads, fmt.page_bytes, dtype=torch.uint8)
    pages_PKX[table_BN[0].long()] = encode_pages(*paged, fmt)
    ring = [torch.zeros(1, num_kv_heads, RING, HEAD_DIM, dtype=torch.bfloat16) for _ in "kv"]
    for window, x in zip(ring, (k, v), strict=True):
        window[:, :, torch.arange(end - SINK, context - SINK) % RING] = x[:, :, end:]
    counts = (torch.tensor([n], dtype=torch.int32) for n in (num_pages, context))
    sinks = (x[:, :, :SINK].contiguous() for x in (k, v))
    return q_BHD, k, v, LayerCache(fmt, pages_PKX, table_BN, *counts, *sinks, *ring)


def error_of(q_BHD: Tensor, layer: LayerCache) -> float:
    """Relative error of the kernel against float64 on the same codes."""
    k_KTD, v_KTD = (x.double() for x in layer.dense_row(0))
    q_KGD = q_BHD[0].double().unflatten(0, (k_KTD.shape[0], -1))
    exact = ((q_KGD @ k_KTD.mT * SCALING).softmax(-1) @ v_KTD).flatten(0, 1)
    return float((cpu.attend(q_BHD, layer, SCALING)[0] - exact).norm() / exact.norm())


def milliseconds(contenders: dict[str, Callable[[int], object]], repetitions: int) -> dict[str, list[float]]:
    """Times of calls with the number of a buffer; contenders take turns, and one that is slow has fewer of them."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(-2, repetitions):
        for name, function in contenders.items():
            if turn % 10 and times[name] and min(times[name]) > 50:
                continue
            start = time.perf_counter()
            function(turn % BUFFERS)
            if turn >= 0:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def measure(num_kv_heads: int, context: int, bits: int, repetitions: int) -> list[dict[str, object]]:
    """One row of the table per contender."""
    buffers = [build(num_kv_heads, context, bits) for _ in range(BUFFERS)]

    def dense(grouped: bool, q_BHD: Tensor, k: Tensor, v: Tensor, _: LayerCache) -> Tensor:
        q = q_BHD.bfloat16().view(1, num_kv_heads if grouped else -1, QUERIES if grouped else 1, HEAD_DIM)
        return sdpa(q, k, v, scale=SCALING, enable_gqa=not grouped)

    times = milliseconds(
        {
            "SDPA bf16, enable_gqa": lambda i: dense(False, *buffers[i]),
            BASELINE: lambda i: dense(True, *buffers[i]),
            "codec": lambda i: attend_layer(buffers[i][0], buffers[i][3], SCALING),
            "kernel": lambda i: cpu.attend(buffers[i][0], buffers[i][3], SCALING),
        },
        repetitions,
    )
    q_BHD, k, v, layer = buffers[0]
    packed = sum(x.nbytes for x in vars(layer).values() if isinstance(x, Tensor))
    baseline = statistics.median(times[BASELINE])
    return [
        {
            "kv heads": num_kv_heads,
            "context": context,
            "bits": bits if name in ("codec", "kernel") else 16,
            "contender": name,
            "median ms": round(statistics.median(taken), 3),
            "fastest ms": round(min(taken), 3),
            "times the grouped SDPA": round(baseline / statistics.median(taken), 2),
            "cache MB": round((k.nbytes + v.nbytes if name.startswith("SDPA") else packed) / 1e6, 2),
            "error": f"{error_of(q_BHD, layer):.1e}" if name == "kernel" else "",
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
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repetitions", type=int, default=60)
    args = parser.parse_args()
    if not cpu.is_available():
        sys.exit("No working C compiler: install gcc or set CC.")
    torch.manual_seed(0)
    notes = [
        f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
        f"Python {platform.python_version()}, torch {torch.__version__}, {cpu._compiler()[1].splitlines()[0]}",
        f"batch 1, one layer, head_dim {HEAD_DIM}, {QUERIES} query heads per KV head, group {HEAD_DIM}, sink {SINK}, ring {RING}",
        f"{args.repetitions} turns over {BUFFERS} buffers, load average {os.getloadavg()[0]:.1f} at the start",
        f"`python {shlex.join(sys.argv)}`",
    ]
    rows = []
    for num_kv_heads, context, bits in itertools.product(args.kv_heads, args.contexts, args.bits):
        rows += measure(num_kv_heads, context, bits, args.repetitions)
        print(*[" ".join(f"{name} {x};" for name, x in row.items()) for row in rows[-4:]], sep="\n", flush=True)
    report = markdown(rows, notes)
    print(f"\n{report}")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "cpu_attention.md").write_text(report)
        with open(args.out / "cpu_attention.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0], "machine"])
            writer.writeheader()
            writer.writerows({**row, "machine": "; ".join(notes)} for row in rows)


if __name__ == "__main__":
    main()
