"""What encoding costs: a prefill of 32k tokens beside its attention, and the pages that leave the windows of a batch.

Shapes: K KV heads, H query heads, D head_dim, T tokens, N pages, L layers, B batch rows, W ring slots.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import gpu
from benchmarks.cases import CUDNN, FLASH, Case
from benchmarks.gpu import DEVICE, Call, rows
from kvcompile.evaluate.uncalibrated import geometry_of, random_plan
from kvcompile.runtime.backend import TritonBackend
from kvcompile.runtime.plan import LayerPlan
from kvcompile.scheme import Scheme, load_scheme

PREFILL, DEMOTED_LAYERS, DEMOTED_ROWS = (32768, 36, 32) if DEVICE == "cuda" else (256, 2, 2)


def schemes() -> dict[str, Scheme]:
    """The default scheme under both ways of rounding."""
    nearest = ["key.quantizer.rounding=nearest", "value.quantizer.rounding=nearest"]
    return {"nearest": load_scheme("kvc-int2", nearest), "error feedback": load_scheme("kvc-int2")}


def measure_prefill(case: Case) -> Iterator[dict[str, Any]]:
    """Rows of the CSV: causal attention of one layer with the heads of `case`, and encoding its keys and values."""
    q_BHTD, k_BKTD, v_BKTD = (rows(1, n, PREFILL, case.head_dim) for n in (case.heads, case.kv_heads, case.kv_heads))
    contenders: dict[str, list[Call]] = {}
    for name, kernel in ((FLASH, SDPBackend.FLASH_ATTENTION), (CUDNN, SDPBackend.CUDNN_ATTENTION)):

        def causal(kernel: SDPBackend = kernel) -> Tensor:
            with sdpa_kernel(kernel):
                return torch.nn.functional.scaled_dot_product_attention(
                    q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=True
                )

        contenders[f"prefill attention, {name}"] = [causal]
    for rounding, scheme in schemes().items():
        plan = random_plan(scheme, case.shape, torch.device(DEVICE))
        contenders[f"prefill encoding, {rounding}: pages alone"] = [writer(plan, k_BKTD, v_BKTD, prepare=False)]
        contenders[f"prefill encoding, {rounding}: rotate, centre, write"] = [
            writer(plan, k_BKTD, v_BKTD, prepare=True)
        ]
    times, failed = gpu.in_turns(contenders, rounds=5, replays=2, calls=2)
    for what in contenders:
        us = times.get(what, math.nan)
        print(f"    {what:60} {us:10.1f} us", flush=True)
        sizes = {**case._asdict(), "batch": 1, "context": PREFILL}
        yield {"shape": "prefill", **sizes, "what": what, "us": us, "note": failed.get(what, "")}


def writer(plan: LayerPlan, k_BKTD: Tensor, v_BKTD: Tensor, prepare: bool) -> Call:
    """Write one row's tokens into scattered pages; with `prepare` they are rotated and centred first, as in a prefill."""
    backend, storage = TritonBackend(), plan.storage
    blocks, kv_heads = k_BKTD.shape[2] // storage.fmt.tokens, k_BKTD.shape[1]
    pages_PKX = torch.empty(blocks, kv_heads, storage.fmt.page_bytes, dtype=torch.uint8, device=DEVICE)
    ids_N = torch.randperm(blocks, device=DEVICE)

    def write() -> None:
        k, v = k_BKTD, v_BKTD
        if prepare:
            k, v = backend.stored_rows(k, v, plan)
        k_NKTD, v_NKTD = (x[0].unflatten(1, (blocks, -1)).transpose(0, 1) for x in (k, v))
        backend.write_pages(k_NKTD, v_NKTD, storage.fmt, storage.tables, pages_PKX, ids_N)

    return write


def measure_demotion(case: Case) -> Iterator[dict[str, Any]]:
    """Rows of the CSV: one page per row and head of every layer, called as the runtime calls it, outside of the graph."""
    for rounding, scheme in schemes().items():
        backend, geometry = TritonBackend(), geometry_of(scheme, case.shape)
        storages = [random_plan(scheme, case.shape, torch.device(DEVICE)).storage] * DEMOTED_LAYERS
        k_LBKWD, v_LBKWD = (
            rows(DEMOTED_LAYERS, DEMOTED_ROWS, case.kv_heads, geometry.ring, case.head_dim) for _ in "kv"
        )
        shape = DEMOTED_LAYERS, DEMOTED_ROWS, case.kv_heads, geometry.page_bytes
        pages_LPKX = torch.empty(shape, dtype=torch.uint8, device=DEVICE)
        row_N = torch.arange(DEMOTED_ROWS, device=DEVICE)
        place_N = row_N % (geometry.ring // geometry.block)

        def demote(
            args: tuple[Any, ...] = (storages, k_LBKWD, v_LBKWD, row_N, place_N, pages_LPKX, row_N),
            backend: TritonBackend = backend,
        ) -> None:
            backend.demote(*args)

        demote()
        us = sorted(gpu.elapsed_us(demote, 10) for _ in range(5))[2]
        what = f"demotion, {rounding}: {DEMOTED_LAYERS} layers, {DEMOTED_ROWS} rows, eager"
        print(f"    {what:60} {us:10.1f} us", flush=True)
        yield {"shape": "demotion", **case._asdict(), "batch": DEMOTED_ROWS, "context": 0, "what": what, "us": us}
