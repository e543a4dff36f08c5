"""Attention of one decoding step over packed pages against the best BF16 attention, and what encoding costs, on one GPU.

    python -m benchmarks.kernels --out benchmarks/results/h200 [--shapes A,B,C,D,E,F,G] [--formats kvc,saw,...] [--quick]
    python -m benchmarks.kernels --plot benchmarks/results/h200/kernels.csv

Shapes: B batch rows, K KV heads, H query heads, D head_dim, T tokens, N pages, L layers, W ring slots.

Every contender of a shape runs in one process, takes turns with the others, and is checked first: ours against float64 on the
same codes, the BF16 ones against float64 on the same rows. `attend` is the attention alone with all that it launches, from
rotated queries; `append + attend` is what the runtime launches in a layer: rotate the new q, k and v, store k and v, attend.
Windows of 64 + 256 tokens in BF16 are part of every packed cache, and pages lie scattered. Writes kernels.csv (after every
shape), kernels.md and kernels.svg.
"""

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import gpu
from benchmarks.cases import (
    ATTEND,
    CASES,
    CUDNN,
    FLASH,
    FLASHINFER,
    FORMATS,
    LARGEST_ERROR,
    LARGEST_ERROR_BF16,
    READ_BF16,
    READ_PACKED,
    STEP,
    SWEEP,
    Case,
    random_layers,
    scheme_of,
)
from benchmarks.encoding import measure_chunk, measure_demotion, measure_prefill
from benchmarks.gpu import DEVICE, Call, rows
from benchmarks.report import markdown
from kvcompile.codec import LayerCache
from kvcompile.evaluate.uncalibrated import page_format, random_plan
from kvcompile.kernels import triton_decode
from kvcompile.runtime.backend import TritonBackend

SDPA = {FLASH: SDPBackend.FLASH_ATTENTION, CUDNN: SDPBackend.CUDNN_ATTENTION}


@dataclass
class Contender:
    """Something to time: calls on buffers of their own, and the bytes that one of them has to read."""

    what: str
    calls: list[Call]
    nbytes: int
    format: str = ""
    error: float | None = None
    error_bf16: float | None = None


def packed_contenders(name: str, case: Case) -> list[Contender]:
    """Attention alone, and with the preparation of the query, in one format. Raises where it has no kernel."""
    scheme = scheme_of(name)
    if not triton_decode.supports(page_format(scheme, case.head_dim)):
        raise NotImplementedError("no decode kernel for this format")
    backend, scaling = TritonBackend(), case.head_dim**-0.5
    plan = random_plan(scheme, case.shape, torch.device(DEVICE))
    layers, nbytes = random_layers(scheme, plan, case)
    q_BHTD, k_BKTD, v_BKTD = (rows(case.batch, n, 1, case.head_dim) for n in (case.heads, case.kv_heads, case.kv_heads))

    def prepare(layer: LayerCache) -> Tensor:
        q_BHD = backend.append(q_BHTD, k_BKTD, v_BKTD, plan, layer)
        assert q_BHD is not None
        return q_BHD

    def step(layer: LayerCache) -> tuple[Tensor, Tensor]:
        return backend.attend(prepare(layer), layer, scaling)

    rotated_BHD = prepare(layers[0])
    attended = step(layers[0])
    rounded = attended[0].bfloat16().float(), attended[1]
    checked = sorted({0, case.batch - 1})
    error, error_bf16 = (gpu.decode_errors(x, rotated_BHD, layers[0], scaling, checked)[0] for x in (attended, rounded))
    return [
        Contender(ATTEND, [lambda x=x: backend.attend(rotated_BHD, x, scaling) for x in layers], nbytes, name, error,
                  error_bf16),
        Contender(STEP, [lambda x=x: step(x) for x in layers], nbytes, name, error, error_bf16),
    ]  # fmt: skip


