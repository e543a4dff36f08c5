"""What `benchmarks/kernels.py` found, as Markdown: every table with what issue 4 asks for beside what was reached."""

import math
from collections.abc import Sequence
from typing import Any

from benchmarks import gpu
from benchmarks.cases import (
    ATTEND,
    CASES,
    CUDNN,
    FLASH,
    FLASHINFER,
    LARGEST_ERROR,
    LARGEST_ERROR_BF16,
    READ_BF16,
    READ_PACKED,
    SHARE_OF_BYTES,
    STEP,
    TARGETS,
)
from benchmarks.encoding import DEMOTED_LAYERS, PREFILL


def markdown(found: Sequence[dict[str, Any]], bandwidth: float) -> str:
    """All tables, with what issue 4 asks for beside what was reached."""

    def get(shape: str, what: str, fmt: str = "") -> dict[str, Any]:
        rows = (r for r in found if (r["shape"], r["what"], r.get("format", "")) == (shape, what, fmt))
        return next((r for r in rows if not math.isnan(r["us"])), {})

    def us(row: dict[str, Any]) -> str:
        return "–" if math.isnan(row.get("us", math.nan)) else f"{row['us']:.1f}"

    def times(row: dict[str, Any]) -> str:
        return f"{row['us']:.1f} (**{row['times_faster']:.2f}x**)" if row else "–"

    lines = ["# Decode attention at the memory limit", "", gpu.machine(), "", f"`{gpu.command()}`", ""]
    lines += [f"Read bandwidth: {bandwidth / 1e12:.2f} TB/s (a plain read of 4 GiB). Times in us, CUDA graphs over rotating "
              "buffers, medians, contenders taking turns. x: times faster than the best BF16. Windows of 64 + 256 tokens "
              "in BF16 are included, page tables permuted.", ""]  # fmt: skip
    present = [name for name in CASES if get(name, STEP, "kvc")]
    body = []
    for name in present:
        case, step, alone = CASES[name].here(), get(name, STEP, "kvc"), get(name, ATTEND, "kvc")
        target = [f"{x:.1f}x" for x in TARGETS[name]]
        share = step["bytes"] / step["us"] / bandwidth * 1e6
        body.append(
            [
                f"{name} {case.batch}, {case.context}, {case.heads}/{case.kv_heads}, {case.head_dim}",
                *(us(get(name, what)) for what in (CUDNN, FLASH, FLASHINFER)), times(alone), times(step),
                target[0], target[1] if len(target) > 1 else "", f"{step['byte_ratio']:.2f}x",
                us(get(name, READ_PACKED)), us(get(name, READ_BF16)), f"{share:.0%}", f"{step['error']:.1e}",
                f"{step['error_bf16']:.1e}",
            ]
        )  # fmt: skip
    header = ["shape: batch, context, q/kv heads, head_dim", "SDPA cuDNN", "SDPA flash", "FlashInfer", f"INT2 {ATTEND}",
              f"INT2 {STEP}", "at least", "stretch", "limit by bytes", "plain read, INT2 bytes", "plain read, BF16 bytes",
              "of read bandwidth", "error", "error after bf16"]  # fmt: skip
    lines += ["## INT2, whole-head groups", "", *gpu.table(header, body), ""]
    lines += [f"Errors are the largest of a head's output relative to its norm, against float64 on the same codes; at most "
              f"{LARGEST_ERROR} before and {LARGEST_ERROR_BF16} after rounding to bf16 are asked for. “Of read bandwidth” is of "
              f"`{STEP}`.", ""]  # fmt: skip
    others = [r for r in found if r.get("format") and r["format"] != "kvc" and get(r["shape"], STEP, r["format"]) is r]
    body = [
        [r["shape"], r["format"], us(get(r["shape"], ATTEND, r["format"])), us(r), f"{r['times_faster']:.2f}x",
         f"{r['byte_ratio']:.2f}", f"{r['times_faster'] / r['byte_ratio']:.0%}", f"{r['error']:.1e}"]
        for r in others
    ]  # fmt: skip
    header = ["shape", "format", ATTEND, STEP, "faster than BF16", "bytes: BF16 over packed", "share of that", "error"]
    if body:
        asked = f"Channel-wise keys and INT4 are to reach {SHARE_OF_BYTES:.0%} of their own byte ratio."
        lines += ["## Other formats", "", asked, "", *gpu.table(header, body), ""]
    prefill = [r for r in found if r["shape"] == "prefill"]
    if prefill:
        best = min(r["us"] for r in prefill if r["what"].startswith("prefill attention") and not math.isnan(r["us"]))
        body = [[r["what"], us(r), f"{r['us'] / best:.1%}"] for r in prefill]
        lines += [f"## Encoding {PREFILL} tokens of one layer", "", "At most 10 % of the layer's prefill attention.", "",
                  *gpu.table(["what", "us", "of the best attention"], body), ""]  # fmt: skip
    chunks = [r for r in found if r["shape"] == "chunk"]
    if chunks:
        body = [[r["what"], us(r)] for r in chunks]
        lines += ["## A chunk on a stored history, one layer", "", *gpu.table(["what", "us"], body), ""]
    demotions = [r for r in found if r["shape"] == "demotion"]
    if demotions:
        step = get("B", STEP, "kvc")
        body = []
        for r in demotions:
            each = r["us"] / 64
            share = f"{each / (DEMOTED_LAYERS * step['us']):.2%}" if step else "–"
            body.append([r["what"], us(r), f"{each:.1f}", share])
        asked = (
            "At most 3 % of a decode step; the last column has only the attention of its layers at shape B as the step."
        )
        lines += ["## Demotion, once in 64 steps", "", asked, "",
                  *gpu.table(["what", "us", "us a step", "of the attention of B"], body), ""]  # fmt: skip
    notes = [f"- {r['shape']}, {r['what']} {r.get('format', '')}: {r['note']}" for r in found if r.get("note")]
    return "\n".join([*lines, *(["## Left out", "", *notes, ""] if notes else [])])
