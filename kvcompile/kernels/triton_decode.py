"""Split-KV decode attention over packed pages and the BF16 windows: the Triton kernel that means `codec.attend_layer`.

Shapes: B batch rows, K KV heads, G query heads per KV head (padded to a power of two in a kernel), H = K G, D head_dim,
P pages, N page-table columns, S sink slots, W ring slots, X page bytes, Z splits; in a kernel T tokens of a tile, C
channels of a chunk (one code of every byte, D bits / 8, padded), R = 2 G columns of (high, low) pairs of numbers.

Launch 1, grid (B K, Z): the first splits divide the row's pages by the row's own length, read on the device; the last
ones divide the tiles of the windows. Launch 2 merges. Shapes alone fix the grid, so a CUDA graph may hold it.

Arithmetic on pages: codes are int8 tensor-core operands, never dequantized. The query and the weights `p` are fixed
point numbers of 15 bits in two int8 columns; scale and zero point are factored out, per group:
`q . k = s (q . c - z sum q)` and `sum_t p v = sum_t (p s) c - sum_t p s z`.
Fixed point is relative to the tile's own largest `p s`, so that a tile with little weight keeps its precision.
"""
# ruff: noqa: B007, RUF005 - a kernel's tuples grow by `+` in static loops: Triton knows no starred elements
# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcompile.codec.layer import LayerCache
from kvcompile.codec.page import PAGE_TOKENS, PageFormat
from kvcompile.kernels.triton_encode import as_float, bf16_bits, to_bf16

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_STEP_TOKENS = tl.constexpr(PAGE_TOKENS)  # tokens of a page per step; a page has a multiple
_LOG2_E = 1.4426950408889634
_LN_2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True)
class DecodeConfig:
    """What tuning may change. `page_splits` and `window_splits` share a row's pages and the tiles of its windows.

    More than 2 warps turn the dots into WGMMA, on whose narrow B operand triton 3.9's compiler aborts (3.6's does not).
    """

    page_splits: int
    window_splits: int
    table_block: int = 64  # page ids loaded at once
    window_tile: int = 16  # tokens of a window per step; its buffers must not outgrow those of the pages
    num_warps: int = 1
    num_stages: int = 3