def dense_contenders(case: Case) -> list[Contender]:
    """BF16 attention that never repeats heads: torch's two best backends, and FlashInfer where it is installed."""
    scaling = case.head_dim**-0.5
    q_BHD = rows(case.batch, case.heads, case.head_dim)
    caches = [
        tuple(rows(case.batch, case.kv_heads, case.context, case.head_dim) for _ in "kv")
        for _ in range(gpu.copies(case.bf16_bytes))
    ]
    calls: dict[str, list[Call]] = {}
    for name, backend in SDPA.items():

        def sdpa(k: Tensor, v: Tensor, backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q_BHD[:, :, None], k, v, enable_gqa=True)

        calls[name] = [lambda k=k, v=v, sdpa=sdpa: sdpa(k, v).squeeze(2) for k, v in caches]
    calls |= flashinfer_calls(q_BHD, caches, scaling)
    contenders = []
    for name, sequence in calls.items():
        contender = Contender(name, sequence, case.bf16_bytes)
        try:
            contender.error_bf16 = dense_error(sequence[0](), q_BHD, *caches[0], scaling)
        except Exception as error:  # in_turns will say why again, where the table is made
            print(f"    {name} cannot run: {error}".partition("\n")[0], flush=True)
        contenders.append(contender)
    return contenders


def dense_error(out_BHD: Any, q_BHD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scaling: float) -> float:
    """Largest relative error of the first and the last row against float64 on the same rows."""
    errors = []
    for row in sorted({0, len(q_BHD) - 1}):
        exact_HD, _ = gpu.exact_attention(q_BHD[row], k_BKTD[row], v_BKTD[row], scaling)
        errors.append(gpu.relative_error(out_BHD[row], exact_HD))
    return max(errors)


def flashinfer_calls(
    q_BHD: Tensor, caches: Sequence[tuple[Tensor, ...]], scaling: float, page: int = 64
) -> dict[str, list[Call]]:
    """FlashInfer's paged decode with tensor cores over scattered pages of 64 tokens."""
    try:
        import flashinfer
    except ImportError:
        print("    FlashInfer is not installed: left out", flush=True)
        return {}
    batch, heads, head_dim = q_BHD.shape
    _, kv_heads, context, _ = caches[0][0].shape
    pages = context // page
    order = torch.randperm(batch * pages, device=DEVICE)
    planned: list[Call] = []
    for k_BKTD, v_BKTD in caches:
        pool = [torch.empty(batch * pages, kv_heads, page, head_dim, dtype=q_BHD.dtype, device=DEVICE) for _ in "kv"]
        for paged, x_BKTD in zip(pool, (k_BKTD, v_BKTD), strict=True):
            paged[order] = x_BKTD.unflatten(2, (pages, page)).transpose(1, 2).flatten(0, 1)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE), "HND", use_tensor_cores=True
        )
        wrapper.plan(
            torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * pages, order.int(),
            torch.full((batch,), page, dtype=torch.int32, device=DEVICE), heads, kv_heads, head_dim, page,
            q_data_type=q_BHD.dtype, kv_data_type=q_BHD.dtype, sm_scale=scaling,
        )  # fmt: skip
        planned.append(lambda w=wrapper, p=tuple(pool): w.run(q_BHD, p))
    return {FLASHINFER: planned}


