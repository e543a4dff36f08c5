"""Triton kernels that turn rows into pages, bit for bit as `kvcompile.codec` does, and that rotate rows.

Shapes: B batch rows, K KV heads, G query heads per KV head, H = K G, T tokens, D head_dim, N blocks of 64 tokens,
P pages, X page bytes; in a kernel T is a tile of tokens and E the channels of a row in packing order: E = n C', with
n = 8 / bits codes per byte and C' the chunk D / n rounded up to a power of two. Column i C' + c is channel i D/n + c.

What bit equality rests on: every float32 operation is the codec's and none may be fused or approximated (`div_rn`,
and no product is ever added); the clip threshold is an exact order statistic, found by bisection on the integer bits
of |bf16|; BF16 is read and written as integers, because the interpreter's own conversions round ties away from zero.
"""
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcompile.codec.page import PAGE_TOKENS, PageFormat

_SMALLEST_SCALE = tl.constexpr(1e-30)  # codec.quantizer.SMALLEST_SCALE
_PAGE_TOKENS = tl.constexpr(PAGE_TOKENS)
_TILE_ELEMENTS = 4096  # rows of a program x padded channels: what four warps hold in registers
_DOT_TILE = 16


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
def _clip(x_TE, live_E, clip_index):
    """Clamp rows to ``+-tau``, ``tau = sort(|row|)[clip_index]``: the largest v with at most `clip_index` below it."""
    magnitude_TE = tl.where(live_E[None, :], (x_TE.to(tl.int32, bitcast=True) >> 16) & 0x7FFF, 0x8000)
    tau_T = tl.sum(magnitude_TE, axis=1) * 0
    for step in range(15):
        trial_T = tau_T + (16384 >> step)
        below_T = tl.sum((magnitude_TE < trial_T[:, None]).to(tl.int32), axis=1)
        tau_T = tl.where(below_T <= clip_index, trial_T, tau_T)
    tau_T1 = (tau_T << 16).to(tl.float32, bitcast=True)[:, None]
    return tl.minimum(tl.maximum(x_TE, -1.0 * tau_T1), tau_T1)


