"""Triton kernels that turn rows into pages, bit for bit as `kvcompile.codec` does, and that rotate rows.

Shapes: B batch rows, K KV heads, G query heads per KV head, H = K G, T tokens, D head_dim, N blocks of a page's tokens,
P pages, X page bytes; in a kernel T is a tile of tokens and E the channels of a row in packing order: E = n C', with
n = 8 / bits codes per byte and C' the chunk D / n rounded up to a power of two. Column i C' + c is channel i D/n + c.

Launch 1 writes metadata and codes. With error feedback it writes a side's metadata only, and launch 2 its codes: there one
thread takes a row, channel after channel (J = 16 at a time, in natural order), on the grid that launch 1 has stored.

What bit equality rests on: every float32 operation is the codec's and none may be fused or approximated (`div_rn`; no
product is added to anything in launch 1, and launch 2 is compiled without fusion); sums of error feedback are exact in
any order; the clip threshold is an exact order statistic, found by bisection on the integer bits of |bf16|; BF16 is read
and written as integers, because the interpreter's own conversions round ties away from zero.
"""
# ruff: noqa: RUF005 - a kernel's tuples grow by `+` in static loops: Triton knows no starred elements
# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated, misc"

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcompile.codec.feedback import BLOCK, ERROR_LIMIT
from kvcompile.codec.page import PageFormat, PageTables
from kvcompile.codec.quantizer import SMALLEST_SCALE, RowFormat

_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
_ERROR_LIMIT = tl.constexpr(ERROR_LIMIT)
_BLOCK = tl.constexpr(BLOCK)
_TILE_ELEMENTS = 4096  # rows of a program x padded channels: what four warps hold in registers
_DOT_TILE = 16
_FEEDBACK_TILE = 32  # rows of a program with error feedback, one per thread


