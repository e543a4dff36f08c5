"""Rows into the stored basis: rotate, centre, round to bfloat16, in Triton.

Shapes: B batch rows, K KV heads, T tokens, D head_dim; in a kernel R is a tile of rows and C a block of output channels.

A bfloat16 row times a float32 matrix goes through tensor cores twice, by the matrix's upper and lower bfloat16 halves (16 bits
together), and differs from the product in float32 by 2^-17 of its terms. A stored element can therefore fall to the other side
of a tie, seldom and by one bfloat16 step. Rows of other dtypes are multiplied in float32.
"""
# mypy: allow-untyped-defs, disable-error-code="assignment, misc"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvcompile.kernels.triton_encode import as_float, to_bf16
from kvcompile.kernels.triton_operands import INTERPRETED

FLOAT_STEP = 16
"""Channels of a step where products are in float32."""
_ROWS = 64


@dataclass(frozen=True)
class RowMap:
    """A rotation float32 ``[K, D, D]``, the same as two bfloat16 matrices whose sum it nearly is, and a mean ``[K, D]``."""

    r_KDD: Tensor | None = None
    halves_2KDD: Tensor | None = None
    mean_KD: Tensor | None = None

    @classmethod
    def of(cls, r_KDD: Tensor | None, mean_KD: Tensor | None = None) -> "RowMap":
        """Split a float32 rotation."""
        mean_KD = None if mean_KD is None else mean_KD.float().contiguous()
        if r_KDD is None:
            return cls(mean_KD=mean_KD)
        high_KDD = r_KDD.bfloat16()
        halves_2KDD = torch.stack([high_KDD, (r_KDD - high_KDD.float()).bfloat16()])
        return cls(r_KDD.float().contiguous(), halves_2KDD, mean_KD)


@triton.jit
def mapped(
    x_R_ptr, live_R, r_ptr, half_stride, mean_ptr, head, column_C, D: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    STEP: tl.constexpr, ROTATE: tl.constexpr, CENTER: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Channels `column_C` of the rows at `x_R_ptr` after the KV head's rotation and minus its mean, float32 ``[R, C]``.

    With HALVES rows are bfloat16, and the matrix's lower half follows its upper half after `half_stride` elements.
    """
    live_C = column_C < D
    if ROTATE:
        y_RC = tl.zeros([ROWS, CHANNELS], tl.float32)
        r_ptr += head * D * D
        for first in range(0, D, STEP):
            d = first + tl.arange(0, STEP)
            x_RD = tl.load(x_R_ptr[:, None] + d[None, :], mask=live_R[:, None] & (d < D)[None, :], other=0.0)
            r_DC_ptr = r_ptr + d[:, None] * D + column_C[None, :]
            live_DC = (d < D)[:, None] & live_C[None, :]
            r_DC = tl.load(r_DC_ptr, mask=live_DC, other=0.0)
            if HALVES:
                rest_DC = tl.load(r_DC_ptr + half_stride, mask=live_DC, other=0.0)
                if INTERPRETED:  # numpy knows no bfloat16
                    x_RD, r_DC, rest_DC = as_float(x_RD), as_float(r_DC), as_float(rest_DC)
                y_RC = tl.dot(x_RD, rest_DC, y_RC)
                y_RC = tl.dot(x_RD, r_DC, y_RC)
            else:
                y_RC = tl.dot(as_float(x_RD), r_DC, y_RC, input_precision="ieee")
    else:
        x_RC_ptr = x_R_ptr[:, None] + column_C[None, :]
        y_RC = as_float(tl.load(x_RC_ptr, mask=live_R[:, None] & live_C[None, :], other=0.0))
    if CENTER:
        y_RC -= tl.load(mean_ptr + head * D + column_C, mask=live_C, other=0.0)[None, :]
    return y_RC


@triton.jit(do_not_specialize=["num_tokens"])
def _map_kernel(
    x_ptr, r_ptr, mean_ptr, out_ptr, num_tokens, half_stride, x_stride_b, x_stride_k, x_stride_t, out_stride_b, out_stride_k,
    D: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, STEP: tl.constexpr, ROTATE: tl.constexpr,
    CENTER: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """One program per (tile of tokens, KV head, batch row), all channels."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    token_R = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live_R = token_R < num_tokens
    column_C = tl.arange(0, CHANNELS)
    x_R_ptr = x_ptr + row * x_stride_b + head * x_stride_k + token_R * x_stride_t
    y_RC = mapped(
        x_R_ptr, live_R, r_ptr, half_stride, mean_ptr, head, column_C, D, ROWS, CHANNELS, STEP, ROTATE, CENTER, HALVES
    )
    out_R_ptr = out_ptr + row * out_stride_b + head * out_stride_k + token_R * D
    tl.store(out_R_ptr[:, None] + column_C[None, :], to_bf16(y_RC), mask=live_R[:, None] & (column_C < D)[None, :])


def map_rows(x_BKTD: Tensor, row_map: RowMap) -> Tensor:
    """Rows of every KV head rotated, minus the mean, as bfloat16 ``[B, K, T, D]``; bfloat16 rows as they are without either.

    Raises ValueError for rows that the map does not fit, or whose last dimension is not contiguous.
    """
    batch, num_heads, num_tokens, head_dim = x_BKTD.shape
    for matrix in (row_map.r_KDD, row_map.mean_KD):
        if matrix is not None and matrix.shape[:2] != (num_heads, head_dim):
            raise ValueError(f"a map {[*matrix.shape]} does not fit rows {[*x_BKTD.shape]}")
    if x_BKTD.stride(-1) != 1:
        raise ValueError(f"the last dimension must be contiguous, strides are {x_BKTD.stride()}")
    if row_map.r_KDD is None and row_map.mean_KD is None:
        return x_BKTD.bfloat16()
    out_BKTD = torch.empty(x_BKTD.shape, dtype=torch.bfloat16, device=x_BKTD.device)
    if not out_BKTD.numel():
        return out_BKTD
    halves = x_BKTD.dtype == torch.bfloat16
    rotation = row_map.halves_2KDD if halves else row_map.r_KDD
    width = max(16, triton.next_power_of_2(head_dim))
    rows = min(_ROWS, max(16, triton.next_power_of_2(num_tokens)))
    _map_kernel[(triton.cdiv(num_tokens, rows), num_heads, batch)](
        x_BKTD, out_BKTD if rotation is None else rotation, out_BKTD if row_map.mean_KD is None else row_map.mean_KD,
        out_BKTD, num_tokens, num_heads * head_dim * head_dim, *x_BKTD.stride()[:3], *out_BKTD.stride()[:2],
        D=head_dim, ROWS=rows, CHANNELS=width, STEP=min(width, 64) if halves else FLOAT_STEP,
        ROTATE=rotation is not None, CENTER=row_map.mean_KD is not None, HALVES=halves, num_warps=4,
    )  # fmt: skip
    return out_BKTD
