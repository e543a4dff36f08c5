"""Are the Triton kernels right on this GPU, over shapes drawn at random? Writes gpu_check.csv and gpu_check.md.

    python -m benchmarks.gpu_check --out benchmarks/results/h200 [--draws 300] [--longest 5000]

Every draw takes the next format and a random shape: batch, KV heads, ragged lengths (also 0 and 1), sink, ring, splits. Encoding
(nearest, and with error feedback) and decoded history are compared byte for byte with the codec on the CPU; decode attention and
a chunk on the history with float64 on the same codes. Without a GPU Triton's interpreter runs the kernels.
"""

import argparse
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import gpu
from benchmarks.gpu import DEVICE, rows
from kvcompile.codec import LayerCache, PageFormat, PageTables, RowFormat, RowTables, encode_pages, feedback_factor
from kvcompile.kernels import triton_encode, triton_history
from kvcompile.kernels.triton_decode import DecodeConfig, attend
from kvcompile.kernels.triton_encode import rotate_rows, write_pages


def token_format(head_dim: int, key: tuple[int, int], value: tuple[int, int], **both: Any) -> PageFormat:
    """Keys and values by token; (bits, group_size) of each."""
    tokens = both.pop("tokens", 64)
    return PageFormat(RowFormat(head_dim, *key, **both), RowFormat(head_dim, *value, **both), tokens)


def channel_format(head_dim: int, bits: int, group: int, value: tuple[int, int], **key: Any) -> PageFormat:
    """Keys by channel in groups of tokens, in pages of 128 tokens."""
    return PageFormat(RowFormat(head_dim, bits, group, axis="channel", **key), RowFormat(head_dim, *value), 128)


FORMATS = [  # with the query heads of a KV head
    (token_format(128, (2, 128), (2, 128)), 4),
    (token_format(128, (2, 128), (2, 128), rounding="error_feedback"), 4),
    (token_format(128, (2, 128), (2, 128)), 1),
    (token_format(128, (2, 128), (2, 128), rounding="error_feedback", zero_point="integer"), 8),
    (token_format(128, (2, 32), (2, 64), tokens=128), 5),
    (token_format(128, (2, 64), (2, 64), rounding="error_feedback"), 4),
    (token_format(128, (4, 128), (4, 128)), 4),
    (token_format(128, (1, 128), (2, 32), tokens=128), 2),
    (token_format(64, (2, 64), (2, 64), zero_point="integer"), 7),
    (token_format(64, (4, 16), (2, 32), rounding="error_feedback"), 16),
    (token_format(16, (2, 16), (2, 16)), 3),
    (token_format(80, (4, 40), (2, 16)), 1),
    (token_format(80, (2, 80), (4, 80), rounding="error_feedback"), 4),
    (token_format(96, (2, 96), (2, 32)), 6),
    (token_format(96, (4, 48), (4, 96), tokens=128), 3),
    (token_format(256, (2, 256), (2, 256)), 8),
    (token_format(256, (4, 64), (2, 128)), 2),
    (channel_format(128, 2, 32, (2, 32)), 4),
    (channel_format(128, 2, 128, (2, 128)), 4),
    (channel_format(128, 2, 32, (2, 32), token_scale="l2", zero_point="integer"), 8),
    (channel_format(128, 4, 32, (4, 32)), 4),
    (channel_format(64, 1, 64, (1, 64)), 2),
    (channel_format(96, 2, 32, (2, 96), token_scale="max"), 3),
]
LARGEST_ERROR, LARGEST_ERROR_BF16 = 1.5e-3, 3e-3
CHUNK_ERROR = 2e-2
"""BF16 products and weights, relative to the norm of a head's output, which may nearly cancel."""


