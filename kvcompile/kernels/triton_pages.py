"""Decode attention over packed pages, in Triton: the part of a split of `triton_decode`.

Shapes in a kernel: G query heads of a KV head (PG padded), T tokens of a tile, C channels of a chunk (one code of every byte,
D bits / 8, padded), R = 2 PG columns, or rows, of (high, low) pairs of numbers, U numbers that hold a tile's codes of a channel.

Codes are int8 tensor-core operands, never dequantized. The query and the weights `p` are fixed-point numbers of 15 bits in two
int8 columns; scale and zero point are factored out, per group: `q . k = s (q . c - z sum q)` and
`sum_t p v = sum_t (p s) c - sum_t p s z`. Keys quantized along tokens have a scale per channel, which the query takes in, page
by page: `q . k = (q s) . c - sum (q s z)`. Weights are fixed relative to the tile's own largest `p s`, so that a tile with
little weight keeps its precision. Codes of values stay at their place in a byte, whose top bit is a sign: what it takes off is
given back from the sum of the weights. Codes of keys move to the lower half of a byte, because the query's precision pays for
their place.

With at most 4 query heads a KV head, tokens (of values: channels) are the rows of a tensor-core tile, and 4 pairs of columns
fill it. With more, heads come first: rows are high bytes of heads and then low ones, columns are tokens, and what multiplies
values stays in the threads that computed it. With more than 8, pairs of weights would cost more than they save: these are
float16, and a code's bits, where they lie, a subnormal float16. Keys stay as they are, because an error of a logit is one of
every weight.

Tokens of a step are dealt to rows (or columns) so that a thread of a result holds neighbours, four or OPERAND_RUN
of them: metadata comes in wide loads, and weights become operand words without a detour through memory. Loads
want neighbours together, because they share a line of memory; products want them dealt.
"""
# ruff: noqa: RUF005 - a kernel's tuples grow by `+` in static loops: Triton knows no starred elements
# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kvcompile.kernels.triton_encode import as_float
from kvcompile.kernels.triton_merge import LOWEST, store_stats
from kvcompile.kernels.triton_operands import (
    OPERAND_RUN,
    code_weight,
    codes,
    codes_in_place,
    dealt_pairs,
    fixed_pairs,
    half_code_weight,
    half_codes,
    halves,
    in_order,
    loop_end,
    pair_rows,
    place_offset,
    place_weight,
    split_columns,
    split_rows,
)

_SMALLEST = tl.constexpr(1e-30)
_FIXED = tl.constexpr(32512.0)
_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2^23: a small integer that is added to its bits is added to it
_INTEGER_BITS = tl.constexpr(0x4B400000)
_LARGEST_HALF = tl.constexpr(16384.0)
_HEADS_FIRST = tl.constexpr(8)  # padded query heads of a KV head from which they are rows of a tile
_HALF_VALUES = tl.constexpr(16)  # padded again, and from which weights of values are float16
_SHARES = tl.constexpr(8)  # of tokens among threads: rows of a tensor-core tile that different threads hold


@triton.constexpr_function
def _meet(i, group, channels, group_size):
    """Whether chunk i of so many channels holds some of the group."""
    return i * channels < (group + 1) * group_size and group * group_size < (i + 1) * channels


