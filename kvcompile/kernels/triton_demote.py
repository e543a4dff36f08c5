"""The pages that leave the rings in a step, for all layers at once: the kernels of `triton_encode`, launched over layers.

Shapes: L layers, B batch rows, K KV heads, W ring slots, D head_dim, P pages, X page bytes, N blocks of T tokens (a page's).

Layers may differ in clip ratios and in factors of error feedback, in nothing else. Rows are read where they lie in the rings.
"""
# mypy: allow-untyped-defs

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcompile.codec import PageFormat, PageTables
from kvcompile.kernels import triton_encode
from kvcompile.kernels.triton_encode import _DOT_TILE, _FEEDBACK_TILE, _feedback_kernel, _tile, _write_kernel


@dataclass(frozen=True)
class LayerCoding:
    """The format that L layers share, and what is their own: clip indices int32 ``[L, 2]``, factors ``[L, K, D, D]``."""

    fmt: PageFormat
    clips_L2: Tensor
    key_factors_LKDD: Tensor | None
    value_factors_LKDD: Tensor | None

    @classmethod
    def of(cls, layers: Sequence[tuple[PageFormat, PageTables]], device: torch.device) -> "LayerCoding | None":
        """None where no kernel writes these layers together."""
        fmt = _unclipped(layers[0][0])
        if not triton_encode.supports(fmt) or any(_unclipped(each) != fmt for each, _ in layers):
            return None
        clips = [[each.key.clip_index, each.value.clip_index] for each, _ in layers]
        factors = (
            [getattr(tables, side).feedback for _, tables in layers]
            if getattr(fmt, side).rounding == "error_feedback"
            else None
            for side in ("key", "value")
        )
        clips_L2 = torch.tensor(clips, dtype=torch.int32, device=device)
        return cls(fmt, clips_L2, *(None if each is None else torch.stack(each).float() for each in factors))


def _unclipped(fmt: PageFormat) -> PageFormat:
    return replace(fmt, key=replace(fmt.key, clip_ratio=1.0), value=replace(fmt.value, clip_ratio=1.0))


@triton.jit
def _place(row_ptr, place_ptr, num_layers, stride_l, stride_b, stride_w, PAGE: tl.constexpr):
    """Of the program's block: its number in the list, its layer, and where in a ring it begins."""
    block = tl.program_id(0)
    n = block // num_layers
    layer = (block % num_layers).to(tl.int64)
    row, place = tl.load(row_ptr + n).to(tl.int64), tl.load(place_ptr + n).to(tl.int64)
    return n, layer, layer * stride_l + row * stride_b + place * PAGE * stride_w