@triton.jit
def bf16_bits(x):
    """float32 to the int32 bits of the nearest BF16 (ties to even) in the upper half, zeros below."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536


@triton.jit
def as_float(x):
    """Any float dtype to float32, exactly."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def to_bf16(x):
    """float32 to the nearest BF16 (ties to even)."""
    return (bf16_bits(x) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def round_even(x):
    """float32 below 2^22 in magnitude to the nearest integer, ties to even, as float32; a zero is always plus."""
    return (x + 12582912.0) - 12582912.0  # 1.5 * 2^23


@triton.jit
def _matmul(
    x_ptr, x_stride, r_ptr, live_T, column_E, live_E, D: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Rows ``[TILE, D]`` at `x_ptr` times columns `column_E` of the float matrix ``[D, D]`` at `r_ptr`, in float32."""
    t = tl.arange(0, TILE)
    acc_TE = tl.zeros([TILE, WIDTH], tl.float32)
    for first in range(0, D, STEP):
        d = first + tl.arange(0, STEP)
        x = tl.load(x_ptr + t[:, None] * x_stride + d[None, :], mask=live_T[:, None] & (d < D)[None, :], other=0.0)
        r = tl.load(r_ptr + d[:, None] * D + column_E[None, :], mask=(d < D)[:, None] & live_E[None, :], other=0.0)
        acc_TE = tl.dot(as_float(x), as_float(r), acc_TE, input_precision="ieee")
    return acc_TE


@triton.jit
def _threshold(x_TE, live_E, clip_index):
    """``tau = sort(|row|)[clip_index]`` of every row: the largest v with at most `clip_index` below it."""
    magnitude_TE = tl.where(live_E[None, :], (x_TE.to(tl.int32, bitcast=True) >> 16) & 0x7FFF, 0x8000)
    tau_T = tl.sum(magnitude_TE, axis=1) * 0
    for step in range(15):
        trial_T = tau_T + (16384 >> step)
        below_T = tl.sum((magnitude_TE < trial_T[:, None]).to(tl.int32), axis=1)
        tau_T = tl.where(below_T <= clip_index, trial_T, tau_T)
    return (tau_T << 16).to(tl.float32, bitcast=True)


@triton.jit
def _clamp(x, limit):
    """`x` no further from 0 than `limit`."""
    return tl.minimum(tl.maximum(x, -1.0 * limit), limit)


@triton.jit
def _encode_side(
    x_ptr, x_stride, r_ptr, codes_ptr, meta_ptr, tau_ptr, first_token, clip_index,
    D: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, INTEGER: tl.constexpr,
    FEEDBACK: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, ROTATE: tl.constexpr, STEP: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Quantize the TILE rows at `x_ptr` and write their codes and metadata into the page at `codes_ptr`, `meta_ptr`.

    With FEEDBACK what they were clipped to goes to `tau_ptr`, in place of codes.
    """
    PER_BYTE: tl.constexpr = 8 // BITS
    WIDTH: tl.constexpr = PER_BYTE * CHUNK
    LEVELS: tl.constexpr = 2**BITS - 1
    BYTES: tl.constexpr = D // PER_BYTE
    token_T = first_token + tl.arange(0, TILE)
    e = tl.arange(0, WIDTH)
    live_E = e % CHUNK < BYTES
    channel_E = e // CHUNK * BYTES + e % CHUNK
    if ROTATE:
        live_T = token_T < PAGE
        row_ptr = x_ptr + first_token * x_stride
        y_TE = _matmul(row_ptr, x_stride, r_ptr, live_T, channel_E, live_E, D, TILE, WIDTH, STEP)
        x_TE = bf16_bits(y_TE).to(tl.float32, bitcast=True)
    else:
        x_TE = as_float(
            tl.load(x_ptr + token_T[:, None] * x_stride + channel_E[None, :], mask=live_E[None, :], other=0.0)
        )
    tau_T = tl.full([TILE], float("inf"), tl.float32)
    if clip_index < D - 1:
        tau_T = _threshold(x_TE, live_E, clip_index)
        x_TE = _clamp(x_TE, tau_T[:, None])

    scale_TE = tl.full([TILE, WIDTH], 1.0, tl.float32)
    zero_TE = tl.zeros([TILE, WIDTH], tl.float32)
    for group in tl.static_range(D // GROUP):
        member_1E = (live_E & (channel_E // GROUP == group))[None, :]
        low_T = tl.min(tl.where(member_1E, x_TE, float("inf")), axis=1)
        high_T = tl.max(tl.where(member_1E, x_TE, float("-inf")), axis=1)
        scale_T = bf16_bits(tl.div_rn(high_T - low_T, tl.full([TILE], LEVELS, tl.float32)))
        scale_T = scale_T.to(tl.float32, bitcast=True)
        constant_T = bf16_bits(tl.where(low_T == 0.0, 1.0, tl.abs(low_T))).to(tl.float32, bitcast=True)
        scale_T = tl.where(scale_T < _SMALLEST_SCALE, constant_T, scale_T)
        low_T = tl.div_rn(low_T, scale_T)
        if INTEGER:
            low_T = round_even(low_T)
        zero_T = bf16_bits(0.0 - low_T)  # not -low: the sign of a stored zero is always plus
        meta_T = zero_T | ((scale_T.to(tl.int32, bitcast=True) >> 16) & 0xFFFF)
        tl.store(meta_ptr.to(tl.pointer_type(tl.int32)) + group * PAGE + token_T, meta_T)
        scale_TE = tl.where(member_1E, scale_T[:, None], scale_TE)
        zero_TE = tl.where(member_1E, zero_T.to(tl.float32, bitcast=True)[:, None], zero_TE)

    if FEEDBACK:
        tl.store(tau_ptr + token_T, tau_T)
    else:
        y_TE = tl.minimum(tl.maximum(tl.div_rn(x_TE, scale_TE) + zero_TE, 0.0), LEVELS + 0.0)
        codes_TE = (y_TE + 12582912.0).to(tl.int32, bitcast=True) & LEVELS  # adding 1.5 * 2^23 rounds ties to even
        shifted_TE = codes_TE << (BITS * (e // CHUNK))[None, :]
        bytes_TC = tl.sum(tl.reshape(shifted_TE, [TILE, PER_BYTE, CHUNK]), axis=1).to(tl.uint8)
        c = tl.arange(0, CHUNK)
        out_TC = c[None, :] * PAGE + token_T[:, None] if TRANSPOSED else token_T[:, None] * BYTES + c[None, :]
        tl.store(codes_ptr + out_TC, bytes_TC, mask=(c < BYTES)[None, :])


@triton.jit(do_not_specialize=["k_clip_index", "v_clip_index"])
def _write_kernel(
    k_ptr, v_ptr, rk_ptr, rv_ptr, pages_ptr, ids_ptr, tau_ptr, k_clip_index, v_clip_index,
    k_stride_n, k_stride_k, k_stride_t, v_stride_n, v_stride_k, v_stride_t, page_stride_p, page_stride_k,
    D: tl.constexpr, PAGE: tl.constexpr,
    K_BITS: tl.constexpr, K_GROUP: tl.constexpr, K_INTEGER: tl.constexpr, K_FEEDBACK: tl.constexpr,
    K_CHUNK: tl.constexpr, K_TILE: tl.constexpr,
    V_BITS: tl.constexpr, V_GROUP: tl.constexpr, V_INTEGER: tl.constexpr, V_FEEDBACK: tl.constexpr,
    V_CHUNK: tl.constexpr, V_TILE: tl.constexpr,
    ROTATE_K: tl.constexpr, ROTATE_V: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program per (block, KV head, tile of tokens of the keys or of the values)."""
    V_CODES: tl.constexpr = PAGE * D * K_BITS // 8
    K_META: tl.constexpr = V_CODES + PAGE * D * V_BITS // 8
    V_META: tl.constexpr = K_META + PAGE * 4 * (D // K_GROUP)
    block = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(2)
    page_ptr = pages_ptr + tl.load(ids_ptr + block).to(tl.int64) * page_stride_p + head * page_stride_k
    tau_ptr += (block * tl.num_programs(1) + head) * 2 * PAGE
    if tile < PAGE // K_TILE:
        _encode_side(
            k_ptr + block * k_stride_n + head * k_stride_k, k_stride_t, rk_ptr + head * D * D,
            page_ptr, page_ptr + K_META, tau_ptr, tile * K_TILE, k_clip_index,
            D, PAGE, K_BITS, K_GROUP, K_INTEGER, K_FEEDBACK, K_CHUNK, K_TILE, ROTATE_K, STEP, False,
        )  # fmt: skip
    else:
        _encode_side(
            v_ptr + block * v_stride_n + head * v_stride_k, v_stride_t, rv_ptr + head * D * D,
            page_ptr + V_CODES, page_ptr + V_META, tau_ptr + PAGE, (tile - PAGE // K_TILE) * V_TILE, v_clip_index,
            D, PAGE, V_BITS, V_GROUP, V_INTEGER, V_FEEDBACK, V_CHUNK, V_TILE, ROTATE_V, STEP, True,
        )  # fmt: skip


def supports(fmt: PageFormat) -> bool:
    """Whether these kernels can write the format; if not, the codec does."""
    return _supports_row(fmt.key) and _supports_row(fmt.value)


def write_pages(
    k_NKTD: Tensor, v_NKTD: Tensor, fmt: PageFormat, tables: PageTables, pages_PKX: Tensor, ids_N: Tensor
) -> None:
    """Encode rotated BF16 rows of whole blocks (a page's tokens) into ``pages_PKX[ids_N]``: `encode_pages`, bit for bit."""
    rotate_write(k_NKTD, v_NKTD, None, None, fmt, tables, pages_PKX, ids_N)


def rotate_write(
    k_NKTD: Tensor,
    v_NKTD: Tensor,
    rk_KDD: Tensor | None,
    rv_KDD: Tensor | None,
    fmt: PageFormat,
    tables: PageTables,
    pages_PKX: Tensor,
    ids_N: Tensor,
) -> None:
    """Rotate (where a rotation is given), round to BF16, clip, quantize, pack and write blocks of rows at once."""
    num_blocks, num_heads, num_tokens, head_dim = k_NKTD.shape
    if num_tokens != fmt.tokens or v_NKTD.shape != k_NKTD.shape:
        raise ValueError(f"expected blocks [N, K, {fmt.tokens}, D], got {[*k_NKTD.shape]} and {[*v_NKTD.shape]}")
    for x, r in ((k_NKTD, rk_KDD), (v_NKTD, rv_KDD)):
        if r is None and x.dtype != torch.bfloat16:
            raise TypeError(f"rotated rows are bfloat16, got {x.dtype}")
    if head_dim != fmt.head_dim or pages_PKX.shape[1:] != (num_heads, fmt.page_bytes):
        raise ValueError(f"pages {[*pages_PKX.shape]} do not fit {num_heads} heads of {head_dim} in {fmt}")
    if not supports(fmt):
        raise ValueError(f"no kernel writes {fmt}")
    if not num_blocks:
        return
    feed_k, feed_v = (row.rounding == "error_feedback" for row in (fmt.key, fmt.value))
    if feed_k and rk_KDD is not None:
        k_NKTD, rk_KDD = rotate_rows(k_NKTD, rk_KDD), None  # two launches read these rows
    if feed_v and rv_KDD is not None:
        v_NKTD, rv_KDD = rotate_rows(v_NKTD, rv_KDD), None
    ids_N = ids_N.contiguous()
    tau_shape = (num_blocks, num_heads, 2, num_tokens) if feed_k or feed_v else (1,)
    tau_NK2T = torch.empty(tau_shape, dtype=torch.float32, device=k_NKTD.device)
    k_chunk, k_tile = _tile(fmt.key, fmt.tokens)
    v_chunk, v_tile = _tile(fmt.value, fmt.tokens)
    grid = (num_blocks, num_heads, fmt.tokens // k_tile + fmt.tokens // v_tile)
    _write_kernel[grid](
        _dense_rows(k_NKTD), _dense_rows(v_NKTD), _matrices(rk_KDD, k_NKTD), _matrices(rv_KDD, v_NKTD),
        _dense_rows(pages_PKX), ids_N, tau_NK2T, fmt.key.clip_index, fmt.value.clip_index,
        *k_NKTD.stride()[:3], *v_NKTD.stride()[:3], *pages_PKX.stride()[:2],
        D=head_dim, PAGE=fmt.tokens,
        K_BITS=fmt.key.bits, K_GROUP=fmt.key.group_size, K_INTEGER=fmt.key.zero_point == "integer",
        K_FEEDBACK=feed_k, K_CHUNK=k_chunk, K_TILE=k_tile,
        V_BITS=fmt.value.bits, V_GROUP=fmt.value.group_size, V_INTEGER=fmt.value.zero_point == "integer",
        V_FEEDBACK=feed_v, V_CHUNK=v_chunk, V_TILE=v_tile,
        ROTATE_K=rk_KDD is not None, ROTATE_V=rv_KDD is not None, STEP=_DOT_TILE, num_warps=4,
    )  # fmt: skip
    if feed_k:
        _feed_errors(k_NKTD, tables.key.feedback, fmt, "key", pages_PKX, ids_N, tau_NK2T[:, :, 0])
    if feed_v:
        _feed_errors(v_NKTD, tables.value.feedback, fmt, "value", pages_PKX, ids_N, tau_NK2T[:, :, 1])


@triton.jit
def _power_of_two(n):
    """``2^n`` as float32 for every n that float32 holds, subnormal powers too: a product of two normal ones."""
    half = n >> 1
    low = ((half + 127) << 23).to(tl.float32, bitcast=True)
    return low * ((n - half + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _exponent(x):
    """The exponent e of positive finite float32 numbers, subnormal ones too: ``2^(e - 1) <= x < 2^e``."""
    small = x < 1e-30
    bits = tl.where(small, x * 18446744073709551616.0, x).to(tl.int32, bitcast=True)  # 2^64
    return (bits >> 23) - 126 - tl.where(small, 64, 0)


@triton.jit
def _split_columns(x_TJ, TILE: tl.constexpr):
    """``[TILE, 16]`` to its 16 columns ``[TILE]``."""
    parts = (x_TJ,)
    for level in tl.static_range(4):
        halves = ()
        for p in tl.static_range(2**level):
            x = tl.permute(tl.reshape(parts[p], [TILE, 2, 8 >> level]), (0, 2, 1))
            low, high = tl.split(x)
            halves = halves + (low, high)
        parts = halves
    columns = ()
    for p in tl.static_range(16):
        columns = columns + (tl.reshape(parts[p], [TILE]),)
    return columns


@triton.jit
def _join_words(columns, TILE: tl.constexpr):
    """16 columns ``[TILE]`` as pairs of float16 in int32 ``[TILE, 8]``: halves by themselves would take whole registers."""
    parts = ()
    for p in tl.static_range(8):
        low = columns[2 * p].to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        high = columns[2 * p + 1].to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        parts = parts + (tl.reshape((low & 0xFFFF) | (high << 16), [TILE, 1]),)
    for level in tl.static_range(3):
        pairs = ()
        for p in tl.static_range(4 >> level):
            x = tl.permute(tl.join(parts[2 * p], parts[2 * p + 1]), (0, 2, 1))
            pairs = pairs + (tl.reshape(x, [TILE, 2 << level]),)
        parts = pairs
    return parts[0]


@triton.jit
def _halves(words_TW, TILE: tl.constexpr):
    """What `_join_words` has joined, as float16 ``[TILE, 16]``."""
    low = words_TW.to(tl.int16).to(tl.float16, bitcast=True)
    high = (words_TW >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.reshape(tl.join(low, high), [TILE, 16])


@triton.jit
def _feedback_kernel(
    x_ptr, factor_ptr, pages_ptr, ids_ptr, tau_ptr, x_stride_n, x_stride_k, x_stride_t, page_stride_p, page_stride_k,
    D: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, CODES: tl.constexpr,
    META: tl.constexpr, TRANSPOSED: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program per (block, KV head, tile of tokens): `codec.feedback_codes` on the grid at `META`, written to `CODES`.

    CHUNK is the bytes of a row, padded. Dots are exact: small integers in float16, times multiples of 1/64 (errors and
    factor) or powers of two (codes and their places in bytes).
    """
    J: tl.constexpr = _BLOCK
    BYTES: tl.constexpr = D * BITS // 8
    LEVELS: tl.constexpr = 2**BITS - 1
    block = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    token_T = tl.program_id(2) * TILE + tl.arange(0, TILE)
    j = tl.arange(0, J)
    c = tl.arange(0, CHUNK)
    page_ptr = pages_ptr + tl.load(ids_ptr + block).to(tl.int64) * page_stride_p + head * page_stride_k
    meta_T_ptr = (page_ptr + META).to(tl.pointer_type(tl.int32)) + token_T
    x_T_ptr = x_ptr + block * x_stride_n + head * x_stride_k + token_T * x_stride_t
    factor_ptr += head * D * D

    tau_T = tl.load(tau_ptr + (block * tl.num_programs(1) + head) * 2 * PAGE + token_T)
    largest_T = tl.zeros([TILE], tl.float32)
    for group in tl.static_range(D // GROUP):
        scale_T = (tl.load(meta_T_ptr + group * PAGE) << 16).to(tl.float32, bitcast=True)
        largest_T = tl.maximum(largest_T, scale_T)
    exponent_T = _exponent(largest_T)
    delta_T = _power_of_two(exponent_T - 7)
    up_T = _power_of_two((7 - exponent_T) >> 1)  # 1 / delta as two factors, because it may be too large for one
    rest_T = _power_of_two(7 - exponent_T - ((7 - exponent_T) >> 1))

    past = ()  # the errors of earlier blocks, the latest first
    for _block in tl.static_range(max(D // J - 1, 1)):
        past = past + (tl.zeros([TILE, J // 2], tl.int32),)
    bytes_TC = tl.zeros([TILE, CHUNK], tl.float32)
    for b in tl.range(0, D // J, num_stages=1):
        first = b * J
        x_TJ = as_float(tl.load(x_T_ptr[:, None] + (first + j)[None, :]))
        xs = _split_columns(_clamp(x_TJ, tau_T[:, None]), TILE)
        fed_TJ = tl.zeros([TILE, J], tl.float32)
        for ago in tl.static_range(len(past)):
            row_J = first - (ago + 1) * J + j
            u_JJ = tl.load(factor_ptr + row_J[:, None] * D + (first + j)[None, :], mask=row_J[:, None] >= 0, other=0.0)
            fed_TJ = tl.dot(_halves(past[ago], TILE), u_JJ.to(tl.float16), fed_TJ)
        feds = _split_columns(fed_TJ, TILE)
        meta_T = tl.load(meta_T_ptr + first // GROUP * PAGE)
        scale_T = (meta_T << 16).to(tl.float32, bitcast=True)
        zero_T = (meta_T & -65536).to(tl.float32, bitcast=True)
        word_T = tl.zeros([TILE], tl.int32 if J * BITS <= 32 else tl.int64)  # the block's codes
        errors = ()
        for i in tl.static_range(J):
            y_T = tl.div_rn(xs[i] - feds[0] * delta_T, scale_T) + zero_T
            code_T = round_even(tl.minimum(tl.maximum(y_T, 0.0), LEVELS + 0.0))
            word_T |= code_T.to(word_T.dtype) << (BITS * i)
            difference_T = (code_T - zero_T) * scale_T - xs[i]
            error_T = round_even(_clamp(difference_T * up_T * rest_T, _ERROR_LIMIT + 0.0))
            errors = errors + (error_T,)
            later = ()
            for k in tl.static_range(i + 1, J):
                later = later + (tl.fma(error_T, tl.load(factor_ptr + (first + i) * D + first + k), feds[k - i]),)
            feds = later
        shifted = (_join_words(errors, TILE),)
        for ago in tl.static_range(len(past) - 1):
            shifted = shifted + (past[ago],)
        past = shifted
        place_JC = (first + j)[:, None] % BYTES == c[None, :]
        weight_JC = tl.where(place_JC, 1 << (BITS * ((first + j) // BYTES))[:, None], 0).to(tl.float16)
        codes_TJ = ((word_T[:, None] >> (BITS * j)[None, :]) & LEVELS).to(tl.float16)
        bytes_TC = tl.dot(codes_TJ, weight_JC, bytes_TC)

    out_TC = c[None, :] * PAGE + token_T[:, None] if TRANSPOSED else token_T[:, None] * BYTES + c[None, :]
    tl.store(page_ptr + CODES + out_TC, bytes_TC.to(tl.int32).to(tl.uint8), mask=(c < BYTES)[None, :])


def _feed_errors(
    x_NKTD: Tensor,
    factor_KDD: Tensor | None,
    fmt: PageFormat,
    side: Literal["key", "value"],
    pages_PKX: Tensor,
    ids_N: Tensor,
    tau_NKT: Tensor,
) -> None:
    """Write the codes of one side of pages whose metadata are there; rows were clipped to `tau_NKT`."""
    num_blocks, num_heads, _, head_dim = x_NKTD.shape
    row = fmt.key if side == "key" else fmt.value
    if factor_KDD is None:
        raise ValueError(f"error feedback of the {side} rows needs its factor")
    _feedback_kernel[(num_blocks, num_heads, fmt.tokens // _FEEDBACK_TILE)](
        x_NKTD, _matrices(factor_KDD, x_NKTD), pages_PKX, ids_N, tau_NKT,
        *x_NKTD.stride()[:3], *pages_PKX.stride()[:2],
        D=head_dim, PAGE=fmt.tokens, BITS=row.bits, GROUP=row.group_size, CODES=fmt.sections[f"{side}_codes"][0],
        META=fmt.sections[f"{side}_meta"][0], TRANSPOSED=side == "value", TILE=_FEEDBACK_TILE,
        CHUNK=max(16, triton.next_power_of_2(row.row_bytes)),
        num_warps=_FEEDBACK_TILE // 32, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _rotate_kernel(
    x_ptr, r_ptr, out_ptr, num_tokens, x_stride_b, x_stride_h, x_stride_t, out_stride_b, out_stride_h,
    HEADS_PER_MATRIX: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
    ROUND: tl.constexpr,
):  # fmt: skip
    """One program per (tile of tokens, head, batch row)."""
    first = tl.program_id(0).to(tl.int64) * TILE
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    d = tl.arange(0, WIDTH)
    t = tl.arange(0, TILE)
    live_T = first + t < num_tokens
    x_ptr += row * x_stride_b + head * x_stride_h + first * x_stride_t
    matrix_ptr = r_ptr + head // HEADS_PER_MATRIX * D * D
    y_TD = _matmul(x_ptr, x_stride_t, matrix_ptr, live_T, d, d < D, D, TILE, WIDTH, STEP)
    out_ptr += row * out_stride_b + head * out_stride_h + first * D
    if ROUND:
        y_TD = to_bf16(y_TD)
    tl.store(out_ptr + t[:, None] * D + d[None, :], y_TD, mask=live_T[:, None] & (d < D)[None, :])


def rotate_rows(x_BHTD: Tensor, r_KDD: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Every head's rows times its KV head's matrix, accumulated in float32: bfloat16 or float32 ``[B, H, T, D]``.

    For keys and values H = K; for queries H = K G, head h belongs to KV head h // G.
    """
    batch, num_heads, num_tokens, head_dim = x_BHTD.shape
    if num_heads % r_KDD.shape[0] or r_KDD.shape[1:] != (head_dim, head_dim):
        raise ValueError(f"rotations {[*r_KDD.shape]} do not fit rows {[*x_BHTD.shape]}")
    out_BHTD = torch.empty((batch, num_heads, num_tokens, head_dim), dtype=dtype, device=x_BHTD.device)
    if not out_BHTD.numel():
        return out_BHTD
    x_BHTD = _dense_rows(x_BHTD)
    tile = 16 if num_tokens <= 16 else 32
    _rotate_kernel[(triton.cdiv(num_tokens, tile), num_heads, batch)](
        x_BHTD, r_KDD.contiguous(), out_BHTD, num_tokens, *x_BHTD.stride()[:3], *out_BHTD.stride()[:2],
        HEADS_PER_MATRIX=num_heads // r_KDD.shape[0], D=head_dim, TILE=tile,
        WIDTH=triton.next_power_of_2(head_dim), STEP=_DOT_TILE, ROUND=dtype == torch.bfloat16, num_warps=4,
    )  # fmt: skip
    return out_BHTD


def _supports_row(row: RowFormat) -> bool:
    grid = row.axis == "token" and row.zero_point != "none" and row.token_scale == "none" and not row.centroids
    blocks = row.rounding == "nearest" or (row.head_dim % BLOCK == 0 and row.group_size % BLOCK == 0)
    return grid and blocks


def _tile(row: RowFormat, page_tokens: int) -> tuple[int, int]:
    """Padded chunk of a row, and how many rows one program takes."""
    chunk = triton.next_power_of_2(row.row_bytes)
    return chunk, min(page_tokens, max(16, _TILE_ELEMENTS * row.bits // (8 * chunk)))


def _dense_rows(x: Tensor) -> Tensor:
    """`x`, whose last dimension the kernels walk with stride 1."""
    if x.stride(-1) != 1:
        raise ValueError(f"the last dimension must be contiguous, strides are {x.stride()}")
    return x


def _matrices(r_KDD: Tensor | None, x_NKTD: Tensor) -> Tensor:
    """Contiguous matrices of all heads, or any tensor as a placeholder where there are none."""
    if r_KDD is None:
        return x_NKTD
    if r_KDD.shape != (x_NKTD.shape[1], x_NKTD.shape[3], x_NKTD.shape[3]):
        raise ValueError(f"matrices {[*r_KDD.shape]} do not fit rows {[*x_NKTD.shape]}")
    return r_KDD.contiguous()