@triton.jit
def _added(acc_CG, o_CG, i: tl.constexpr, group: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr, c):
    """The sum where chunk i holds channels of the group."""
    if GROUP % BYTES != 0:
        o_CG = tl.where(((i * BYTES + c) // GROUP == group)[:, None], o_CG, 0.0)
    return acc_CG + o_CG


@triton.jit
def _scale_of(meta):
    return (meta << 16).to(tl.float32, bitcast=True)


@triton.jit
def _zero_of(meta):
    return (meta & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _largest(parts, PG: tl.constexpr):
    """Largest magnitude of every column over chunks ``[C, PG]``."""
    largest_G = tl.full([PG], _SMALLEST, tl.float32)
    for i in tl.static_range(len(parts)):
        largest_G = tl.maximum(largest_G, tl.max(tl.abs(parts[i]), axis=0))
    return largest_G


@triton.jit
def _query(q_ptr, stride_h, BYTES: tl.constexpr, C: tl.constexpr, G: tl.constexpr, PG: tl.constexpr):
    """A chunk of the query ``[C, PG]``, in a thread's hands as an operand needs it, whatever its type.

    By itself the compiler would give a thread 16 bytes of it, and move what it holds to others anew in every step.
    """
    if OPERAND_RUN == 8:
        eight = tl.arange(0, C // 8)[:, None, None]
        four = tl.arange(0, 4)[None, :, None]
        g = tl.arange(0, PG)[None, None, :]
        c = 8 * eight + four
        x = tl.load(q_ptr + g * stride_h + c, mask=(c < BYTES) & (g < G), other=0.0)
        y = tl.load(q_ptr + g * stride_h + c + 4, mask=(c + 4 < BYTES) & (g < G), other=0.0)
        return tl.join(as_float(x), as_float(y)).permute(0, 3, 1, 2).reshape(C, PG)
    else:
        c = tl.arange(0, C // 2)[None, :]
        c = c // 16 * 32 + c % 16
        g = tl.arange(0, PG)[:, None]
        x = tl.load(q_ptr + g * stride_h + c, mask=(c < BYTES) & (g < G), other=0.0)
        y = tl.load(q_ptr + g * stride_h + c + 16, mask=(c + 16 < BYTES) & (g < G), other=0.0)
        both = tl.join(as_float(x), as_float(y)).reshape(PG, C // 32, 16, 2)
        return both.permute(1, 3, 2, 0).reshape(C, PG)


@triton.jit
def _shares(x_TG, T: tl.constexpr, PG: tl.constexpr):
    """Sums of every eighth token ``[8, PG]``: each thread's own tokens, so that nothing crosses threads until the end."""
    return tl.sum(x_TG.reshape(T // _SHARES, _SHARES, PG), axis=0)


@triton.jit
def _dealt(x_T, T: tl.constexpr, PG: tl.constexpr):
    """Four or more neighbours to where one thread holds them: rows 8 apart, or with heads first, pairs of columns 8 apart."""
    if PG >= _HALF_VALUES:
        return x_T.reshape(T // 16, 4, 2, 2).permute(0, 3, 1, 2).reshape(T)
    elif PG >= _HEADS_FIRST:
        return x_T.reshape(T // (4 * OPERAND_RUN), 4, OPERAND_RUN // 2, 2).permute(0, 2, 1, 3).reshape(T)
    else:
        return x_T.reshape(T // 32, 8, 4).permute(0, 2, 1).reshape(T)


@triton.jit
def _pairs(x_NG, inverse, N: tl.constexpr, PG: tl.constexpr, HEADS_FIRST: tl.constexpr):
    """Fixed-point numbers as the operand that meets codes: ``[N, 2 PG]``, or with heads first ``[2 PG, N]``."""
    if HEADS_FIRST:
        return pair_rows(x_NG, inverse, N, PG)
    else:
        return fixed_pairs(x_NG, inverse, N, PG)


@triton.jit
def _dot(codes_MN, pairs, sums, HEADS_FIRST: tl.constexpr):
    """`sums` plus the product, int32 ``[M, 2 PG]``; with heads first, the codes are ``[N, M]`` and it is ``[2 PG, M]``."""
    if HEADS_FIRST:
        return tl.dot(pairs, codes_MN, sums, out_dtype=tl.int32)
    else:
        return tl.dot(codes_MN, pairs, sums, out_dtype=tl.int32)


@triton.jit
def _start(start: tl.constexpr, M: tl.constexpr, PG: tl.constexpr, HEADS_FIRST: tl.constexpr):
    """What `_dot` begins with."""
    if HEADS_FIRST:
        return tl.full([2 * PG, M], start, tl.int32)
    else:
        return tl.full([M, 2 * PG], start, tl.int32)


@triton.jit
def _split(dots, M: tl.constexpr, PG: tl.constexpr, HEADS_FIRST: tl.constexpr):
    """The sums of `_dot` with the high bytes and those with the low ones, ``[M, PG]``."""
    if HEADS_FIRST:
        return split_rows(dots, M, PG)
    else:
        return split_columns(dots, M, PG)


@triton.jit
def _places(which_T, ids_N, n, index, count, stride, PAGES: tl.constexpr):
    """Where the step's pages begin, by number within the step: the last page again, where it has no other.

    Sums of a vector of ids, because a scalar load in the loop would keep it from being pipelined.
    """
    place_T = tl.sum(tl.where(n == index, ids_N, 0), axis=0).to(tl.int64) * stride
    for other in tl.static_range(1, PAGES):
        page = tl.sum(tl.where(n == tl.minimum(index + other, count - 1), ids_N, 0), axis=0)
        place_T = tl.where(which_T == other, page.to(tl.int64) * stride, place_T)
    return place_T


@triton.jit
def attend_pages(
    q_ptr, q_stride_h, pages_ptr, table_ptr, out_ptr, stats_ptr, first_page, end_page, resumed, page_stride_p, scaling,
    G: tl.constexpr, PG: tl.constexpr, D: tl.constexpr,
    K_BITS: tl.constexpr, K_GROUP: tl.constexpr, K_CHANNEL: tl.constexpr, K_NORM: tl.constexpr, K_CHUNK: tl.constexpr,
    V_BITS: tl.constexpr, V_GROUP: tl.constexpr, V_CHUNK: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, TABLE: tl.constexpr, STAGES: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Attention over table columns `first_page` to `end_page` of one row and KV head.

    Results of the windows for `resumed` heads lie at `out_ptr` and `stats_ptr`, and are gone on from. With K_CHANNEL, K_GROUP
    counts tokens; K_NORM is the byte offset of the tokens' norms, or 0.
    """
    T: tl.constexpr = K_GROUP if K_CHANNEL and K_GROUP < TILE else TILE
    STEPS: tl.constexpr = PAGE // T if T < PAGE else 1
    PAGES: tl.constexpr = T // PAGE if T > PAGE else 1  # of a step
    tl.static_assert(T <= 256)  # sums beside `_INTEGER` stay within 2^22
    K_PARTS: tl.constexpr = 8 // K_BITS
    K_BYTES: tl.constexpr = D // K_PARTS
    K_GROUPS: tl.constexpr = 1 if K_CHANNEL else D // K_GROUP
    V_PARTS: tl.constexpr = 8 // V_BITS
    V_BYTES: tl.constexpr = D // V_PARTS
    V_SIGNED: tl.constexpr = (V_PARTS - 1) * V_BYTES // V_GROUP  # the first group with codes in the sign of a byte
    V_CODES: tl.constexpr = PAGE * K_BYTES
    K_META: tl.constexpr = V_CODES + PAGE * V_BYTES
    V_META: tl.constexpr = K_META + 4 * ((PAGE // K_GROUP) * D if K_CHANNEL else PAGE * (D // K_GROUP))
    kc = tl.arange(0, K_CHUNK)
    HEADS_FIRST: tl.constexpr = PG >= _HEADS_FIRST
    K_LATER: tl.constexpr = not HEADS_FIRST and K_BYTES >= 32
    V_HALF: tl.constexpr = PG >= _HALF_VALUES
    U: tl.constexpr = T // 2 if V_HALF else T  # numbers that hold a tile's codes of a channel
    V_RUN: tl.constexpr = PAGE // 2 if V_HALF else PAGE  # of a page
    vc = tl.arange(0, V_CHUNK)
    t = tl.arange(0, T)
    r = _dealt(t, T, PG)
    u = tl.arange(0, U)
    g = tl.arange(0, PG)

    n = tl.arange(0, TABLE)
    ids_N = tl.load(table_ptr + first_page + n, mask=first_page + n < end_page, other=0)
    if WAIT:
        gdc_wait()

    # The query: one scale per head, one fixed-point chunk per code of a byte, one sum per group.
    q_parts = ()
    for i in tl.static_range(K_PARTS):
        q_CG = _query(q_ptr + i * K_BYTES, q_stride_h, K_BYTES, K_CHUNK, G, PG)
        q_parts = q_parts + (q_CG * scaling,)
    unit_G = _largest(q_parts, PG) / _FIXED
    q_pairs = ()
    q_sums = ()
    if not K_CHANNEL:
        for i in tl.static_range(K_PARTS):
            inverse_G = 1.0 / (unit_G * code_weight(i, K_BITS))
            pairs_CR = _pairs(q_parts[i], inverse_G[None, :], K_CHUNK, PG, HEADS_FIRST)
            q_pairs = q_pairs + (pairs_CR,)
        for group in tl.static_range(K_GROUPS):
            sum_G = tl.zeros([PG], tl.float32)
            for i in tl.static_range(K_PARTS):
                if _meet(i, group, K_BYTES, K_GROUP):
                    member_C = (i * K_BYTES + kc) // K_GROUP == group
                    sum_G += tl.sum(tl.where(member_C[:, None], q_parts[i], 0.0), axis=0)
            q_sums = q_sums + (sum_G / unit_G,)
    else:
        unit_G = tl.full([PG], 1.0, tl.float32)  # of logits, below

    # The state: running maximum in units of the logits, the sum of weights and the zero points' share of each group (both
    # kept apart by shares of tokens), and a value accumulator per chunk.
    l_G = tl.load(stats_ptr + 2 * g + 1, mask=g < resumed, other=0.0)
    m_G = tl.load(stats_ptr + 2 * g, mask=g < resumed, other=0.0)
    m_G = tl.where(l_G > 0.0, m_G / unit_G, LOWEST)
    v_unit_G = tl.full([PG], _SMALLEST, tl.float32)
    accs = ()
    for i in tl.static_range(V_PARTS):
        weight = half_code_weight(i, V_BITS) / _SMALLEST if V_HALF else place_weight(i, V_BITS)
        live_CG = (vc < V_BYTES)[:, None] & (g < resumed)[None, :]
        place_CG = g[None, :] * D + (i * V_BYTES + vc)[:, None]
        accs = accs + (tl.load(out_ptr + place_CG, mask=live_CG, other=0.0) * weight,)
    l_SG = tl.zeros([_SHARES, PG], tl.float32) + (l_G / _SHARES)[None, :]
    offsets = ()
    p_sums = ()
    for group in tl.static_range(D // V_GROUP):
        offsets = offsets + (tl.zeros([_SHARES, PG], tl.float32),)
        if not V_HALF and group >= V_SIGNED:
            p_sums = p_sums + (tl.zeros([_SHARES, PG], tl.float32),)

    for block in tl.range(0, loop_end((end_page - first_page + TABLE - 1) // TABLE)):
        first = first_page + block * TABLE
        count = tl.minimum(end_page - first, TABLE)
        for step in tl.range(0, loop_end((count + PAGES - 1) // PAGES * STEPS), num_stages=STAGES):
            index = step // STEPS * PAGES
            place_T = _places(t // PAGE, ids_N, n, index, count, page_stride_p, PAGES)
            part = 0 if PAGES > 1 else (step - index * STEPS) * T
            token_T = part + t % PAGE
            meta_place_T = place_T // 4 + token_T
            # Where rows are long, loads take whole lines, and rows change places on the way into registers: that meets bank
            # conflicts, which cost less than lines in parts. Short rows, and those of heads first, change places in the loads.
            k_place_T = place_T + (part + (t if K_LATER else r) % PAGE) * K_BYTES
            if HEADS_FIRST:
                k_place_TC = kc[:, None] + k_place_T[None, :]
                k_bytes_TC = tl.load(pages_ptr + k_place_TC, mask=(kc < K_BYTES)[:, None], other=0)
            else:
                k_place_TC = k_place_T[:, None] + kc[None, :]
                k_bytes_TC = tl.load(pages_ptr + k_place_TC, mask=(kc < K_BYTES)[None, :], other=0)
            if K_LATER:
                k_bytes_TC = k_bytes_TC.reshape(T // 32, 8, 4, K_CHUNK).permute(0, 2, 1, 3).reshape(T, K_CHUNK)
            # Bytes of values: of one token as int8, of two as int16.
            place_U = _places(u // V_RUN, ids_N, n, index, count, page_stride_p, PAGES)
            byte_U = (place_U + V_CODES + part) // (PAGE // V_RUN) + u % V_RUN
            v_ptr = pages_ptr.to(tl.pointer_type(tl.int16)) if V_HALF else pages_ptr
            if HEADS_FIRST:
                v_bytes_CU = tl.load(
                    v_ptr + byte_U[:, None] + (vc * V_RUN)[None, :], mask=(vc < V_BYTES)[None, :], other=0
                )
            else:
                v_bytes_CU = tl.load(
                    v_ptr + (vc * V_RUN)[:, None] + byte_U[None, :], mask=(vc < V_BYTES)[:, None], other=0
                )
            meta_ptr = pages_ptr.to(tl.pointer_type(tl.int32))

            logits_TG = tl.zeros([T, PG], tl.float32)
            if K_CHANNEL:
                qs_parts = ()
                zero_G = tl.zeros([PG], tl.float32)
                for i in tl.static_range(K_PARTS):
                    channel_C = K_META // 4 + part // K_GROUP * D + i * K_BYTES + kc
                    meta_C = tl.load(meta_ptr + place_T // 4 + channel_C, mask=kc < K_BYTES, other=0)
                    qs_CG = q_parts[i] * _scale_of(meta_C)[:, None]
                    zero_G += tl.sum(qs_CG * _zero_of(meta_C)[:, None], axis=0)
                    qs_parts = qs_parts + (qs_CG,)
                qs_unit_G = _largest(qs_parts, PG) / _FIXED
                dots_TR = _start(0, T, PG, HEADS_FIRST)
                for i in tl.static_range(K_PARTS):
                    inverse_G = 1.0 / (qs_unit_G * code_weight(i, K_BITS))
                    pairs_CR = _pairs(qs_parts[i], inverse_G[None, :], K_CHUNK, PG, HEADS_FIRST)
                    dots_TR = _dot(codes(k_bytes_TC, i, K_BITS), pairs_CR, dots_TR, HEADS_FIRST)
                high_TG, low_TG = _split(dots_TR, T, PG, HEADS_FIRST)
                logits_TG = (high_TG * 256 + low_TG).to(tl.float32) * qs_unit_G[None, :] - zero_G[None, :]
            else:
                for group in tl.static_range(K_GROUPS):
                    meta_T = _dealt(tl.load(meta_ptr + K_META // 4 + group * PAGE + meta_place_T), T, PG)
                    dots_TR = _start(0, T, PG, HEADS_FIRST)
                    for i in tl.static_range(K_PARTS):
                        if _meet(i, group, K_BYTES, K_GROUP):
                            pairs_CR = q_pairs[i]
                            if K_GROUP % K_BYTES != 0:
                                member_C = (i * K_BYTES + kc) // K_GROUP == group
                                pairs_CR = tl.where(
                                    member_C[None, :] if HEADS_FIRST else member_C[:, None], pairs_CR, 0
                                ).to(tl.int8)
                            dots_TR = _dot(codes(k_bytes_TC, i, K_BITS), pairs_CR, dots_TR, HEADS_FIRST)
                    high_TG, low_TG = _split(dots_TR, T, PG, HEADS_FIRST)
                    zero_TG = _zero_of(meta_T)[:, None] * q_sums[group][None, :]
                    part_TG = (high_TG * 256 + low_TG).to(tl.float32) - zero_TG
                    if K_GROUPS == 1:
                        logits_TG = part_TG * _scale_of(meta_T)[:, None]
                    else:
                        logits_TG += part_TG * _scale_of(meta_T)[:, None]
            if K_NORM:
                norm_T = tl.load(pages_ptr.to(tl.pointer_type(tl.bfloat16)) + K_NORM // 2 + place_T // 2 + token_T)
                logits_TG *= as_float(_dealt(norm_T, T, PG))[:, None]
            if PAGES > 1:
                logits_TG = tl.where((index + r // PAGE < count)[:, None], logits_TG, float("-inf"))

            new_m_G = tl.maximum(m_G, tl.max(logits_TG, axis=0))
            p_TG = tl.exp2(logits_TG * unit_G[None, :] - (new_m_G * unit_G)[None, :])
            old_G = tl.exp2((m_G - new_m_G) * unit_G)
            l_SG = l_SG * old_G[None, :] + _shares(p_TG, T, PG)
            m_G = new_m_G

            metas = (_dealt(tl.load(meta_ptr + V_META // 4 + meta_place_T), T, PG),)
            largest_T = _scale_of(metas[0])
            for group in tl.static_range(1, D // V_GROUP):
                metas = metas + (_dealt(tl.load(meta_ptr + V_META // 4 + group * PAGE + meta_place_T), T, PG),)
                largest_T = tl.maximum(largest_T, _scale_of(metas[group]))
            if V_HALF:  # float16 has room for small weights: one unit for all tiles
                new_v_unit_G = tl.maximum(v_unit_G, tl.max(largest_T, axis=0) / _LARGEST_HALF)
                v_old_G = old_G * (v_unit_G / new_v_unit_G)
                v_unit_G = new_v_unit_G
                s_inverse = tl.max(1.0 / v_unit_G, axis=0)
                p_unit_G = tl.full([PG], 1.0, tl.float32)
            else:
                p_unit_G = tl.maximum(tl.max(p_TG * largest_T[:, None], axis=0), _SMALLEST) / _FIXED  # of all groups
                v_old_G = old_G
                s_inverse = 1.0
            p_inverse_G = 1.0 / p_unit_G
            weights = ()
            new_offsets = ()
            new_p_sums = ()
            for group in tl.static_range(D // V_GROUP):
                ps_TG = p_TG * (_scale_of(metas[group]) * s_inverse)[:, None]
                if V_HALF:  # rounding takes as much from zero points as from codes
                    ps_TG = ps_TG.to(tl.float16)
                    weights = weights + (halves(ps_TG, T, PG),)
                    ps_TG = ps_TG.to(tl.float32)
                elif HEADS_FIRST:
                    weights = weights + (pair_rows(in_order(ps_TG * p_inverse_G[None, :], T, PG), 1.0, T, PG),)
                else:
                    weights = weights + (dealt_pairs(ps_TG, p_inverse_G[None, :], T, PG),)
                offset_SG = _shares(ps_TG * _zero_of(metas[group])[:, None], T, PG)
                new_offsets = new_offsets + (offsets[group] * v_old_G[None, :] + offset_SG,)
                if not V_HALF and group >= V_SIGNED:
                    sum_SG = p_sums[group - V_SIGNED] * v_old_G[None, :] + _shares(ps_TG, T, PG)
                    new_p_sums = new_p_sums + (sum_SG,)
            offsets = new_offsets
            p_sums = new_p_sums
            new_accs = ()
            for i in tl.static_range(V_PARTS):
                acc_CG = accs[i] * v_old_G[None, :]
                if V_HALF:
                    even_CU = half_codes(v_bytes_CU, i, V_BITS, False)
                    odd_CU = half_codes(v_bytes_CU, i, V_BITS, True)
                else:
                    codes_CT = codes_in_place(v_bytes_CU, i, V_BITS)
                    acc_CG -= (p_unit_G * _INTEGER)[None, :]
                for group in tl.static_range(D // V_GROUP):
                    if _meet(i, group, V_BYTES, V_GROUP):
                        if V_HALF:  # tiles are summed outside: tensor cores truncate
                            o_CG = tl.trans(tl.dot(weights[group][1], odd_CU, tl.dot(weights[group][0], even_CU)))
                        else:
                            dots_CR = _dot(
                                codes_CT, weights[group], _start(_INTEGER_BITS, V_CHUNK, PG, HEADS_FIRST), HEADS_FIRST
                            )
                            high_CG, low_CG = _split(dots_CR, V_CHUNK, PG, HEADS_FIRST)
                            high_CG = high_CG.to(tl.float32, bitcast=True) - _INTEGER
                            low_CG = low_CG.to(tl.float32, bitcast=True)  # and 1.5 * 2^23, which is taken off above
                            acc_CG = _added(
                                acc_CG, high_CG * (p_unit_G * 256.0)[None, :], i, group, V_BYTES, V_GROUP, vc
                            )
                            o_CG = low_CG * p_unit_G[None, :]
                        acc_CG = _added(acc_CG, o_CG, i, group, V_BYTES, V_GROUP, vc)
                new_accs = new_accs + (acc_CG,)
            accs = new_accs
        following = first + TABLE + n
        ids_N = tl.load(table_ptr + following, mask=following < end_page, other=0)

    for i in tl.static_range(V_PARTS):
        acc_CG = accs[i] * (1.0 / (half_code_weight(i, V_BITS) if V_HALF else place_weight(i, V_BITS)))
        for group in tl.static_range(D // V_GROUP):
            if _meet(i, group, V_BYTES, V_GROUP):
                member_C = (i * V_BYTES + vc) // V_GROUP == group
                offset_G = tl.sum(offsets[group], axis=0)
                if not V_HALF and i == V_PARTS - 1:
                    offset_G -= tl.sum(p_sums[group - V_SIGNED], axis=0) * (
                        place_offset(i, V_BITS) / place_weight(i, V_BITS)
                    )
                acc_CG -= tl.where(member_C[:, None], offset_G[None, :], 0.0)
        if V_HALF:
            acc_CG *= v_unit_G[None, :]
        place_CG = g[None, :] * D + (i * V_BYTES + vc)[:, None]
        tl.store(out_ptr + place_CG, acc_CG, mask=(vc < V_BYTES)[:, None] & (g < G)[None, :])
    store_stats(stats_ptr, m_G * unit_G, tl.sum(l_SG, axis=0), g, G)
