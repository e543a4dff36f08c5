"""Are the Triton kernels right on this GPU, and how fast are they? Writes gpu_check.json and gpu_check.md.

    python benchmarks/gpu_check.py --out benchmarks/results

Correctness: encoding against the codec on the CPU, byte for byte (by nearest rounding and by error feedback), and decoding
against float64 on the same codes, over random odd shapes. Speed: CUDA graphs over rotating buffers (so that L2 holds none
of them), median of replays, against torch SDPA in bf16 with `enable_gqa`. Without a GPU only the correctness part runs, in
Triton's interpreter.
"""

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu import DEVICE, decode_errors, microseconds, read_bandwidth
from kvcompile.codec import (
    NO_PAGE_TABLES,
    LayerCache,
    PageFormat,
    PageTables,
    RowFormat,
    RowTables,
    encode_pages,
    feedback_factor,
)
from kvcompile.kernels.triton_decode import DecodeConfig, attend, default_config
from kvcompile.kernels.triton_encode import rotate_rows, rotate_write, write_pages

FORMATS = [  # head_dim, (bits, group) of the keys, of the values, query heads per KV head
    (128, (2, 128), (2, 128), 4),
    (128, (2, 128), (2, 128), 1),
    (128, (2, 128), (2, 128), 8),
    (128, (2, 32), (2, 64), 5),
    (128, (2, 16), (4, 128), 2),
    (128, (4, 128), (4, 128), 4),
    (64, (2, 64), (2, 64), 7),
    (64, (4, 16), (2, 32), 16),
    (16, (2, 16), (2, 16), 3),
    (80, (4, 40), (2, 16), 1),
    (80, (2, 80), (4, 80), 4),
    (96, (2, 96), (2, 32), 6),
    (96, (4, 48), (4, 96), 3),
    (256, (2, 256), (2, 256), 8),
    (256, (4, 64), (2, 128), 2),
]
FEEDBACK_FORMATS = [  # head_dim, (bits, group) of the keys, of the values
    (128, (2, 128), (2, 128)),
    (128, (4, 128), (4, 32)),
    (128, (2, 16), (2, 64)),
    (128, (1, 128), (2, 32)),
    (64, (2, 64), (4, 16)),
    (16, (2, 16), (4, 16)),
    (80, (2, 80), (4, 16)),
    (96, (4, 96), (2, 48)),
    (256, (2, 256), (4, 128)),
]
SHAPES = [(1, 131072, 32, 8), (32, 8192, 32, 8)]  # batch, context, query heads, KV heads
MAIN = PageFormat(RowFormat(128, 2, 128, 0.96), RowFormat(128, 2, 128, 0.92))
MAIN_FEEDBACK = PageFormat(*(replace(row, rounding="error_feedback") for row in (MAIN.key, MAIN.value)))
SINK, RING = 64, 320
LARGEST_ERROR = 1.5e-3


