"""One Triton launch per layer for the new token of every row: rotate q, k and v, centre k and v, store them in their windows.

Shapes: B batch rows, K KV heads, G query heads per KV head, H = K G, D head_dim, S sink slots, W ring slots; in a kernel R is a
tile of 16 rows and C a block of output channels. The rows of a KV head are its B keys, its B values, or its B G queries.

What is stored equals `CodecBackend.stored_rows`, as closely as `triton_rows` says.
"""
# mypy: allow-untyped-defs, disable-error-code="assignment, misc"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from kvcompile.codec import LayerCache
from kvcompile.kernels.triton_encode import to_bf16
from kvcompile.kernels.triton_launch import starts_early
from kvcompile.kernels.triton_rows import FLOAT_STEP, RowMap, mapped

_ROWS = 16
_CHANNELS = 32


@dataclass(frozen=True)
class TokenMaps:
    """What a layer does to new rows, as the kernel reads it; None where nothing is done."""

    query: RowMap
    key: RowMap
    value: RowMap

    @classmethod
    def of(
        cls,
        query_KDD: Tensor | None,
        key_KDD: Tensor | None,
        value_KDD: Tensor | None,
        key_mean_KD: Tensor | None,
        value_mean_KD: Tensor | None,
    ) -> "TokenMaps":
        """From float32 rotations and means; queries and keys with one rotation keep one copy of it."""
        key = RowMap.of(key_KDD, key_mean_KD)
        query = RowMap(key.r_KDD, key.halves_2KDD) if query_KDD is key_KDD else RowMap.of(query_KDD)
        return cls(query, key, RowMap.of(value_KDD, value_mean_KD))


@triton.jit
def _store_row(
    y_RC, row_R, live_R, column_C, head, num_tokens_ptr, sink_ptr, recent_ptr, sink, ring,
    sink_stride_b, sink_stride_k, sink_stride_t, recent_stride_b, recent_stride_k, recent_stride_t, D: tl.constexpr,
):  # fmt: skip
    """Round to bfloat16 and write each row into the slot of its last token: sink slot i, or ring slot (i - S) % W."""
    index_R = tl.load(num_tokens_ptr + row_R, mask=live_R, other=0) - 1
    young_R = index_R < sink
    y_RC = to_bf16(y_RC)
    live_RC = (live_R & (index_R >= 0))[:, None] & (column_C < D)[None, :]
    place_R = row_R * sink_stride_b + head * sink_stride_k + index_R * sink_stride_t
    tl.store(sink_ptr + place_R[:, None] + column_C[None, :], y_RC, mask=live_RC & young_R[:, None])
    slot_R = tl.maximum(index_R - sink, 0) % ring
    place_R = row_R * recent_stride_b + head * recent_stride_k + slot_R * recent_stride_t
    tl.store(recent_ptr + place_R[:, None] + column_C[None, :], y_RC, mask=live_RC & (young_R == 0)[:, None])


