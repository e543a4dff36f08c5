"""What a row has stored, decoded to bfloat16 for an attention kernel that reads dense rows: a chunk on a quantized prefix.

Shapes: K KV heads, D head_dim, n tokens of the row; in a kernel T tokens of a page and C channels, padded.

Decoding writes 4 D bytes for the D / 2 and some that it reads, once per chunk. A chunk of many queries spends far more on its
products, which is why the best BF16 attention over decoded rows comes close to a kernel of its own.
"""
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from kvcompile.codec.layer import LayerCache
from kvcompile.codec.page import PageFormat
from kvcompile.kernels import triton_decode
from kvcompile.kernels.triton_encode import as_float, to_bf16


@triton.jit
def _decode_half(
    page_ptr, out_ptr, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, CHANNEL: tl.constexpr, CODES: tl.constexpr,
    META: tl.constexpr, NORM: tl.constexpr, TRANSPOSED: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Keys or values of a page to rows of D at `out_ptr`: ``(code - zero) scale``, times the token's norm (NORM its offset)."""
    BYTES: tl.constexpr = D * BITS // 8
    t = tl.arange(0, PAGE)
    d = tl.arange(0, WIDTH)
    live_TC = (t >= 0)[:, None] & (d < D)[None, :]
    j = d % BYTES
    place_TC = j[None, :] * PAGE + t[:, None] if TRANSPOSED else t[:, None] * BYTES + j[None, :]
    bytes_TC = tl.load(page_ptr + CODES + place_TC, mask=live_TC, other=0).to(tl.int32)
    codes_TC = (bytes_TC >> (d // BYTES * BITS)[None, :]) & (2**BITS - 1)
    cell_TC = (t // GROUP * D)[:, None] + d[None, :] if CHANNEL else (d // GROUP * PAGE)[None, :] + t[:, None]
    meta_TC = tl.load(page_ptr.to(tl.pointer_type(tl.int32)) + META // 4 + cell_TC, mask=live_TC, other=0)
    zero_TC = (meta_TC & -65536).to(tl.float32, bitcast=True)
    x_TC = (codes_TC.to(tl.float32) - zero_TC) * (meta_TC << 16).to(tl.float32, bitcast=True)
    if NORM:
        norm_T = tl.load(page_ptr.to(tl.pointer_type(tl.bfloat16)) + NORM // 2 + t)
        x_TC *= as_float(norm_T)[:, None]
    tl.store(out_ptr + t[:, None] * D + d[None, :], to_bf16(x_TC), mask=live_TC)


@triton.jit(do_not_specialize=["out_stride_k"])
def _decode_kernel(
    pages_ptr, table_ptr, k_ptr, v_ptr, page_stride_p, page_stride_k, out_stride_k,
    D: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr,
    K_BITS: tl.constexpr, K_GROUP: tl.constexpr, K_CHANNEL: tl.constexpr, K_META: tl.constexpr, K_NORM: tl.constexpr,
    V_BITS: tl.constexpr, V_GROUP: tl.constexpr, V_CODES: tl.constexpr, V_META: tl.constexpr,
):  # fmt: skip
    """One program per (column of the row's page table, KV head, keys or values)."""
    column, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    page_ptr = pages_ptr + tl.load(table_ptr + column).to(tl.int64) * page_stride_p + head * page_stride_k
    first = head * out_stride_k + column * PAGE * D
    if tl.program_id(2) == 0:
        _decode_half(page_ptr, k_ptr + first, D, K_BITS, K_GROUP, K_CHANNEL, 0, K_META, K_NORM, False, PAGE, WIDTH)
    else:
        _decode_half(page_ptr, v_ptr + first, D, V_BITS, V_GROUP, False, V_CODES, V_META, 0, True, PAGE, WIDTH)


def supports(fmt: PageFormat) -> bool:
    """Whether this kernel decodes the format: whatever the decode attention reads."""
    return triton_decode.supports(fmt)


def history_rows(layer: LayerCache, row: int, room: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values of one batch row in order of position, bfloat16 ``[K, n + room, D]``; the last `room` are undefined.

    Means `LayerCache.dense_row`, rounded. Raises ValueError for a format that no kernel reads.
    """
    fmt = layer.fmt
    if not supports(fmt):
        raise ValueError(f"no kernel reads {fmt}")
    num_pages, sink, ring = int(layer.num_pages_B[row]), *layer.window_slots(row)
    first, end = len(sink), len(sink) + num_pages * fmt.tokens
    num_heads = layer.pages_PKX.shape[1]
    shape = num_heads, end + len(ring) + room, fmt.head_dim
    k_KTD, v_KTD = (torch.empty(shape, dtype=torch.bfloat16, device=layer.pages_PKX.device) for _ in "kv")
    windows = ((k_KTD, layer.sink_k_BKSD, layer.recent_k_BKWD), (v_KTD, layer.sink_v_BKSD, layer.recent_v_BKWD))
    for x_KTD, sink_BKSD, recent_BKWD in windows:
        x_KTD[:, :first] = sink_BKSD[row, :, sink]
        x_KTD[:, end : end + len(ring)] = recent_BKWD[row, :, ring]
    if num_pages:
        _decode_kernel[(num_pages, num_heads, 2)](
            layer.pages_PKX, layer.table_BN[row], k_KTD[:, first:], v_KTD[:, first:], *layer.pages_PKX.stride()[:2],
            k_KTD.stride(0), D=fmt.head_dim, PAGE=fmt.tokens, WIDTH=triton.next_power_of_2(fmt.head_dim),
            K_BITS=fmt.key.bits, K_GROUP=fmt.key.group_size, K_CHANNEL=fmt.key.axis == "channel",
            K_META=fmt.key_meta_offset, K_NORM=fmt.sections["key_norm"][0] if fmt.key.token_scale != "none" else 0,
            V_BITS=fmt.value.bits, V_GROUP=fmt.value.group_size, V_CODES=fmt.value_offset, V_META=fmt.value_meta_offset,
            num_warps=4,
        )  # fmt: skip
    return k_KTD, v_KTD


def attend_chunk(q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, layer: LayerCache, row: int, scaling: float) -> Tensor:
    """Means `codec.attend_chunk`, in bfloat16: PyTorch's fused causal attention over decoded rows; float32 ``[H, T, D]``."""
    new = q_HTD.shape[1]
    all_k_KTD, all_v_KTD = history_rows(layer, row, new)
    all_k_KTD[:, all_k_KTD.shape[1] - new :] = k_KTD
    all_v_KTD[:, all_v_KTD.shape[1] - new :] = v_KTD
    visible = causal_lower_right(new, all_k_KTD.shape[1])
    out_1HTD = scaled_dot_product_attention(
        q_HTD[None].bfloat16(), all_k_KTD[None], all_v_KTD[None], visible, scale=scaling, enable_gqa=True
    )
    return out_1HTD[0].float()