@triton.jit(do_not_specialize=["num_layers"])
def _demote_kernel(
    k_ptr, v_ptr, pages_ptr, row_ptr, place_ptr, ids_ptr, clip_ptr, tau_ptr, num_layers,
    stride_l, stride_b, stride_k, stride_w, page_stride_l, page_stride_p, page_stride_k,
    D: tl.constexpr, PAGE: tl.constexpr,
    K_BITS: tl.constexpr, K_GROUP: tl.constexpr, K_INTEGER: tl.constexpr, K_FEEDBACK: tl.constexpr,
    K_CHUNK: tl.constexpr, K_TILE: tl.constexpr,
    V_BITS: tl.constexpr, V_GROUP: tl.constexpr, V_INTEGER: tl.constexpr, V_FEEDBACK: tl.constexpr,
    V_CHUNK: tl.constexpr, V_TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program per (block and layer, KV head, tile of tokens): `_write_kernel` on one layer's rows and pages."""
    n, layer, start = _place(row_ptr, place_ptr, num_layers, stride_l, stride_b, stride_w, PAGE)
    ids_ptr += n - tl.program_id(0)  # where `_write_kernel` looks for its block's page
    _write_kernel(
        k_ptr + start, v_ptr + start, k_ptr, v_ptr, pages_ptr + layer * page_stride_l, ids_ptr, tau_ptr,
        tl.load(clip_ptr + 2 * layer), tl.load(clip_ptr + 2 * layer + 1),
        0, stride_k, stride_w, 0, stride_k, stride_w, page_stride_p, page_stride_k,
        D, PAGE, K_BITS, K_GROUP, K_INTEGER, K_FEEDBACK, K_CHUNK, K_TILE,
        V_BITS, V_GROUP, V_INTEGER, V_FEEDBACK, V_CHUNK, V_TILE, False, False, STEP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_layers", "num_heads"])
def _feed_kernel(
    x_ptr, factor_ptr, pages_ptr, row_ptr, place_ptr, ids_ptr, tau_ptr, num_layers, num_heads,
    stride_l, stride_b, stride_k, stride_w, page_stride_l, page_stride_p, page_stride_k,
    D: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, CODES: tl.constexpr,
    META: tl.constexpr, TRANSPOSED: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One program per (block and layer, KV head, tile of tokens): `_feedback_kernel` on one layer's rows and pages."""
    n, layer, start = _place(row_ptr, place_ptr, num_layers, stride_l, stride_b, stride_w, PAGE)
    ids_ptr += n - tl.program_id(0)
    _feedback_kernel(
        x_ptr + start, factor_ptr + layer * num_heads * D * D, pages_ptr + layer * page_stride_l, ids_ptr, tau_ptr,
        0, stride_k, stride_w, page_stride_p, page_stride_k,
        D, PAGE, BITS, GROUP, CODES, META, TRANSPOSED, TILE, CHUNK,
    )  # fmt: skip


def demote_pages(
    coding: LayerCoding,
    recent_k_LBKWD: Tensor,
    recent_v_LBKWD: Tensor,
    row_N: Tensor,
    place_N: Tensor,
    pages_LPKX: Tensor,
    ids_N: Tensor,
) -> None:
    """Encode ring slots ``[place T, (place + 1) T)`` of batch row `row_N` into page `ids_N`, in every layer.

    Indices are int64 on the device, which alone reads them. One launch, and one more for keys and for values with error
    feedback. Raises ValueError for tensors that do not fit.
    """
    fmt, (num_layers, _, num_heads, ring, head_dim) = coding.fmt, recent_k_LBKWD.shape
    if recent_v_LBKWD.stride() != recent_k_LBKWD.stride() or recent_k_LBKWD.stride(-1) != 1 or ring % fmt.tokens:
        raise ValueError(f"rings {[*recent_k_LBKWD.shape]} must be alike, dense, and of whole pages of {fmt.tokens}")
    if (num_layers, num_heads, fmt.page_bytes) != (pages_LPKX.shape[0], *pages_LPKX.shape[2:]):
        raise ValueError(f"pages {[*pages_LPKX.shape]} do not fit rings {[*recent_k_LBKWD.shape]} in {fmt}")
    if coding.clips_L2.shape[0] != num_layers or head_dim != fmt.head_dim:
        raise ValueError(f"rings {[*recent_k_LBKWD.shape]} do not fit {coding.clips_L2.shape[0]} layers in {fmt}")
    blocks = row_N.shape[0] * num_layers
    if not blocks:
        return
    factors = (coding.key_factors_LKDD, coding.value_factors_LKDD)
    tau_shape = (blocks, num_heads, 2, fmt.tokens) if any(each is not None for each in factors) else (1,)
    tau_NK2T = torch.empty(tau_shape, dtype=torch.float32, device=pages_LPKX.device)
    k_chunk, k_tile = _tile(fmt.key, fmt.tokens)
    v_chunk, v_tile = _tile(fmt.value, fmt.tokens)
    places = (row_N, place_N, ids_N)
    strides = (*recent_k_LBKWD.stride()[:4], *pages_LPKX.stride()[:3])
    _demote_kernel[(blocks, num_heads, fmt.tokens // k_tile + fmt.tokens // v_tile)](
        recent_k_LBKWD, recent_v_LBKWD, pages_LPKX, *places, coding.clips_L2, tau_NK2T, num_layers, *strides,
        D=head_dim, PAGE=fmt.tokens,
        K_BITS=fmt.key.bits, K_GROUP=fmt.key.group_size, K_INTEGER=fmt.key.zero_point == "integer",
        K_FEEDBACK=factors[0] is not None, K_CHUNK=k_chunk, K_TILE=k_tile,
        V_BITS=fmt.value.bits, V_GROUP=fmt.value.group_size, V_INTEGER=fmt.value.zero_point == "integer",
        V_FEEDBACK=factors[1] is not None, V_CHUNK=v_chunk, V_TILE=v_tile, STEP=_DOT_TILE, num_warps=4,
    )  # fmt: skip
    sides = (("key", recent_k_LBKWD), ("value", recent_v_LBKWD))
    for half, ((side, recent_LBKWD), factors_LKDD) in enumerate(zip(sides, factors, strict=True)):
        if factors_LKDD is None:
            continue
        row = fmt.key if side == "key" else fmt.value
        _feed_kernel[(blocks, num_heads, fmt.tokens // _FEEDBACK_TILE)](
            recent_LBKWD, factors_LKDD, pages_LPKX, *places, tau_NK2T[:, :, half], num_layers, num_heads, *strides,
            D=head_dim, PAGE=fmt.tokens, BITS=row.bits, GROUP=row.group_size,
            CODES=fmt.sections[f"{side}_codes"][0], META=fmt.sections[f"{side}_meta"][0],
            TRANSPOSED=side == "value", TILE=_FEEDBACK_TILE, CHUNK=max(16, triton.next_power_of_2(row.row_bytes)),
            num_warps=_FEEDBACK_TILE // 32, enable_fp_fusion=False,
        )  # fmt: skip