def random_rows(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def awkward_rows(num_blocks: int, num_heads: int, fmt: PageFormat) -> Tensor:
    """Rows [N, K, T, D] with outlier channels; the first of every block are degenerate."""
    head_dim = fmt.head_dim
    rows = random_rows(num_blocks, num_heads, fmt.tokens, head_dim)
    rows *= torch.randn(head_dim, device=DEVICE).exp().bfloat16()
    rows[..., 0, :] = 0.0
    rows[..., 1, :] = 1.7
    rows[..., 2, :] = 1e-39
    rows[..., 3, :] *= 1e-38
    largest = 3e38 if fmt.key.rounding == "nearest" else 1e38  # error feedback wants finite scales
    rows[..., 4, 0], rows[..., 4, 1] = largest, -largest
    rows[..., 5, :] = (torch.arange(head_dim, device=DEVICE) % 7 * 0.5).bfloat16()
    return rows


def random_tables(num_heads: int, head_dim: int, extreme: bool, device: str = DEVICE) -> PageTables:
    """Factors of error feedback: of random metrics, or with elements anywhere in their range."""

    def factor() -> Tensor:
        if extreme:
            return torch.randint(-127, 128, (num_heads, head_dim, head_dim)).triu(1) / 64
        samples = torch.randn(num_heads, 4 * head_dim, head_dim, dtype=torch.float64).cumsum(-1)
        return feedback_factor(samples.mT @ samples, damping=0.2)

    return PageTables(*(RowTables(factor().to(device)) for _ in range(2)))


def build_layer(fmt: PageFormat, num_heads: int, num_tokens: list[int], sink: int, ring: int) -> LayerCache:
    """Random tokens; all whole blocks behind the sink in pages, except that odd rows leave some in the ring."""
    num_pages = [max(n - sink, 0) // fmt.tokens for n in num_tokens]
    num_pages = [max(n - row % 2 * (ring // fmt.tokens - 1), 0) for row, n in enumerate(num_pages)]
    pool = sum(num_pages) + 3
    pages = torch.zeros(pool, num_heads, fmt.page_bytes, dtype=torch.uint8, device=DEVICE)
    ids = torch.randperm(pool, device=DEVICE).int()
    for chunk in torch.arange(pool, dtype=torch.int32, device=DEVICE).split(4096):
        k, v = (random_rows(len(chunk), num_heads, fmt.tokens, fmt.head_dim) for _ in range(2))
        write_pages(k, v + 0.3, fmt, NO_PAGE_TABLES, pages, chunk)
    table = torch.full((len(num_tokens), max(num_pages) + 2), 2**30, dtype=torch.int32, device=DEVICE)
    for row, n in enumerate(num_pages):
        table[row, :n], ids = ids[:n], ids[n:]
    return LayerCache(
        fmt,
        pages,
        table,
        torch.tensor(num_pages, dtype=torch.int32, device=DEVICE),
        torch.tensor(num_tokens, dtype=torch.int32, device=DEVICE),
        *(random_rows(len(num_tokens), num_heads, slots, fmt.head_dim) for slots in (sink, sink, ring, ring)),
    )


def check_grid(shapes_per_format: int, longest: int) -> list[dict]:
    """Both kernels over random shapes of every format; some with pages of 128 tokens or integer zero points."""
    rng = random.Random(0)
    results = []
    for index, (head_dim, key, value, groups) in enumerate(FORMATS):
        for _ in range(shapes_per_format):
            k_clip, v_clip = rng.choice([1.0, 0.96, 0.5]), rng.choice([1.0, 0.92, 0.985])
            zero_point = "integer" if index % 4 == 3 else "float"
            fmt = PageFormat(
                RowFormat(head_dim, *key, k_clip, zero_point=zero_point),
                RowFormat(head_dim, *value, v_clip, zero_point=zero_point),
                128 if index % 3 == 2 else 64,
            )
            num_heads, num_blocks, batch = rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 5)
            k, v = (awkward_rows(num_blocks, num_heads, fmt) for _ in range(2))
            pages = torch.zeros(num_blocks, num_heads, fmt.page_bytes, dtype=torch.uint8, device=DEVICE)
            write_pages(k, v, fmt, NO_PAGE_TABLES, pages, torch.arange(num_blocks, dtype=torch.int32, device=DEVICE))
            expected = encode_pages(k.cpu(), v.cpu(), fmt)

            tokens = [rng.choice([0, 1, 63, rng.randint(0, longest)]) for _ in range(batch)]
            sink, ring = rng.choice([0, 1, 64, 70]), fmt.tokens * rng.choice([1, 2, 5])
            layer = build_layer(fmt, num_heads, tokens, sink, ring)
            q = random_rows(batch, num_heads * groups, head_dim)
            config = rng.choice([None, DecodeConfig(rng.randint(1, 40), rng.randint(1, 6))])
            attended = attend(q, layer, head_dim**-0.5, config)
            error, lse_error = decode_errors(attended, q, layer, head_dim**-0.5, list(range(batch)))
            results.append(
                {
                    "head_dim": head_dim,
                    "key": [*key, k_clip],
                    "value": [*value, v_clip],
                    "zero_point": zero_point,
                    "page_tokens": fmt.tokens,
                    "kv_heads": num_heads,
                    "groups": groups,
                    "tokens": tokens,
                    "sink": sink,
                    "ring": ring,
                    "wrong_bytes": int((pages.cpu() != expected).sum()),
                    "codec_on_gpu_wrong_bytes": int((encode_pages(k, v, fmt).cpu() != expected).sum()),
                    "decode_error": error,
                    "lse_error": lse_error,
                }
            )
            wrong = results[-1]["wrong_bytes"]
            print(
                f"{head_dim:4} {key} {value} G={groups} {tokens}: {wrong} {error:.1e} {lse_error:.1e}",
                flush=True,
            )
    return results


def check_feedback(shapes_per_format: int) -> list[dict]:
    """Error feedback over random shapes of every format: bytes that differ from the codec's on the CPU."""
    rng = random.Random(1)
    results = []
    for index, (head_dim, key, value) in enumerate(FEEDBACK_FORMATS):
        for shape in range(shapes_per_format):
            zero_point = "integer" if index % 4 == 3 else "float"
            k_row, v_row = (
                RowFormat(head_dim, *x, rng.choice([1.0, 0.96, 0.5]), zero_point=zero_point, rounding="error_feedback")
                for x in (key, value)
            )
            fmt = PageFormat(k_row, v_row, 128 if index % 3 == 2 else 64)
            num_heads, num_blocks = rng.randint(1, 4), rng.randint(1, 5)
            k, v = (awkward_rows(num_blocks, num_heads, fmt) * 10.0 ** rng.choice([-20, -3, 0, 0, 3]) for _ in range(2))
            k, v = (x.clamp(-1e38, 1e38) for x in (k, v))
            tables = random_tables(num_heads, head_dim, extreme=shape % 2 == 1, device="cpu")
            on_device = PageTables(*(RowTables(x.feedback.to(DEVICE)) for x in (tables.key, tables.value)))
            pages = torch.zeros(num_blocks, num_heads, fmt.page_bytes, dtype=torch.uint8, device=DEVICE)
            write_pages(k, v, fmt, on_device, pages, torch.arange(num_blocks, dtype=torch.int32, device=DEVICE))
            wrong = int((pages.cpu() != encode_pages(k.cpu(), v.cpu(), fmt, tables)).sum())
            results.append(
                {
                    "head_dim": head_dim,
                    "key": [*key, k_row.clip_ratio],
                    "value": [*value, v_row.clip_ratio],
                    "zero_point": zero_point,
                    "page_tokens": fmt.tokens,
                    "kv_heads": num_heads,
                    "blocks": num_blocks,
                    "extreme_factor": shape % 2 == 1,
                    "wrong_bytes": wrong,
                }
            )
            print(f"error feedback, {head_dim:4} {key} {value} {num_blocks} blocks: {wrong}", flush=True)
    return results


def check_rotation() -> float:
    """Largest error of `rotate_rows` in bf16 steps (half a step is perfect rounding)."""
    largest = 0.0
    for head_dim, num_heads, groups, num_tokens in [(128, 8, 4, 1), (128, 2, 1, 77), (80, 3, 2, 5), (256, 1, 2, 33)]:
        x = random_rows(2, num_heads * groups, num_tokens, head_dim)
        r = torch.linalg.qr(torch.randn(num_heads, head_dim, head_dim, device=DEVICE)).Q
        exact = x.double() @ r.double().repeat_interleave(groups, dim=0)
        step = exact.abs().clamp_min(0.1).log2().floor().exp2() * 2**-7
        largest = max(largest, ((rotate_rows(x, r).double() - exact) / step).abs().max().item())
    return largest


def time_encode(batch: int, context: int, num_heads: int) -> list[dict]:
    """The whole context at once (prefill), and one block per row (the flush of a decoding batch)."""
    rows = []
    head_dim = MAIN.head_dim
    r = torch.linalg.qr(torch.randn(num_heads, head_dim, head_dim, device=DEVICE)).Q
    tables = random_tables(num_heads, head_dim, extreme=False)
    for what, num_blocks in (("prefill", batch * context // MAIN.tokens), ("flush", batch)):
        k, v = (random_rows(num_blocks, num_heads, MAIN.tokens, head_dim) for _ in range(2))
        pages = torch.zeros(num_blocks, num_heads, MAIN.page_bytes, dtype=torch.uint8, device=DEVICE)
        ids = torch.randperm(num_blocks, device=DEVICE).int()
        traffic = (k.nbytes + v.nbytes) + pages.nbytes
        calls: dict[str, Callable[[], object]] = {
            "write_pages": lambda k=k, v=v, p=pages, i=ids: write_pages(k, v, MAIN, tables, p, i),
            "write_pages, error feedback": lambda k=k, v=v, p=pages, i=ids: write_pages(
                k, v, MAIN_FEEDBACK, tables, p, i
            ),
            "rotate_write (keys)": lambda k=k, v=v, p=pages, i=ids: rotate_write(k, v, r, None, MAIN, tables, p, i),
            "rotate_rows (keys)": lambda k=k: rotate_rows(k, r),
            "codec in torch": lambda k=k, v=v: encode_pages(k, v, MAIN),
        }
        for name, call in calls.items():
            moved = 2 * k.nbytes if name.startswith("rotate_rows") else traffic
            rows.append(timed(f"{name}, {what}", batch, context, moved, lambda call=call: [call]))
    return rows


def time_decode(batch: int, context: int, num_queries: int, num_heads: int) -> list[dict]:
    """`attend` and torch SDPA over the same number of tokens."""
    rows = []
    scaling = MAIN.head_dim**-0.5
    q = random_rows(batch, num_queries, MAIN.head_dim)
    layers = [build_layer(MAIN, num_heads, [context] * batch, SINK, RING) for _ in range(4)]
    error, _ = decode_errors(attend(q, layers[0], scaling), q, layers[0], scaling, sorted({0, batch - 1}))
    num_windows = 2 * num_heads * MAIN.head_dim * 2 * int(sum(context - 64 * n for n in layers[0].num_pages_B.tolist()))
    traffic = num_heads * MAIN.page_bytes * int(layers[0].num_pages_B.sum()) + num_windows
    default = default_config(batch, layers[0], num_queries // num_heads)
    configs = {f"kvcompile INT2 {default.page_splits}+{default.window_splits} splits": default}
    for name, config in configs.items():
        calls = [lambda x=x, c=config: attend(q, x, scaling, c) for x in layers]
        rows.append(timed(name, batch, context, traffic, lambda calls=calls: calls) | {"error": error})
    del layers
    k, v = (random_rows(batch, num_heads, context, MAIN.head_dim) for _ in range(2))
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):

        def sdpa(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)

        rows.append(timed(f"SDPA {name}, bf16", batch, context, k.nbytes + v.nbytes, lambda sdpa=sdpa: [sdpa]))
    return rows


def timed(name: str, batch: int, context: int, traffic: int, calls: Callable[[], list[Callable[[], object]]]) -> dict:
    """One row of the table; a contender that cannot run says why."""
    row: dict = {"what": name, "batch": batch, "context": context, "bytes": traffic}
    try:
        row["us"] = microseconds(calls())
    except Exception as error:  # a baseline may be absent on this GPU
        row["failed"] = f"{type(error).__name__}: {error}"[:200]
    print(row, flush=True)
    return row


def markdown(report: dict) -> str:
    grid, feedback = report["grid"], report["feedback"]
    lines = [
        "# Triton kernels on a GPU",
        "",
        f"{report['gpu']}, torch {report['torch']}, triton {report['triton']}, {report['date']}",
        "",
        f"`{report['command']}`",
        "",
        f"- error feedback: {len(feedback)} random shapes; bytes that differ from the codec on the CPU: "
        f"{sum(r['wrong_bytes'] for r in feedback)}",
        f"- largest error of a rotation: {report['rotation_error_steps']:.3f} bf16 steps",
    ]
    if grid:
        lines += [
            f"- {len(grid)} random shapes; bytes that differ from the codec: {sum(r['wrong_bytes'] for r in grid)} "
            f"(the codec itself, run on this GPU: {sum(r['codec_on_gpu_wrong_bytes'] for r in grid)})",
            f"- largest relative error of decoding against float64: {max(r['decode_error'] for r in grid):.1e}; "
            f"of the log of its weights' sum: {max(r['lse_error'] for r in grid):.1e}",
        ]
    if report["times"]:
        bandwidth = report["read_bandwidth"]
        lines += [f"- read bandwidth: {bandwidth / 1e12:.2f} TB/s", ""]
        lines += ["| batch | context | what | us | GB moved | of bandwidth | error |", "|---|---|---|---|---|---|---|"]
        for r in report["times"]:
            head = f"| {r['batch']} | {r['context']} | {r['what']} |"
            if "us" in r:
                share = r["bytes"] / (r["us"] * 1e-6) / bandwidth
                error = f"{r['error']:.1e}" if "error" in r else ""
                lines.append(f"{head} {r['us']:.1f} | {r['bytes'] / 1e9:.3f} | {share:.0%} | {error} |")
            else:
                lines.append(f"{head} {r['failed']} | | | |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes-per-format", type=int, default=7, help="random shapes per format in the grid")
    parser.add_argument("--longest", type=int, default=5000, help="tokens of the longest row in the grid")
    parser.add_argument("--encode-only", action="store_true", help="leave decoding out: no grid, no times of it")
    args = parser.parse_args()
    torch.manual_seed(0)
    started = time.time()
    report = {
        "gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else "none (interpreter)",
        "torch": torch.__version__,
        "triton": version("triton"),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
        "rotation_error_steps": check_rotation(),
        "feedback": [],
        "grid": [],
        "times": [],
    }
    args.out.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        (args.out / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n")
        (args.out / "gpu_check.md").write_text(markdown(report))

    report["feedback"] = check_feedback(args.shapes_per_format)
    save()
    if not args.encode_only:
        report["grid"] = check_grid(args.shapes_per_format, args.longest)
        save()
    if DEVICE == "cuda":
        report["read_bandwidth"] = read_bandwidth()
        for batch, context, num_queries, num_heads in SHAPES:
            if not args.encode_only:
                report["times"] += time_decode(batch, context, num_queries, num_heads)
            torch.cuda.empty_cache()
            report["times"] += time_encode(batch, context, num_heads)
            torch.cuda.empty_cache()
            save()
    print(markdown(report))
    print(f"{time.time() - started:.0f} s")
    wrong = [r for r in report["feedback"] + report["grid"] if r["wrong_bytes"]]
    wrong += [r for r in report["grid"] if max(r["decode_error"], r["lse_error"]) > LARGEST_ERROR]
    if wrong or report["rotation_error_steps"] > 0.51:
        raise SystemExit(f"{len(wrong)} wrong shapes")


if __name__ == "__main__":
    main()
