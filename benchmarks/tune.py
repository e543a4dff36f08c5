"""Find decode configurations for a GPU; prints every measurement, and writes them to a JSON-lines file as they come.

    python -m benchmarks.tune --out FILE [--configs FILE] [--shapes A,B,C,D,E]

For every shape and format: tokens of a step, stages of the pipeline and registers, each with every number of programs, the
best three with every tilt, and the best of all with other costs of windows. Times are of `attend` alone: graph replay over
caches that L2 does not hold. All kernels are compiled first, one process per core.
`--configs` records the best of each in `kvcompile/kernels/decode_configs.json`.
"""

import argparse
import itertools
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.gpu import decode_errors, microseconds, num_sms
from kvcompile.codec import LayerCache, PageFormat, RowFormat
from kvcompile.kernels.triton_decode import DecodeConfig, attend, merges_here

SINK, RECENT, RING = 64, 256, 320
SHAPES = {  # batch, context, query heads, KV heads, head_dim
    "A": (1, 131072, 32, 8, 128),
    "B": (32, 16384, 32, 8, 128),
    "C": (32, 8192, 32, 8, 128),
    "D": (1, 32768, 32, 8, 128),
    "E": (8, 32768, 64, 8, 128),
    "F": (32, 16384, 32, 8, 64),
    "G": (32, 16384, 128, 8, 128),
    "H": (18, 100352, 32, 8, 128),
}
L2_BYTES = 60 << 20
VARIANTS = (  # page_tile, num_stages, max_registers
    *itertools.product((64,), (2, 3, 4), (128, 168)),
    *itertools.product((64,), (3,), (112, 208, 255)),
    (128, 3, 255),
)
FEW_VARIANTS = ((64, 2, 128), (64, 3, 128), (64, 3, 168), (64, 3, 208), (128, 3, 255))  # of formats other than int2
PROGRAMS = (5.8, 7.75, 9.65, 11.6, 13.5, 15.5, 17.4, 19.4, 23.2)  # per SM
TILTS = (0.02, 0.04, 0.07, 0.1, 0.14, 0.2)
WINDOW_COSTS = (3, 5, 6, 8)


def formats(head_dim: int) -> dict[str, PageFormat]:
    """The formats of the built-in schemes that have a decode kernel."""
    two = RowFormat(head_dim, 2, head_dim)
    return {
        "int2": PageFormat(two, two),
        "int2-g32": PageFormat(RowFormat(head_dim, 2, 32), RowFormat(head_dim, 2, 32)),
        "int4": PageFormat(RowFormat(head_dim, 4, head_dim), RowFormat(head_dim, 4, head_dim)),
        "kivi": PageFormat(RowFormat(head_dim, 2, 32, axis="channel"), RowFormat(head_dim, 2, 32), 128),
        "omni": PageFormat(
            RowFormat(head_dim, 2, 32, axis="channel", token_scale="l2"), RowFormat(head_dim, 2, 32), 128
        ),
        "kvlinc": PageFormat(RowFormat(head_dim, 2, 128, axis="channel"), two, 128),
    }