def measure_case(name: str, case: Case, formats: Sequence[str], quick: bool) -> list[dict[str, Any]]:
    """Rows of the CSV for one shape: all contenders, those that failed with the reason."""
    contenders, found = dense_contenders(case), []
    for each in formats:
        try:
            contenders += packed_contenders(each, case)
        except Exception as error:  # the others are to be measured all the same
            note = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            print(f"    {each}: {note}", flush=True)
            found.append({"shape": name, **case._asdict(), "what": STEP, "format": each, "us": math.nan, "note": note})
    plain: dict[str, tuple[str, int]] = {}
    first = next((x for x in contenders if x.what == ATTEND), None)
    for what, nbytes in ((READ_PACKED, first.nbytes if first else 0), (READ_BF16, case.bf16_bytes)):
        for variant, calls in (gpu.reads(nbytes) if nbytes else {}).items():
            plain[f"{what}, {variant}"] = what, nbytes
            contenders.append(Contender(f"{what}, {variant}", calls, nbytes))
    labels = {f"{x.what} {x.format}".strip(): x for x in contenders}
    times, failed = gpu.in_turns({label: x.calls for label, x in labels.items()}, rounds=5 if quick else 9)
    dense = [times[x.what] for x in contenders if x.what in (FLASH, CUDNN, FLASHINFER) and x.what in times]
    seen: set[str] = set()
    for label, x in labels.items():
        what, us = x.what, times.get(label, math.nan)
        if label in plain:  # of the ways to read, the fastest
            what = plain[label][0]
            if what in seen:
                continue
            seen.add(what)
            us = min(
                (times[other] for other, (kind, _) in plain.items() if kind == what and other in times), default=us
            )
        found.append(
            {
                "shape": name, **case._asdict(), "what": what, "format": x.format, "us": us, "bytes": x.nbytes,
                "times_faster": min(dense) / us if dense else math.nan, "byte_ratio": case.bf16_bytes / x.nbytes,
                "error": x.error, "error_bf16": x.error_bf16, "note": failed.get(label, ""),
            }
        )  # fmt: skip
        print(f"    {what:32} {x.format:8} {us:9.2f} us  {found[-1]['times_faster']:5.2f}x  {x.error or x.error_bf16 or 0:.1e}",
              flush=True)  # fmt: skip
    return found


def wrong(found: Sequence[dict[str, Any]]) -> list[str]:
    """Packed contenders that miss the error asked for."""
    return [
        f"{r['shape']} {r['format']}"
        for r in found
        if r.get("error") is not None and (r["error"] > LARGEST_ERROR or r["error_bf16"] > LARGEST_ERROR_BF16)
    ]


def draw(csv: Path) -> None:
    """kernels.svg beside the CSV, where matplotlib is installed."""
    try:
        from benchmarks.plots import draw_kernels
    except ImportError as error:
        print(f"no picture ({error}); draw it later with --plot {csv}", flush=True)
        return
    print(f"drew {draw_kernels(csv)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--plot", type=Path, metavar="CSV", help="only draw the picture of an earlier run")
    parser.add_argument("--shapes", default=",".join(CASES), help="of " + ", ".join(CASES))
    parser.add_argument("--formats", default=",".join(FORMATS), help="of " + ", ".join(FORMATS))
    parser.add_argument("--format-shapes", default="A,B", help="where formats other than kvc are timed")
    parser.add_argument("--quick", action="store_true", help="fewer rounds; no sweep, no encoding")
    options = parser.parse_args()
    if options.plot:
        return draw(options.plot)
    if not options.out:
        parser.error("give --out or --plot")
    torch.manual_seed(0)
    started, found = time.time(), []
    options.out.mkdir(parents=True, exist_ok=True)
    bandwidth = gpu.read_bandwidth()
    print(f"{gpu.machine()}; read bandwidth {bandwidth / 1e12:.2f} TB/s", flush=True)

    def save(new: Sequence[dict[str, Any]]) -> None:
        found.extend({**r, "bandwidth": bandwidth} for r in new)
        gpu.write_csv(options.out / "kernels.csv", found)
        (options.out / "kernels.md").write_text(markdown(found, bandwidth))
        gpu.release()
        print(f"  {time.time() - started:.0f} s", flush=True)

    wanted = options.formats.split(",")
    for name in filter(None, options.shapes.split(",")):
        print(f"{name} {CASES[name].here()}", flush=True)
        formats = wanted if name in options.format_shapes.split(",") else [x for x in wanted if x == "kvc"]
        save(measure_case(name, CASES[name].here(), formats, options.quick))
    if not options.quick:
        print("encoding", flush=True)
        case = CASES["B"].here()
        save([*measure_prefill(case), *measure_chunk(case), *measure_demotion(case)])
        for name, case in SWEEP.items():
            print(f"{name}", flush=True)
            save(measure_case(name, case.here(), ["kvc"], quick=True))
    draw(options.out / "kernels.csv")
    print((options.out / "kernels.md").read_text())
    if too_wrong := wrong(found):
        raise SystemExit(f"errors are too large: {', '.join(too_wrong)}")


if __name__ == "__main__":
    main()
