"""How long does writing pages with error feedback take on this CPU? head_dim 128, 2 bits, 2 KV heads.

    python benchmarks/cpu_encode.py

One page, as decoding writes it every 64 tokens, and a prefill of 8192 tokens; codes chosen by the codec in torch and by
the compiled kernel: the choice alone (`feedback_codes`, keys), and whole pages (`encode_pages`). Fastest calls.
"""

import time
from collections.abc import Callable
from typing import Literal

import torch

from kvcompile.codec import PageFormat, PageTables, RowFormat, RowTables, encode_pages, feedback_codes, feedback_factor
from kvcompile.kernels import cpu_encode

HEAD_DIM, KV_HEADS, BITS = 128, 2, 2


def fastest(function: Callable[[], object], seconds: float = 2) -> float:
    """Milliseconds of the fastest call within `seconds`, after one for warming up."""
    function()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def measure(axis: Literal["token", "channel"], group: int, pages: int) -> list[float]:
    """Codes by torch and by C, pages by torch and by C, pages of the nearest codes."""
    samples = torch.randn(KV_HEADS, 4 * HEAD_DIM, HEAD_DIM, dtype=torch.float64).cumsum(dim=-1)
    factor = feedback_factor(samples.mT @ samples, damping=0.2)
    tables = PageTables(RowTables(factor), RowTables(factor))
    nearest = PageFormat(*2 * [RowFormat(HEAD_DIM, BITS, group, axis=axis)])
    fed = PageFormat(*2 * [RowFormat(HEAD_DIM, BITS, group, axis=axis, rounding="error_feedback")])
    k, v = torch.randn(2, pages, KV_HEADS, fed.tokens, HEAD_DIM).bfloat16()
    scale = torch.ones(pages, KV_HEADS, *((fed.tokens, 1) if axis == "token" else (1, HEAD_DIM)))
    coders = feedback_codes, cpu_encode.feedback_codes
    return [
        *(fastest(lambda f=f: f(k.float(), scale, scale, factor, BITS, group, fed.key.group_dim)) for f in coders),
        *(fastest(lambda f=f: encode_pages(k, v, fed, tables, f)) for f in coders),
        fastest(lambda: encode_pages(k, v, nearest)),
    ]


def main() -> None:
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| axis | tokens | codes, torch ms | codes, C ms | pages, torch ms | pages, C ms | nearest, ms |")
    print("|---|---|---|---|---|---|---|")
    for axis, group in (("token", HEAD_DIM), ("channel", 64)):
        for pages in (1, 128):
            print(f"| {axis} | {64 * pages} | " + " | ".join(f"{ms:.3f}" for ms in measure(axis, group, pages)) + " |")


if __name__ == "__main__":
    main()