def default_config(batch: int, layer: LayerCache) -> DecodeConfig:
    """Enough programs for every SM (8 of one warp each), from shapes alone."""
    num_heads = layer.pages_PKX.shape[1]
    window_tokens = layer.sink_k_BKSD.shape[2] + layer.recent_k_BKWD.shape[2]
    splits = max(1, 8 * _num_sms(layer.pages_PKX.device) // (batch * num_heads))
    return DecodeConfig(
        page_splits=max(1, min(splits, layer.table_BN.shape[1])),
        window_splits=max(1, min(splits, triton.cdiv(window_tokens, PAGE_TOKENS))),
    )


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _loop_end(n):
    """`n` as the end of a loop: with numpy >= 2.4 the interpreter of triton 3.6 takes no tensor (triton #9171)."""
    if _INTERPRETED:
        return n.handle.data.item()
    else:
        return n


@triton.jit
def _codes(packed, i: tl.constexpr, BITS: tl.constexpr):
    """Codes i of all bytes, as int8."""
    if _INTERPRETED:
        return ((packed >> (BITS * i)) & (2**BITS - 1)).to(tl.int8)
    elif BITS == 4 and i == 0:
        return _four_bytes(packed, "and.b32 $0, $1, 0x0f0f0f0f;")
    elif BITS == 4:
        return _four_bytes(packed, "{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x0f0f0f0f; }")
    elif i == 0:
        return _four_bytes(packed, "and.b32 $0, $1, 0x03030303;")
    elif i == 1:
        return _four_bytes(packed, "{ .reg .b32 t; shr.u32 t, $1, 2; and.b32 $0, t, 0x03030303; }")
    elif i == 2:
        return _four_bytes(packed, "{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x03030303; }")
    else:
        return _four_bytes(packed, "{ .reg .b32 t; shr.u32 t, $1, 6; and.b32 $0, t, 0x03030303; }")


@triton.jit
def _four_bytes(packed, asm: tl.constexpr):
    """Four bytes per instruction; keeps the layout of a tensor-core operand, so that codes never leave registers."""
    return tl.inline_asm_elementwise(asm, "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit
def _fixed_pairs(x, largest, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """`x` ``[ROWS, PAIRS]`` in units of `largest` / 32512 per column, as int8 ``[ROWS, 2 PAIRS]``: each column as two.

    A number is 256 high + low; 32512 is 256 * 127. Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
    """
    n = (x * (32512.0 / largest)[None, :] + 12582912.0).to(tl.int32, bitcast=True)
    high = ((n + 128) >> 8) & 0xFF
    return tl.join(_wrap_int8(high), _wrap_int8(n & 0xFF)).reshape(ROWS, 2 * PAIRS)


@triton.jit
def _wrap_int8(n):
    """The low byte of an int32 in 0..255 as a signed byte."""
    return (n - ((n & 0x80) << 1)).to(tl.int8)


@triton.jit
def _fixed_dot(a, pairs, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """int8 ``[ROWS, k]`` times pairs ``[k, 2 PAIRS]``, with the pairs put together: int32 ``[ROWS, PAIRS]``."""
    high, low = tl.split(tl.dot(a, pairs, out_dtype=tl.int32).reshape(ROWS, PAIRS, 2))
    return high * 256 + low


@triton.jit
def _bf16_pairs(x, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """float32 ``[ROWS, PAIRS]`` to bf16 ``[ROWS, 2 PAIRS]``, each column as (x rounded, rest)."""
    high = bf16_bits(x).to(tl.float32, bitcast=True)
    return tl.join(to_bf16(high), to_bf16(x - high)).reshape(ROWS, 2 * PAIRS)


@triton.jit
def _bf16_dot(a, pairs, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """bf16 ``[ROWS, k]`` times pairs ``[k, 2 PAIRS]``: float32 ``[ROWS, PAIRS]``. Interpreters multiply no bf16."""
    both = tl.dot(as_float(a), as_float(pairs)) if _INTERPRETED else tl.dot(a, pairs)
    high, low = tl.split(both.reshape(ROWS, PAIRS, 2))
    return high + low


@triton.jit
def _meet(i: tl.constexpr, group: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr):
    """Whether chunk i holds channels of the group."""
    return i * BYTES < (group + 1) * GROUP and group * GROUP < (i + 1) * BYTES


@triton.jit
def _attend_pages(
    q_ptr, q_stride_h, pages_ptr, table_ptr, out_ptr, stats_ptr, first_page, end_page, page_stride_p, scaling,
    G: tl.constexpr, PG: tl.constexpr, D: tl.constexpr,
    K_BITS: tl.constexpr, K_GROUP: tl.constexpr, K_CHUNK: tl.constexpr,
    V_BITS: tl.constexpr, V_GROUP: tl.constexpr, V_CHUNK: tl.constexpr,
    PAGE: tl.constexpr, TABLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attention over table columns `first_page` to `end_page` of one row and KV head; PG is G padded."""
    T: tl.constexpr = _STEP_TOKENS
    STEPS: tl.constexpr = PAGE // T
    K_PARTS: tl.constexpr = 8 // K_BITS
    K_BYTES: tl.constexpr = D // K_PARTS
    V_PARTS: tl.constexpr = 8 // V_BITS
    V_BYTES: tl.constexpr = D // V_PARTS
    V_CODES: tl.constexpr = PAGE * K_BYTES
    K_META: tl.constexpr = V_CODES + PAGE * V_BYTES
    V_META: tl.constexpr = K_META + PAGE * 4 * (D // K_GROUP)
    kc = tl.arange(0, K_CHUNK)
    vc = tl.arange(0, V_CHUNK)
    t = tl.arange(0, T)
    g = tl.arange(0, PG)

    # The query: one scale per head, one fixed-point chunk per code of a byte, one sum per group.
    largest_G = tl.zeros([PG], tl.float32)
    q_parts = ()
    for i in tl.static_range(K_PARTS):
        mask_CG = (kc < K_BYTES)[:, None] & (g < G)[None, :]
        q_CG = tl.load(q_ptr + g[None, :] * q_stride_h + (i * K_BYTES + kc)[:, None], mask=mask_CG, other=0.0)
        q_CG = as_float(q_CG) * scaling
        largest_G = tl.maximum(largest_G, tl.max(tl.abs(q_CG), axis=0))
        q_parts = q_parts + (q_CG,)
    largest_G = tl.maximum(largest_G, 1e-30)
    q_unit_G = largest_G / 32512.0
    q_sums = ()
    for group in tl.static_range(D // K_GROUP):
        sum_G = tl.zeros([PG], tl.float32)
        for i in tl.static_range(K_PARTS):
            if _meet(i, group, K_BYTES, K_GROUP):
                member_C = (i * K_BYTES + kc) // K_GROUP == group
                sum_G += tl.sum(tl.where(member_C[:, None], q_parts[i], 0.0), axis=0)
        q_sums = q_sums + (sum_G,)
    q_pairs = ()
    for i in tl.static_range(K_PARTS):
        q_pairs = q_pairs + (_fixed_pairs(q_parts[i], largest_G, K_CHUNK, PG),)

    # The state: running maximum and sum, a value accumulator per chunk, the zero points' share per group.
    m_G = tl.full([PG], float("-inf"), tl.float32)
    l_G = tl.zeros([PG], tl.float32)
    accs = ()
    for i in tl.static_range(V_PARTS):
        accs = accs + (tl.zeros([V_CHUNK, PG], tl.float32),)
    offsets = ()
    for _group in tl.static_range(D // V_GROUP):
        offsets = offsets + (tl.zeros([PG], tl.float32),)

    n = tl.arange(0, TABLE)
    for block in tl.range(0, _loop_end((end_page - first_page + TABLE - 1) // TABLE)):
        first = first_page + block * TABLE
        ids_N = tl.load(table_ptr + first + n, mask=first + n < end_page, other=0)
        for step in tl.range(0, _loop_end(tl.minimum(end_page - first, TABLE) * STEPS), num_stages=STAGES):
            # A vector of ids and this sum, because a scalar load in the loop would keep it from being pipelined.
            index = step // STEPS
            page_ptr = pages_ptr + tl.sum(tl.where(n == index, ids_N, 0), axis=0).to(tl.int64) * page_stride_p
            token_T = (step - index * STEPS) * T + t
            k_bytes_TC = tl.load(
                page_ptr + token_T[:, None] * K_BYTES + kc[None, :], mask=(kc < K_BYTES)[None, :], other=0
            )
            v_ptr = page_ptr + V_CODES
            v_bytes_CT = tl.load(v_ptr + vc[:, None] * PAGE + token_T[None, :], mask=(vc < V_BYTES)[:, None], other=0)
            k_meta_ptr = (page_ptr + K_META).to(tl.pointer_type(tl.int32))
            v_meta_ptr = (page_ptr + V_META).to(tl.pointer_type(tl.int32))

            logits_TG = tl.zeros([T, PG], tl.float32)
            for group in tl.static_range(D // K_GROUP):
                meta_T = tl.load(k_meta_ptr + group * PAGE + token_T)
                scale_T = (meta_T << 16).to(tl.float32, bitcast=True)
                zero_T = (meta_T & -65536).to(tl.float32, bitcast=True)
                dots_TG = tl.zeros([T, PG], tl.int32)
                for i in tl.static_range(K_PARTS):
                    if _meet(i, group, K_BYTES, K_GROUP):
                        pairs_CR = q_pairs[i]
                        if K_GROUP % K_BYTES != 0:
                            member_C = (i * K_BYTES + kc) // K_GROUP == group
                            pairs_CR = tl.where(member_C[:, None], pairs_CR, 0).to(tl.int8)
                        dots_TG += _fixed_dot(_codes(k_bytes_TC, i, K_BITS), pairs_CR, T, PG)
                part_TG = dots_TG.to(tl.float32) * q_unit_G[None, :] - zero_T[:, None] * q_sums[group][None, :]
                logits_TG += part_TG * scale_T[:, None]

            tile_m_G = tl.max(logits_TG, axis=0)
            new_m_G = tl.maximum(m_G, tile_m_G)
            p_TG = tl.exp2(logits_TG - tile_m_G[None, :])
            old_G = tl.exp2(m_G - new_m_G)
            new_G = tl.exp2(tile_m_G - new_m_G)
            l_G = l_G * old_G + tl.sum(p_TG, axis=0) * new_G
            m_G = new_m_G

            p_pairs = ()
            units = ()
            new_offsets = ()
            for group in tl.static_range(D // V_GROUP):
                meta_T = tl.load(v_meta_ptr + group * PAGE + token_T)
                ps_TG = p_TG * (meta_T << 16).to(tl.float32, bitcast=True)[:, None]
                zero_T = (meta_T & -65536).to(tl.float32, bitcast=True)
                largest_G = tl.maximum(tl.max(ps_TG, axis=0), 1e-30)
                p_pairs = p_pairs + (_fixed_pairs(ps_TG, largest_G, T, PG),)
                units = units + (largest_G * new_G / 32512.0,)
                offset_G = tl.sum(ps_TG * zero_T[:, None], axis=0)
                new_offsets = new_offsets + (offsets[group] * old_G + offset_G * new_G,)
            offsets = new_offsets
            new_accs = ()
            for i in tl.static_range(V_PARTS):
                v_codes_CT = _codes(v_bytes_CT, i, V_BITS)
                acc_CG = accs[i] * old_G[None, :]
                for group in tl.static_range(D // V_GROUP):
                    if _meet(i, group, V_BYTES, V_GROUP):
                        o_CG = _fixed_dot(v_codes_CT, p_pairs[group], V_CHUNK, PG).to(tl.float32)
                        o_CG = o_CG * units[group][None, :]
                        if V_GROUP % V_BYTES != 0:
                            o_CG = tl.where(((i * V_BYTES + vc) // V_GROUP == group)[:, None], o_CG, 0.0)
                        acc_CG += o_CG
                new_accs = new_accs + (acc_CG,)
            accs = new_accs

    for i in tl.static_range(V_PARTS):
        acc_CG = accs[i]
        for group in tl.static_range(D // V_GROUP):
            if _meet(i, group, V_BYTES, V_GROUP):
                member_C = (i * V_BYTES + vc) // V_GROUP == group
                acc_CG -= tl.where(member_C[:, None], offsets[group][None, :], 0.0)
        out_CG = g[None, :] * D + (i * V_BYTES + vc)[:, None]
        tl.store(out_ptr + out_CG, acc_CG, mask=(vc < V_BYTES)[:, None] & (g < G)[None, :])
    tl.store(stats_ptr + 2 * g, m_G, mask=g < G)
    tl.store(stats_ptr + 2 * g + 1, l_G, mask=g < G)


@triton.jit
def _window_step(
    q_pairs, m_G, l_G, acc_DG, k_ptr, v_ptr, k_stride_t, v_stride_t, slot_T, live_T,
    PG: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """One online-softmax step over a tile of BF16 tokens, of which at least one is live."""
    d = tl.arange(0, WIDTH)
    live_TD = live_T[:, None] & (d < D)[None, :]
    live_DT = live_T[None, :] & (d < D)[:, None]
    k_TD = tl.load(k_ptr + slot_T[:, None] * k_stride_t + d[None, :], mask=live_TD, other=0.0)
    v_DT = tl.load(v_ptr + slot_T[None, :] * v_stride_t + d[:, None], mask=live_DT, other=0.0)
    logits_TG = tl.where(live_T[:, None], _bf16_dot(k_TD, q_pairs, T, PG), float("-inf"))
    new_m_G = tl.maximum(m_G, tl.max(logits_TG, axis=0))
    p_TG = tl.exp2(logits_TG - new_m_G[None, :])
    old_G = tl.exp2(m_G - new_m_G)
    l_G = l_G * old_G + tl.sum(p_TG, axis=0)
    acc_DG = acc_DG * old_G[None, :] + _bf16_dot(v_DT, _bf16_pairs(p_TG, T, PG), WIDTH, PG)
    return new_m_G, l_G, acc_DG


@triton.jit
def _attend_windows(
    q_ptr, q_stride_h, sink_k_ptr, sink_v_ptr, recent_k_ptr, recent_v_ptr, out_ptr, stats_ptr,
    sink_k_stride_t, sink_v_stride_t, recent_k_stride_t, recent_v_stride_t,
    num_sink, num_recent, first_slot, ring, split, num_splits, scaling,
    G: tl.constexpr, PG: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Attention over every `num_splits`-th tile of the live sink slots and then of the live ring slots."""
    d = tl.arange(0, WIDTH)
    t = tl.arange(0, T)
    g = tl.arange(0, PG)
    q_DG = tl.load(q_ptr + g[None, :] * q_stride_h + d[:, None], mask=(d < D)[:, None] & (g < G)[None, :], other=0.0)
    q_pairs = _bf16_pairs(as_float(q_DG) * scaling, WIDTH, PG)
    m_G = tl.full([PG], float("-inf"), tl.float32)
    l_G = tl.zeros([PG], tl.float32)
    acc_DG = tl.zeros([WIDTH, PG], tl.float32)
    sink_tiles = (num_sink + T - 1) // T
    for step in tl.range(0, _loop_end((sink_tiles - split + num_splits - 1) // num_splits)):
        slot_T = (split + step * num_splits) * T + t
        m_G, l_G, acc_DG = _window_step(
            q_pairs, m_G, l_G, acc_DG, sink_k_ptr, sink_v_ptr, sink_k_stride_t, sink_v_stride_t, slot_T,
            slot_T < num_sink, PG, D, WIDTH, T,
        )  # fmt: skip
    turn = (split + num_splits - sink_tiles % num_splits) % num_splits  # go on dealing where the sink's tiles ended
    for step in tl.range(0, _loop_end(((num_recent + T - 1) // T - turn + num_splits - 1) // num_splits)):
        age_T = (turn + step * num_splits) * T + t
        m_G, l_G, acc_DG = _window_step(
            q_pairs, m_G, l_G, acc_DG, recent_k_ptr, recent_v_ptr, recent_k_stride_t, recent_v_stride_t,
            (first_slot + age_T) % ring, age_T < num_recent, PG, D, WIDTH, T,
        )  # fmt: skip
    tl.store(out_ptr + g[None, :] * D + d[:, None], acc_DG, mask=(d < D)[:, None] & (g < G)[None, :])
    tl.store(stats_ptr + 2 * g, m_G, mask=g < G)
    tl.store(stats_ptr + 2 * g + 1, l_G, mask=g < G)


@triton.jit(do_not_specialize=["num_heads", "sink", "ring", "page_splits", "window_splits", "table_stride_b"])
def _split_kernel(
    q_ptr, pages_ptr, table_ptr, num_pages_ptr, num_tokens_ptr, sink_k_ptr, sink_v_ptr, recent_k_ptr, recent_v_ptr,
    partial_ptr, stats_ptr, scaling, num_heads, sink, ring, page_splits, window_splits,
    q_stride_b, q_stride_h, page_stride_p, page_stride_k, table_stride_b,
    sink_k_stride_b, sink_k_stride_k, sink_k_stride_t, sink_v_stride_b, sink_v_stride_k, sink_v_stride_t,
    recent_k_stride_b, recent_k_stride_k, recent_k_stride_t, recent_v_stride_b, recent_v_stride_k, recent_v_stride_t,
    G: tl.constexpr, PG: tl.constexpr, D: tl.constexpr,
    K_BITS: tl.constexpr, K_GROUP: tl.constexpr, K_CHUNK: tl.constexpr,
    V_BITS: tl.constexpr, V_GROUP: tl.constexpr, V_CHUNK: tl.constexpr,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, TABLE: tl.constexpr, WINDOW_TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program per (batch row and KV head, split): writes acc, m and l of its tokens, m = -inf where it has none."""
    row = (tl.program_id(0) // num_heads).to(tl.int64)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    split = tl.program_id(1)
    place = (tl.program_id(0).to(tl.int64) * (page_splits + window_splits) + split) * G
    out_ptr = partial_ptr + place * D
    stats_ptr += place * 2
    q_ptr += row * q_stride_b + head * G * q_stride_h
    num_pages = tl.load(num_pages_ptr + row)
    if split < page_splits:
        share = (num_pages + page_splits - 1) // page_splits
        first_page = split * share
        _attend_pages(
            q_ptr, q_stride_h, pages_ptr + head * page_stride_k, table_ptr + row * table_stride_b, out_ptr, stats_ptr,
            first_page, tl.minimum(first_page + share, num_pages), page_stride_p, scaling,
            G, PG, D, K_BITS, K_GROUP, K_CHUNK, V_BITS, V_GROUP, V_CHUNK, PAGE, TABLE, STAGES,
        )  # fmt: skip
    else:
        num_tokens = tl.load(num_tokens_ptr + row)
        num_sink = tl.minimum(num_tokens, sink)
        first = num_pages * PAGE
        _attend_windows(
            q_ptr, q_stride_h,
            sink_k_ptr + row * sink_k_stride_b + head * sink_k_stride_k,
            sink_v_ptr + row * sink_v_stride_b + head * sink_v_stride_k,
            recent_k_ptr + row * recent_k_stride_b + head * recent_k_stride_k,
            recent_v_ptr + row * recent_v_stride_b + head * recent_v_stride_k,
            out_ptr, stats_ptr, sink_k_stride_t, sink_v_stride_t, recent_k_stride_t, recent_v_stride_t,
            num_sink, tl.maximum(num_tokens - num_sink - first, 0), first % tl.maximum(ring, 1), ring,
            split - page_splits, window_splits, scaling, G, PG, D, WIDTH, WINDOW_TILE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    partial_ptr, stats_ptr, out_ptr, lse_ptr, num_splits,
    G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per (batch row, query head): the weighted mean over splits, and the log of the sum of weights.

    Zeros and minus infinity where no split has tokens.
    """
    index = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    m = tl.full([1], float("-inf"), tl.float32)
    l_ = tl.zeros([1], tl.float32)
    acc_D = tl.zeros([WIDTH], tl.float32)
    for step in tl.range(0, _loop_end((num_splits + BLOCK - 1) // BLOCK)):
        z = step * BLOCK + tl.arange(0, BLOCK)
        place_Z = ((index // G) * num_splits + z) * G + index % G
        m_Z = tl.load(stats_ptr + 2 * place_Z, mask=z < num_splits, other=float("-inf"))
        live_Z = m_Z > float("-inf")
        l_Z = tl.load(stats_ptr + 2 * place_Z + 1, mask=live_Z, other=0.0)
        live_ZD = live_Z[:, None] & (d < D)[None, :]
        part_ZD = tl.load(partial_ptr + place_Z[:, None] * D + d[None, :], mask=live_ZD, other=0.0)
        new_m = tl.maximum(m, tl.max(m_Z, axis=0))
        safe_m = tl.maximum(new_m, -1e30)  # no live split yet: 2^(-inf + 1e30) is 0, where 2^(-inf + inf) is NaN
        weight_Z = tl.exp2(m_Z - safe_m)
        old = tl.exp2(m - safe_m)
        l_ = l_ * old + tl.sum(weight_Z * l_Z, axis=0)
        acc_D = acc_D * old + tl.sum(weight_Z[:, None] * part_ZD, axis=0)
        m = new_m
    sum_ = tl.where(l_ > 0.0, l_, 1.0)
    tl.store(out_ptr + index * D + d, acc_D / sum_, mask=d < D)
    tl.store(lse_ptr + index + tl.arange(0, 1), m * _LN_2 + tl.log(sum_))  # logits are in base 2


def supports(fmt: PageFormat) -> bool:
    """Whether this kernel reads the format; if not, the codec does."""
    return all(
        row.bits in (2, 4)
        and row.axis == "token"
        and row.zero_point != "none"
        and row.token_scale == "none"
        and not row.centroids
        for row in (fmt.key, fmt.value)
    )


def attend(
    q_BHD: Tensor, layer: LayerCache, scaling: float, config: DecodeConfig | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of one new rotated query per row and head, means `codec.attend_layer`: float32 ``[B, H, D]``, ``[B, H]``.

    Lengths and page tables are read on the device only, so the call may be captured into a CUDA graph.
    """
    batch, num_queries, head_dim = q_BHD.shape
    num_heads = layer.pages_PKX.shape[1]
    if num_queries % num_heads or head_dim != layer.fmt.head_dim or batch != layer.table_BN.shape[0]:
        raise ValueError(f"queries {[*q_BHD.shape]} do not fit pages {[*layer.pages_PKX.shape]} in {layer.fmt}")
    if not supports(layer.fmt):
        raise ValueError(f"no kernel reads {layer.fmt}")
    windows = (layer.sink_k_BKSD, layer.sink_v_BKSD, layer.recent_k_BKWD, layer.recent_v_BKWD)
    for x in (q_BHD, layer.pages_PKX, layer.table_BN, *windows):
        if x.numel() and x.stride(-1) != 1:
            raise ValueError(f"the last dimension must be contiguous, strides are {x.stride()}")
    config = config or default_config(batch, layer)
    groups = num_queries // num_heads
    splits = config.page_splits + config.window_splits
    width = max(16, triton.next_power_of_2(head_dim))
    key, value = layer.fmt.key, layer.fmt.value
    partial = torch.empty((batch * num_heads, splits, groups, head_dim), dtype=torch.float32, device=q_BHD.device)
    stats = torch.empty((batch * num_heads, splits, groups, 2), dtype=torch.float32, device=q_BHD.device)
    out_BHD = torch.empty(q_BHD.shape, dtype=torch.float32, device=q_BHD.device)
    lse_BH = torch.empty(q_BHD.shape[:2], dtype=torch.float32, device=q_BHD.device)
    if not batch:
        return out_BHD, lse_BH
    _split_kernel[(batch * num_heads, splits)](
        q_BHD, layer.pages_PKX, layer.table_BN, layer.num_pages_B, layer.num_tokens_B, *windows, partial, stats,
        scaling * _LOG2_E, num_heads, layer.sink_k_BKSD.shape[2], layer.recent_k_BKWD.shape[2],
        config.page_splits, config.window_splits,
        *q_BHD.stride()[:2], *layer.pages_PKX.stride()[:2], layer.table_BN.stride(0),
        *(stride for x in windows for stride in x.stride()[:3]),
        G=groups, PG=max(4, triton.next_power_of_2(groups)), D=head_dim,
        K_BITS=key.bits, K_GROUP=key.group_size, K_CHUNK=max(32, triton.next_power_of_2(key.row_bytes)),
        V_BITS=value.bits, V_GROUP=value.group_size, V_CHUNK=max(16, triton.next_power_of_2(value.row_bytes)),
        PAGE=layer.fmt.tokens, WIDTH=width, TABLE=config.table_block, WINDOW_TILE=config.window_tile, STAGES=config.num_stages,
        num_warps=config.num_warps,
    )  # fmt: skip
    _merge_kernel[(batch * num_queries,)](
        partial, stats, out_BHD, lse_BH, splits, G=groups, D=head_dim, WIDTH=width, BLOCK=16, num_warps=4
    )
    return out_BHD, lse_BH