@triton.jit(do_not_specialize=["batch", "query_tiles", "row_tiles", "sink", "ring"])
def _append_kernel(
    q_ptr, k_ptr, v_ptr, rq_ptr, rk_ptr, rv_ptr, mean_k_ptr, mean_v_ptr, out_ptr, num_tokens_ptr,
    sink_k_ptr, sink_v_ptr, recent_k_ptr, recent_v_ptr, batch, query_tiles, row_tiles, sink, ring, half_stride,
    q_stride_b, q_stride_h, k_stride_b, k_stride_h, v_stride_b, v_stride_h,
    sink_stride_b, sink_stride_k, sink_stride_t, recent_stride_b, recent_stride_k, recent_stride_t,
    G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, STEP: tl.constexpr,
    ROTATE_Q: tl.constexpr, ROTATE_K: tl.constexpr, ROTATE_V: tl.constexpr, CENTER_K: tl.constexpr,
    CENTER_V: tl.constexpr, HALVES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per (block of channels, KV head, tile of rows: first those of queries, then of keys, then of values)."""
    if EARLY:
        gdc_wait()  # attention is not let in before the end: its programs would crowd where there are none of these
    column_C = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    head = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(2)
    if tile < query_tiles:
        row_R = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        live_R = row_R < batch * G
        query_R = head * G + row_R % G
        y_RC = mapped(
            q_ptr + row_R // G * q_stride_b + query_R * q_stride_h, live_R, rq_ptr, half_stride, q_ptr, head, column_C,
            D, ROWS, CHANNELS, STEP, ROTATE_Q, False, HALVES,
        )  # fmt: skip
        place_R = (row_R // G * tl.num_programs(1) * G + query_R) * D
        live_RC = live_R[:, None] & (column_C < D)[None, :]
        tl.store(out_ptr + place_R[:, None] + column_C[None, :], y_RC, mask=live_RC)
    elif tile < query_tiles + row_tiles:
        row_R = ((tile - query_tiles) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        live_R = row_R < batch
        y_RC = mapped(
            k_ptr + row_R * k_stride_b + head * k_stride_h, live_R, rk_ptr, half_stride, mean_k_ptr, head, column_C,
            D, ROWS, CHANNELS, STEP, ROTATE_K, CENTER_K, HALVES,
        )  # fmt: skip
        _store_row(
            y_RC, row_R, live_R, column_C, head, num_tokens_ptr, sink_k_ptr, recent_k_ptr, sink, ring,
            sink_stride_b, sink_stride_k, sink_stride_t, recent_stride_b, recent_stride_k, recent_stride_t, D,
        )  # fmt: skip
    else:
        row_R = ((tile - query_tiles - row_tiles) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        live_R = row_R < batch
        y_RC = mapped(
            v_ptr + row_R * v_stride_b + head * v_stride_h, live_R, rv_ptr, half_stride, mean_v_ptr, head, column_C,
            D, ROWS, CHANNELS, STEP, ROTATE_V, CENTER_V, HALVES,
        )  # fmt: skip
        _store_row(
            y_RC, row_R, live_R, column_C, head, num_tokens_ptr, sink_v_ptr, recent_v_ptr, sink, ring,
            sink_stride_b, sink_stride_k, sink_stride_t, recent_stride_b, recent_stride_k, recent_stride_t, D,
        )  # fmt: skip


def append_token(q_BHD: Tensor, k_BKD: Tensor, v_BKD: Tensor, maps: TokenMaps, layer: LayerCache) -> Tensor:
    """Store the last counted token of every row of `layer` in its window slot; the rotated queries, float32 ``[B, H, D]``.

    Lengths are read on the device only, so the call may be captured into a CUDA graph; a row of no tokens stores nothing.
    Raises ValueError for rows that do not fit the layer, or whose last dimension is not contiguous.
    """
    batch, num_queries, head_dim = q_BHD.shape
    num_heads = layer.sink_k_BKSD.shape[1]
    expected = (batch, num_heads, head_dim)
    if num_queries % num_heads or k_BKD.shape != expected or v_BKD.shape != expected:
        raise ValueError(f"queries {[*q_BHD.shape]}, keys {[*k_BKD.shape]} and values {[*v_BKD.shape]} do not fit")
    windows = (layer.sink_k_BKSD, layer.sink_v_BKSD, layer.recent_k_BKWD, layer.recent_v_BKWD)
    for x in windows:
        if x.shape[:2] != expected[:2] or x.shape[3] != head_dim:
            raise ValueError(f"a window {[*x.shape]} does not fit keys {[*k_BKD.shape]}")
    for x in (q_BHD, k_BKD, v_BKD, *windows):
        if x.stride(-1) != 1:
            raise ValueError(f"the last dimension must be contiguous, strides are {x.stride()}")
    for x, y in (windows[:2], windows[2:]):
        if x.stride() != y.stride():
            raise ValueError(
                f"windows of keys and of values must have the same strides, not {x.stride()}, {y.stride()}"
            )
    out_BHD = torch.empty((batch, num_queries, head_dim), dtype=torch.float32, device=q_BHD.device)
    if not batch:
        return out_BHD
    groups = num_queries // num_heads
    halves = q_BHD.dtype == k_BKD.dtype == v_BKD.dtype == torch.bfloat16
    rotations = [m.halves_2KDD if halves else m.r_KDD for m in (maps.query, maps.key, maps.value)]
    width = max(16, triton.next_power_of_2(head_dim))
    channels = min(_CHANNELS, width)
    query_tiles, row_tiles = triton.cdiv(batch * groups, _ROWS), triton.cdiv(batch, _ROWS)
    early = starts_early(q_BHD.device)
    _append_kernel[(triton.cdiv(head_dim, channels), num_heads, query_tiles + 2 * row_tiles)](
        q_BHD, k_BKD, v_BKD, *(q_BHD if r is None else r for r in rotations),
        *(out_BHD if m.mean_KD is None else m.mean_KD for m in (maps.key, maps.value)), out_BHD, layer.num_tokens_B,
        *windows, batch, query_tiles, row_tiles, layer.sink_k_BKSD.shape[2], layer.recent_k_BKWD.shape[2],
        num_heads * head_dim * head_dim,
        *q_BHD.stride()[:2], *k_BKD.stride()[:2], *v_BKD.stride()[:2],
        *layer.sink_k_BKSD.stride()[:3], *layer.recent_k_BKWD.stride()[:3],
        G=groups, D=head_dim, ROWS=_ROWS, CHANNELS=channels, STEP=width if halves else FLOAT_STEP,
        ROTATE_Q=rotations[0] is not None, ROTATE_K=rotations[1] is not None, ROTATE_V=rotations[2] is not None,
        CENTER_K=maps.key.mean_KD is not None, CENTER_V=maps.value.mean_KD is not None, HALVES=halves, EARLY=early, num_warps=4,
        launch_pdl=early,
    )  # fmt: skip
    return out_BHD