def awkward_rows(num_blocks: int, num_heads: int, fmt: PageFormat, magnitude: float) -> Tensor:
    """Rows ``[N, K, T, D]`` with outlier channels; the first of every block are degenerate."""
    x_NKTD = rows(num_blocks, num_heads, fmt.tokens, fmt.head_dim) * magnitude
    x_NKTD *= torch.randn(fmt.head_dim, device=DEVICE).exp().bfloat16()
    x_NKTD[..., 0, :] = 0.0
    x_NKTD[..., 1, :] = 1.7
    x_NKTD[..., 2, :] = 1e-39
    x_NKTD[..., 3, :] *= 1e-38
    if fmt.key.axis == "token" and fmt.key.token_scale == "none":
        largest = 3e38 if fmt.key.rounding == "nearest" else 1e38  # error feedback wants finite scales
        x_NKTD[..., 4, 0], x_NKTD[..., 4, 1] = largest, -largest
    x_NKTD[..., 5, :] = (torch.arange(fmt.head_dim, device=DEVICE) % 7 * 0.5).bfloat16()
    return x_NKTD.clamp(-1e38, 1e38) if fmt.key.rounding == "error_feedback" else x_NKTD


def random_tables(fmt: PageFormat, num_heads: int, extreme: bool) -> PageTables:
    """Factors of error feedback on the CPU: of random metrics, or with elements anywhere in their range."""

    def factor() -> Tensor:
        if extreme:
            return torch.randint(-127, 128, (num_heads, fmt.head_dim, fmt.head_dim)).triu(1) / 64
        samples = torch.randn(num_heads, 4 * fmt.head_dim, fmt.head_dim, dtype=torch.float64).cumsum(-1)
        return feedback_factor(samples.mT @ samples, damping=0.2)

    fed = fmt.key.rounding == "error_feedback"
    return PageTables(*(RowTables(factor() if fed else None) for _ in range(2)))


def moved(tables: PageTables) -> PageTables:
    """The same on the device."""
    factors = (None if x.feedback is None else x.feedback.to(DEVICE) for x in (tables.key, tables.value))
    return PageTables(*map(RowTables, factors))


def encoded(k_NKTD: Tensor, v_NKTD: Tensor, fmt: PageFormat, tables: PageTables) -> Tensor:
    """Pages by the kernel where there is one, else by the codec on the CPU; uint8 ``[N, K, X]`` on the device."""
    if not triton_encode.supports(fmt):
        return encode_pages(k_NKTD.cpu(), v_NKTD.cpu(), fmt, tables).to(DEVICE)
    pages = torch.zeros(*k_NKTD.shape[:2], fmt.page_bytes, dtype=torch.uint8, device=DEVICE)
    write_pages(k_NKTD, v_NKTD, fmt, moved(tables), pages, torch.arange(len(pages), dtype=torch.int32, device=DEVICE))
    return pages


