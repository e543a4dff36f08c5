"""Decode attention over the BF16 windows, in Triton: the part of a split of `triton_decode`.

Shapes in a kernel: G query heads of a KV head (PG padded), D head_dim, T tokens of a tile. Queries and weights go through tensor
cores as pairs of bfloat16.
"""
# mypy: allow-untyped-defs, disable-error-code="assignment"

import triton
import triton.language as tl

from kvcompile.kernels.triton_encode import as_float
from kvcompile.kernels.triton_merge import LOWEST, store_stats
from kvcompile.kernels.triton_operands import bf16_dot, bf16_pairs, loop_end


@triton.jit
def _window_step(
    q_pairs, m_G, l_G, acc_DG, k_ptr, v_ptr, k_stride_t, v_stride_t, first_slot, live_T,
    PG: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """One online-softmax step over a tile of BF16 tokens."""
    d = tl.arange(0, WIDTH)
    t = tl.arange(0, T)
    live_TD = live_T[:, None] & (d < D)[None, :]
    live_DT = live_T[None, :] & (d < D)[:, None]
    k_TD = tl.load(k_ptr + first_slot * k_stride_t + (t[:, None] * k_stride_t + d[None, :]), mask=live_TD, other=0.0)
    v_DT = tl.load(v_ptr + first_slot * v_stride_t + (t[None, :] * v_stride_t + d[:, None]), mask=live_DT, other=0.0)
    logits_TG = tl.where(live_T[:, None], bf16_dot(k_TD, q_pairs, T, PG), float("-inf"))
    new_m_G = tl.maximum(m_G, tl.max(logits_TG, axis=0))
    p_TG = tl.exp2(logits_TG - new_m_G[None, :])
    old_G = tl.exp2(m_G - new_m_G)
    l_G = l_G * old_G + tl.sum(p_TG, axis=0)
    acc_DG = acc_DG * old_G[None, :] + bf16_dot(v_DT, bf16_pairs(p_TG, T, PG), WIDTH, PG)
    return new_m_G, l_G, acc_DG


@triton.jit
def attend_windows(
    q_ptr, q_stride_h, sink_k_ptr, sink_v_ptr, recent_k_ptr, recent_v_ptr, out_ptr, stats_ptr,
    sink_k_stride_t, sink_v_stride_t, recent_k_stride_t, recent_v_stride_t,
    num_sink, num_recent, first_slot, ring, first_tile, end_tile, scaling,
    G: tl.constexpr, PG: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Attention over tiles `first_tile` to `end_tile`: those of live sink slots, then those of live ring slots.

    A ring is whole pages and a tile divides a page, so that a tile never wraps.
    """
    d = tl.arange(0, WIDTH)
    t = tl.arange(0, T)
    g = tl.arange(0, PG)
    live_DG = (d < D)[:, None] & (g < G)[None, :]
    q_DG = as_float(tl.load(q_ptr + g[None, :] * q_stride_h + d[:, None], mask=live_DG, other=0.0)) * scaling
    q_pairs = bf16_pairs(q_DG, WIDTH, PG)
    m_G = tl.full([PG], LOWEST, tl.float32)
    l_G = tl.zeros([PG], tl.float32)
    acc_DG = tl.zeros([WIDTH, PG], tl.float32)
    sink_tiles = (num_sink + T - 1) // T
    # Two stages, not more: these buffers must not outgrow those of the pages, which decide how many programs an SM holds.
    for tile in tl.range(loop_end(first_tile), loop_end(tl.minimum(end_tile, sink_tiles)), num_stages=2):
        live_T = tile * T + t < num_sink
        m_G, l_G, acc_DG = _window_step(
            q_pairs, m_G, l_G, acc_DG, sink_k_ptr, sink_v_ptr, sink_k_stride_t, sink_v_stride_t, tile * T, live_T,
            PG, D, WIDTH, T,
        )  # fmt: skip
    for tile in tl.range(
        loop_end(tl.maximum(first_tile - sink_tiles, 0)), loop_end(end_tile - sink_tiles), num_stages=2
    ):
        live_T = tile * T + t < num_recent
        m_G, l_G, acc_DG = _window_step(
            q_pairs, m_G, l_G, acc_DG, recent_k_ptr, recent_v_ptr, recent_k_stride_t, recent_v_stride_t,
            (first_slot + tile * T) % ring, live_T, PG, D, WIDTH, T,
        )  # fmt: skip
    tl.store(out_ptr + g[None, :] * D + d[:, None], acc_DG, mask=live_DG)
    store_stats(stats_ptr, m_G, l_G, g, G)