@triton.jit
def _encode_side(
    x_ptr, x_stride, r_ptr, codes_ptr, meta_ptr, first_token, clip_index,
    D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    ROTATE: tl.constexpr, STEP: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Quantize the TILE rows at `x_ptr` and write their codes and metadata into the page at `codes_ptr`, `meta_ptr`."""
    PER_BYTE: tl.constexpr = 8 // BITS
    WIDTH: tl.constexpr = PER_BYTE * CHUNK
    LEVELS: tl.constexpr = 2**BITS - 1
    BYTES: tl.constexpr = D // PER_BYTE
    token_T = first_token + tl.arange(0, TILE)
    e = tl.arange(0, WIDTH)
    live_E = e % CHUNK < BYTES
    channel_E = e // CHUNK * BYTES + e % CHUNK
    if ROTATE:
        live_T = token_T < _PAGE_TOKENS
        row_ptr = x_ptr + first_token * x_stride
        y_TE = _matmul(row_ptr, x_stride, r_ptr, live_T, channel_E, live_E, D, TILE, WIDTH, STEP)
        x_TE = bf16_bits(y_TE).to(tl.float32, bitcast=True)
    else:
        x_TE = as_float(
            tl.load(x_ptr + token_T[:, None] * x_stride + channel_E[None, :], mask=live_E[None, :], other=0.0)
        )
    if clip_index < D - 1:
        x_TE = _clip(x_TE, live_E, clip_index)

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
        zero_T = bf16_bits(0.0 - tl.div_rn(low_T, scale_T))  # not -low: the sign of a stored zero is always plus
        meta_T = zero_T | ((scale_T.to(tl.int32, bitcast=True) >> 16) & 0xFFFF)
        tl.store(meta_ptr.to(tl.pointer_type(tl.int32)) + group * _PAGE_TOKENS + token_T, meta_T)
        scale_TE = tl.where(member_1E, scale_T[:, None], scale_TE)
        zero_TE = tl.where(member_1E, zero_T.to(tl.float32, bitcast=True)[:, None], zero_TE)

    y_TE = tl.minimum(tl.maximum(tl.div_rn(x_TE, scale_TE) + zero_TE, 0.0), LEVELS + 0.0)
    codes_TE = (y_TE + 12582912.0).to(tl.int32, bitcast=True) & LEVELS  # adding 1.5 * 2^23 rounds ties to even
    shifted_TE = codes_TE << (BITS * (e // CHUNK))[None, :]
    bytes_TC = tl.sum(tl.reshape(shifted_TE, [TILE, PER_BYTE, CHUNK]), axis=1).to(tl.uint8)
    c = tl.arange(0, CHUNK)
    out_TC = c[None, :] * _PAGE_TOKENS + token_T[:, None] if TRANSPOSED else token_T[:, None] * BYTES + c[None, :]
    tl.store(codes_ptr + out_TC, bytes_TC, mask=(c < BYTES)[None, :])


@triton.jit(do_not_specialize=["k_clip_index", "v_clip_index"])
def _write_kernel(
    k_ptr, v_ptr, rk_ptr, rv_ptr, pages_ptr, ids_ptr, k_clip_index, v_clip_index,
    k_stride_n, k_stride_k, k_stride_t, v_stride_n, v_stride_k, v_stride_t, page_stride_p, page_stride_k,
    D: tl.constexpr, K_BITS: tl.constexpr, K_GROUP: tl.constexpr, K_CHUNK: tl.constexpr, K_TILE: tl.constexpr,
    V_BITS: tl.constexpr, V_GROUP: tl.constexpr, V_CHUNK: tl.constexpr, V_TILE: tl.constexpr,
    ROTATE_K: tl.constexpr, ROTATE_V: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program per (block, KV head, tile of tokens of the keys or of the values)."""
    PAGE: tl.constexpr = 64
    V_CODES: tl.constexpr = PAGE * D * K_BITS // 8
    K_META: tl.constexpr = V_CODES + PAGE * D * V_BITS // 8
    V_META: tl.constexpr = K_META + PAGE * 4 * (D // K_GROUP)
    block = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(2)
    page_ptr = pages_ptr + tl.load(ids_ptr + block).to(tl.int64) * page_stride_p + head * page_stride_k
    if tile < PAGE // K_TILE:
        _encode_side(
            k_ptr + block * k_stride_n + head * k_stride_k, k_stride_t, rk_ptr + head * D * D,
            page_ptr, page_ptr + K_META, tile * K_TILE, k_clip_index,
            D, K_BITS, K_GROUP, K_CHUNK, K_TILE, ROTATE_K, STEP, False,
        )  # fmt: skip
    else:
        _encode_side(
            v_ptr + block * v_stride_n + head * v_stride_k, v_stride_t, rv_ptr + head * D * D,
            page_ptr + V_CODES, page_ptr + V_META, (tile - PAGE // K_TILE) * V_TILE, v_clip_index,
            D, V_BITS, V_GROUP, V_CHUNK, V_TILE, ROTATE_V, STEP, True,
        )  # fmt: skip


def write_pages(k_NKTD: Tensor, v_NKTD: Tensor, fmt: PageFormat, pages_PKX: Tensor, ids_N: Tensor) -> None:
    """Encode rotated BF16 rows of whole blocks (T = 64) into ``pages_PKX[ids_N]``: `encode_pages`, bit for bit."""
    rotate_write(k_NKTD, v_NKTD, None, None, fmt, pages_PKX, ids_N)


def rotate_write(
    k_NKTD: Tensor,
    v_NKTD: Tensor,
    rk_KDD: Tensor | None,
    rv_KDD: Tensor | None,
    fmt: PageFormat,
    pages_PKX: Tensor,
    ids_N: Tensor,
) -> None:
    """Rotate (where a rotation is given), round to BF16, clip, quantize, pack and write blocks of 64 rows at once."""
    num_blocks, num_heads, num_tokens, head_dim = k_NKTD.shape
    if num_tokens != PAGE_TOKENS or v_NKTD.shape != k_NKTD.shape:
        raise ValueError(f"expected blocks [N, K, {PAGE_TOKENS}, D], got {[*k_NKTD.shape]} and {[*v_NKTD.shape]}")
    for x, r in ((k_NKTD, rk_KDD), (v_NKTD, rv_KDD)):
        if r is None and x.dtype != torch.bfloat16:
            raise TypeError(f"rotated rows are bfloat16, got {x.dtype}")
    if head_dim != fmt.head_dim or pages_PKX.shape[1:] != (num_heads, fmt.page_bytes):
        raise ValueError(f"pages {[*pages_PKX.shape]} do not fit {num_heads} heads of {head_dim} in {fmt}")
    if not num_blocks:
        return
    k_chunk, k_tile = _tile(head_dim, fmt.key.bits)
    v_chunk, v_tile = _tile(head_dim, fmt.value.bits)
    grid = (num_blocks, num_heads, PAGE_TOKENS // k_tile + PAGE_TOKENS // v_tile)
    _write_kernel[grid](
        _dense_rows(k_NKTD), _dense_rows(v_NKTD), _matrices(rk_KDD, k_NKTD), _matrices(rv_KDD, v_NKTD),
        _dense_rows(pages_PKX), ids_N.contiguous(), fmt.key.clip_index, fmt.value.clip_index,
        *k_NKTD.stride()[:3], *v_NKTD.stride()[:3], *pages_PKX.stride()[:2],
        D=head_dim, K_BITS=fmt.key.bits, K_GROUP=fmt.key.group_size, K_CHUNK=k_chunk, K_TILE=k_tile,
        V_BITS=fmt.value.bits, V_GROUP=fmt.value.group_size, V_CHUNK=v_chunk, V_TILE=v_tile,
        ROTATE_K=rk_KDD is not None, ROTATE_V=rv_KDD is not None, STEP=_DOT_TILE, num_warps=4,
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


def _tile(head_dim: int, bits: int) -> tuple[int, int]:
    """Padded chunk of a row, and how many rows one program takes."""
    chunk = triton.next_power_of_2(head_dim * bits // 8)
    return chunk, min(PAGE_TOKENS, max(16, _TILE_ELEMENTS * bits // (8 * chunk)))


def _dense_rows(x: Tensor) -> Tensor:
    """`x`, whose last dimension the kernels walk with stride 1."""
    if x.stride(-1) != 1:
        raise ValueError(f"the last dimension must be contiguous, strides are {x.stride()}")
    return x


def _matrices(r_KDD: Tensor | None, x_NKTD: Tensor) -> Tensor:
    """Contiguous rotations, or any tensor as a placeholder where there are none."""
    if r_KDD is None:
        return x_NKTD
    if r_KDD.shape != (x_NKTD.shape[1], x_NKTD.shape[3], x_NKTD.shape[3]):
        raise ValueError(f"rotations {[*r_KDD.shape]} do not fit rows {[*x_NKTD.shape]}")
    return r_KDD.contiguous()