def random_cache(fmt: PageFormat, batch: int, context: int, num_heads: int, copies: int) -> list[LayerCache]:
    """Caches of `context` tokens a row with random codes and sane metadata, pages scattered over one pool each."""
    ring = -(-(RECENT + fmt.tokens) // fmt.tokens) * fmt.tokens
    pages = max(0, (context - SINK - RECENT) // fmt.tokens)
    table = torch.randperm(batch * pages + 1, device="cuda")[: batch * pages].int().view(batch, pages)
    lengths = torch.full((batch,), pages, device="cuda").int(), torch.full((batch,), context, device="cuda").int()
    caches = []
    for _ in range(copies):
        pool = torch.randint(0, 256, (batch * pages + 1, num_heads, fmt.page_bytes), dtype=torch.uint8, device="cuda")
        for name in ("key_meta", "value_meta"):
            offset, size = fmt.sections[name]
            scale = torch.rand(*pool.shape[:2], size // 4, device="cuda") * 0.5 + 0.5
            meta = torch.stack([scale.bfloat16(), (scale + 0.7).bfloat16()], dim=-1)
            pool[..., offset : offset + size] = meta.view(torch.uint8).flatten(-2)
        offset, size = fmt.sections["key_norm"]
        if size:
            norm = torch.rand(*pool.shape[:2], size // 2, device="cuda").bfloat16() + 0.5
            pool[..., offset : offset + size] = norm.view(torch.uint8)
        windows = [
            torch.randn(batch, num_heads, n, fmt.head_dim, device="cuda", dtype=torch.bfloat16)
            for n in (SINK, SINK, ring, ring)
        ]
        caches.append(LayerCache(fmt, pool, table, *lengths, *windows))
    return caches


def read_bytes(cache: LayerCache) -> int:
    """Bytes of pages and live window slots that one call reads."""
    batch, num_heads = cache.table_BN.shape[0], cache.pages_PKX.shape[1]
    tokens = int(cache.num_tokens_B.sum()) - cache.fmt.tokens * int(cache.num_pages_B.sum())
    del batch
    return num_heads * (cache.fmt.page_bytes * int(cache.num_pages_B.sum()) + 4 * cache.fmt.head_dim * tokens)


def time_config(q: Tensor, caches: list[LayerCache], config: DecodeConfig, replays: int = 7) -> float | None:
    """Microseconds of one call; None where the kernel does not compile or launch."""
    try:
        scaling = q.shape[-1] ** -0.5
        return microseconds([lambda x=x: attend(q, x, scaling, config, lengths_at_rest=True) for x in caches], replays)
    except (triton.runtime.errors.OutOfResources, RuntimeError) as error:
        print("failed", config, type(error).__name__, flush=True)
        return None


def configs(shape: str, format_name: str) -> list[DecodeConfig]:
    """Every variant with every number of programs."""
    rows = SHAPES[shape][0] * SHAPES[shape][3]
    splits = sorted({max(1, round(programs * num_sms() / rows)) for programs in PROGRAMS})
    variants = VARIANTS if format_name == "int2" else FEW_VARIANTS
    return [
        DecodeConfig(count, page_tile=tile, num_stages=stages, max_registers=registers)
        for count, (tile, stages, registers) in itertools.product(splits, variants)
    ]


def compile_all(shapes: list[str], format_names: list[str]) -> None:
    """Every variant that tuning will ask for, by one process per core: compiled kernels are kept on disk."""
    jobs = {}
    for shape, name in itertools.product(shapes, format_names):
        groups = SHAPES[shape][2] // SHAPES[shape][3]
        for config in configs(shape, name):
            jobs[SHAPES[shape][2:], name, replace(config, splits=0), merges_here(config.splits, groups)] = (
                shape,
                name,
                config,
            )
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        for _ in pool.map(_compile, jobs.values()):
            pass
    print(f"compiled {len(jobs)} kernels", flush=True)


def _compile(job: tuple[str, str, DecodeConfig]) -> None:
    shape, name, config = job
    _, _, num_queries, num_heads, head_dim = SHAPES[shape]
    caches = random_cache(formats(head_dim)[name], 1, 1024, num_heads, 1)
    q = torch.randn(1, num_queries, head_dim, device="cuda")
    time_config(q, caches, config, 1)


def tune(shape: str, format_name: str, out: Path | None, budget: float) -> dict[str, Any]:
    """Everything for one shape and format; the best as an entry of `decode_configs.json`."""
    batch, context, num_queries, num_heads, head_dim = SHAPES[shape]
    fmt = formats(head_dim)[format_name]
    one = random_cache(fmt, batch, context, num_heads, 1)
    caches = one + random_cache(fmt, batch, context, num_heads, min(7, 4 * L2_BYTES // read_bytes(one[0])))
    q = torch.randn(batch, num_queries, head_dim, device="cuda")
    started, results = time.time(), []

    def measure(config: DecodeConfig) -> None:
        if time.time() - started > budget or any(config == c for _, c in results):
            return
        us = time_config(q, caches, config)
        if us is None:
            return
        results.append((us, config))
        line = json.dumps({"shape": shape, "format": format_name, "us": round(us, 2), **asdict(config)})
        print(line, flush=True)
        if out:
            with out.open("a") as file:
                file.write(line + "\n")

    wanted = configs(shape, format_name)
    for config in wanted:
        measure(config)
    best: dict[DecodeConfig, DecodeConfig] = {}  # by variant
    for _, config in sorted(results, key=lambda x: x[0]):
        best.setdefault(replace(config, splits=0), config)
    for variant, tilt in itertools.product(list(best)[:3], TILTS):
        for splits in sorted({c.splits for c in wanted if 0.8 < c.splits / best[variant].splits < 1.5}):
            measure(replace(variant, splits=splits, tilt=tilt))
    for (_, config), cost in itertools.product(sorted(results, key=lambda x: x[0])[:6], WINDOW_COSTS):
        measure(replace(config, window_cost=cost))
    if time.time() - started > budget:
        print(f"stopped after {budget:.0f} s: {len(results)} of {len(wanted)} and of their tilts measured", flush=True)
    us, config = min(results, key=lambda x: x[0])
    rows_checked = sorted({0, batch - 1})
    scaling = head_dim**-0.5
    error, _ = decode_errors(attend(q, caches[0], scaling, config), q, caches[0], scaling, rows_checked)
    moved = read_bytes(caches[0])
    print(
        f"BEST {shape} {format_name}: {us:.2f} us, {moved / us / 1e6:.2f} TB/s, error {error:.1e}, {config}", flush=True
    )
    rows, splits = batch * num_heads, config.splits
    entry = {"head_dim": head_dim, "groups": num_queries // num_heads, "bits": fmt.key.bits}
    if fmt.key.axis == "channel":
        entry |= {"channel_group": min(fmt.key.group_size, 64), "groups_per_row": 1}
    else:
        entry |= {"channel_group": 0, "groups_per_row": fmt.key.num_groups}
    if fmt.key.token_scale != "none":
        entry["norms"] = True
    entry |= {"rows": rows, "columns": caches[0].table_BN.shape[1]}
    return entry | {
        "programs_per_sm": round(splits * rows / num_sms(), 2),
        "page_tile": config.page_tile,
        "num_stages": config.num_stages,
        "max_registers": config.max_registers,
        "window_cost": config.window_cost,
        "tilt": config.tilt,
    }


def record(entry: dict[str, Any], path: Path) -> None:
    """Put the entry in the place of that of the same class, or behind the others of this GPU."""
    known = json.loads(path.read_text("utf-8"))
    entries = known.setdefault(torch.cuda.get_device_name(0), [])

    def same_class(x: dict[str, Any]) -> bool:
        code = ("head_dim", "groups", "bits", "channel_group", "groups_per_row", "norms", "rows")
        return all(x.get(name) == entry.get(name) for name in code) and 0.9 < x["columns"] / entry["columns"] < 1.1

    places = [i for i, x in enumerate(entries) if same_class(x)]
    if places:
        entries[places[0]] = entry
    else:
        entries.append(entry)
    lines = (
        f"{json.dumps(name)}: [\n" + ",\n".join(f"  {json.dumps(x)}" for x in found) + "\n]"
        for name, found in known.items()
    )
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def baselines(shape: str) -> None:
    """The best BF16 attention of this run."""
    batch, context, num_queries, num_heads, head_dim = SHAPES[shape]
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.randn(batch, num_queries, 1, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, num_heads, context, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):

        def call(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        print(f"BF16 {shape} {name}: {microseconds([call], 10):.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--configs", type=Path, help="where to record the best: kvcompile/kernels/decode_configs.json")
    parser.add_argument("--shapes", default="A,B,C,D,E")
    parser.add_argument("--formats", default="int2")
    parser.add_argument("--budget", type=float, default=60, help="seconds for one shape and format")
    parser.add_argument("--baselines", action="store_true")
    options = parser.parse_args()
    compile_all(options.shapes.split(","), options.formats.split(","))
    for shape in options.shapes.split(","):
        if options.baselines:
            baselines(shape)
        for name in options.formats.split(","):
            entry = tune(shape, name, options.out, options.budget)
            if options.configs:
                record(entry, options.configs)


if __name__ == "__main__":
    main()