def build_layer(fmt: PageFormat, num_heads: int, num_tokens: list[int], sink: int, ring: int) -> LayerCache:
    """Random tokens; all whole blocks behind the sink in pages, except that odd rows leave some in the ring."""
    num_pages = [max(n - sink, 0) // fmt.tokens for n in num_tokens]
    num_pages = [max(n - row % 2 * (ring // fmt.tokens - 1), 0) for row, n in enumerate(num_pages)]
    pool = sum(num_pages) + 3
    nearest = replace(fmt, key=replace(fmt.key, rounding="nearest"), value=replace(fmt.value, rounding="nearest"))
    k_NKTD, v_NKTD = (rows(pool, num_heads, fmt.tokens, fmt.head_dim) for _ in "kv")
    pages = encoded(k_NKTD, v_NKTD + 0.3, nearest, PageTables())
    ids = torch.randperm(pool, device=DEVICE).int()
    table = torch.full((len(num_tokens), max(num_pages) + 2), 2**30, dtype=torch.int32, device=DEVICE)
    for row, n in enumerate(num_pages):
        table[row, :n], ids = ids[:n], ids[n:]
    counts = (torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in (num_pages, num_tokens))
    windows = (rows(len(num_tokens), num_heads, slots, fmt.head_dim) for slots in (sink, sink, ring, ring))
    return LayerCache(fmt, pages, table, *counts, *windows)


def check_encoding(fmt: PageFormat, rng: random.Random) -> dict[str, Any]:
    """Bytes of a few blocks that differ from the codec's."""
    if not triton_encode.supports(fmt):
        return {"wrong_bytes": None}
    k_clip, v_clip = rng.choice([1.0, 0.96, 0.5]), rng.choice([1.0, 0.92, 0.985])
    fmt = replace(fmt, key=replace(fmt.key, clip_ratio=k_clip), value=replace(fmt.value, clip_ratio=v_clip))
    num_heads, num_blocks = rng.randint(1, 4), rng.randint(1, 5)
    magnitude = 10.0 ** rng.choice([-20, -3, 0, 0, 3]) if fmt.key.rounding == "error_feedback" else 1.0
    k_NKTD, v_NKTD = (awkward_rows(num_blocks, num_heads, fmt, magnitude) for _ in "kv")
    tables = random_tables(fmt, num_heads, extreme=rng.random() < 0.5)
    found = encoded(k_NKTD, v_NKTD, fmt, tables).cpu()
    return {"wrong_bytes": int((found != encode_pages(k_NKTD.cpu(), v_NKTD.cpu(), fmt, tables)).sum())}


def check_reading(fmt: PageFormat, groups: int, rng: random.Random, longest: int) -> dict[str, Any]:
    """Decode attention, decoded history, and a chunk on it."""
    num_heads, batch = rng.randint(1, 4), rng.randint(1, 5)
    tokens = [rng.choice([0, 1, 63, rng.randint(0, longest)]) for _ in range(batch)]
    sink, ring = rng.choice([0, 1, 64, 70]), fmt.tokens * rng.choice([1, 2, 5])
    layer, scaling = build_layer(fmt, num_heads, tokens, sink, ring), fmt.head_dim**-0.5
    q_BHD = rows(batch, num_heads * groups, fmt.head_dim)
    splits = rng.choice([5, 8, 46])  # few kernels: merged by the last program, or by a second launch
    attended = attend(q_BHD, layer, scaling, rng.choice([None, DecodeConfig(splits)]))
    rounded = attended[0].bfloat16().float(), attended[1]
    error, lse_error = gpu.decode_errors(attended, q_BHD, layer, scaling, range(batch))
    row = rng.randrange(batch)
    found, expected = triton_history.history_rows(layer, row), layer.dense_row(row)
    unequal = sum(int((x != y.bfloat16()).sum()) for x, y in zip(found, expected, strict=True))
    return {
        "kv_heads": num_heads, "tokens": " ".join(map(str, tokens)), "sink": sink, "ring": ring, "decode_error": error,
        "decode_error_bf16": gpu.decode_errors(rounded, q_BHD, layer, scaling, range(batch))[0], "lse_error": lse_error,
        "wrong_history": unequal, "chunk_error": chunk_error(layer, row, groups, scaling, rng.randint(2, 70)),
    }  # fmt: skip


def chunk_error(layer: LayerCache, row: int, groups: int, scaling: float, length: int) -> float:
    """Largest relative error of a chunk's outputs against float64 on the same rows."""
    num_heads, head_dim = layer.pages_PKX.shape[1], layer.fmt.head_dim
    q_HTD, k_KTD, v_KTD = (rows(n, length, head_dim) for n in (num_heads * groups, num_heads, num_heads))
    out_HTD = triton_history.attend_chunk(q_HTD, k_KTD, v_KTD, layer, row, scaling)
    k, v = (torch.cat([x, y.float()], dim=1) for x, y in zip(layer.dense_row(row), (k_KTD, v_KTD), strict=True))
    past = k.shape[1] - length
    exact = (
        gpu.exact_attention(q_HTD[:, t], k[:, : past + t + 1], v[:, : past + t + 1], scaling)[0] for t in range(length)
    )
    return max(gpu.relative_error(out_HTD[:, t], x_HD) for t, x_HD in enumerate(exact))


def check_rotation() -> float:
    """Largest error of `rotate_rows` in bf16 steps (half a step is perfect rounding)."""
    largest = 0.0
    for head_dim, num_heads, groups, num_tokens in [(128, 8, 4, 1), (128, 2, 1, 77), (80, 3, 2, 5), (256, 1, 2, 33)]:
        x = rows(2, num_heads * groups, num_tokens, head_dim)
        r = torch.linalg.qr(torch.randn(num_heads, head_dim, head_dim, device=DEVICE)).Q
        exact = x.double() @ r.double().repeat_interleave(groups, dim=0)
        step = exact.abs().clamp_min(0.1).log2().floor().exp2() * 2**-7
        largest = max(largest, ((rotate_rows(x, r).double() - exact) / step).abs().max().item())
    return largest


def is_wrong(r: dict[str, Any]) -> bool:
    return bool(
        r["wrong_bytes"] or r["wrong_history"] or max(r["decode_error"], r["lse_error"]) > LARGEST_ERROR
        or r["decode_error_bf16"] > LARGEST_ERROR_BF16 or r["chunk_error"] > CHUNK_ERROR
    )  # fmt: skip


def check_draw(draw: int, longest: int) -> dict[str, Any]:
    """One random shape of a format, the same in every run."""
    torch.manual_seed(draw)
    rng = random.Random(draw)
    fmt, groups = FORMATS[draw % len(FORMATS)]
    key, value = fmt.key, fmt.value
    shape = {
        "head_dim": fmt.head_dim, "key": f"{key.bits} bits, {key.axis} {key.group_size}, {key.token_scale}",
        "value": f"{value.bits} bits, {value.group_size}", "zero_point": key.zero_point, "rounding": key.rounding,
        "page_tokens": fmt.tokens, "groups": groups,
    }  # fmt: skip
    return shape | check_encoding(fmt, rng) | check_reading(fmt, groups, rng, longest)


def markdown(found: Sequence[dict[str, Any]], rotation: float) -> str:
    def largest(name: str) -> float:
        return max(r[name] for r in found)

    coded = [r for r in found if r["wrong_bytes"] is not None]
    fed = [r for r in coded if r["rounding"] == "error_feedback"]
    lines = [
        "# Triton kernels on a GPU: random odd shapes", "", gpu.machine(), "", f"`{gpu.command()}`", "",
        f"- {len(found)} draws of {len(FORMATS)} formats; wrong: {sum(map(is_wrong, found))}",
        f"- pages encoded in {len(coded)} of them ({len(fed)} with error feedback); bytes that differ from the codec on the "
        f"CPU: {sum(r['wrong_bytes'] for r in coded)}",
        f"- decode attention, largest relative error against float64: {largest('decode_error'):.1e}, rounded to BF16 "
        f"{largest('decode_error_bf16'):.1e}; of the log of the weights' sum {largest('lse_error'):.1e}",
        f"- history decoded to BF16: {sum(r['wrong_history'] for r in found)} elements differ from the codec; chunks on it, "
        f"largest relative error {largest('chunk_error'):.1e}",
        f"- largest error of a rotation: {rotation:.3f} BF16 steps",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--longest", type=int, default=5000, help="tokens of the longest row")
    options = parser.parse_args()
    started, found = time.time(), []
    rotation = check_rotation()
    options.out.mkdir(parents=True, exist_ok=True)
    draws = range(options.draws), [options.longest] * options.draws
    with ProcessPoolExecutor(os.cpu_count() if gpu.DEVICE == "cuda" else 1, get_context("spawn")) as pool:
        for draw, checked in enumerate(pool.map(check_draw, *draws)):
            found.append(checked)
            if is_wrong(checked) or draw % 20 == 0:
                print(f"{time.time() - started:.0f} s, draw {draw}: {checked}", flush=True)
            gpu.write_csv(options.out / "gpu_check.csv", found)
    (options.out / "gpu_check.md").write_text(markdown(found, rotation))
    print(markdown(found, rotation), f"{time.time() - started:.0f} s")
    if rotation > 0.51 or any(map(is_wrong, found)):
        raise SystemExit("some draws are wrong")


if __name__ == "__main__":
    main()
