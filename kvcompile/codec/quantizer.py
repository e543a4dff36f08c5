"""The normative meaning of every code: rows to codes and metadata, and back.

Shapes: K KV heads, T tokens (a page's), D head_dim, N groups, C centroids, any leading dimensions. Arithmetic is float32;
scale, zero point and norm are rounded to BF16 *before* codes are chosen, so that a decoder that reads them sees exactly the
grid the encoder used. In order: divide by the token's norm, subtract a centroid, clip, find the grid, round.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from kvcompile.codec.feedback import MAX_FEEDBACK_DIM, feedback_codes

SMALLEST_SCALE = 1e-30
"""Groups whose range is smaller than this are constant and are stored exactly (to BF16) by their zero point."""
NORM_EPSILON = 1e-8
LLOYD_MAX_LEVELS = {
    1: (-0.7978846, 0.7978846),
    2: (-1.5104176, -0.4527800, 0.4527800, 1.5104176),
    4: (
        -2.7325896, -2.0690172, -1.6180463, -1.2562312, -0.9423404, -0.6567591, -0.3880483, -0.1283950,
        0.1283950, 0.3880483, 0.6567591, 0.9423404, 1.2562312, 1.6180463, 2.0690172, 2.7325896,
    ),
}  # fmt: skip
"""Levels of least squared error for a standard normal variable, by bits (Lloyd 1982, Max 1960)."""

TokenScaleKind = Literal["none", "l2", "rsqrt", "max", "mean_abs"]
FeedbackCoder = Callable[[Tensor, Tensor, Tensor, Tensor, int, int, int], Tensor]
"""`feedback_codes`, or a kernel that gives the same codes."""


@dataclass(frozen=True)
class RowFormat:
    """How one row of `head_dim` channels is scaled, clipped and quantized.

    `clip_ratio` is rho of seed 000 A.5; 1.0 means no clipping. `group_size` counts channels of a token (it divides
    `head_dim`) or, with axis channel, tokens of a channel.
    """

    head_dim: int
    bits: int
    group_size: int
    clip_ratio: float = 1.0
    axis: Literal["token", "channel"] = "token"
    zero_point: Literal["float", "integer", "none"] = "float"
    rounding: Literal["nearest", "error_feedback"] = "nearest"
    token_scale: TokenScaleKind = "none"
    norm_scope: Literal["head", "token"] = "head"
    centroids: int = 0

    def __post_init__(self) -> None:
        if self.axis == "token" and self.head_dim % self.group_size:
            raise ValueError(f"group_size {self.group_size} does not divide head_dim {self.head_dim}")
        if self.head_dim * self.bits % 8:
            raise ValueError(f"head_dim {self.head_dim} at {self.bits} bits is not a whole number of bytes")
        if self.rounding == "error_feedback" and self.head_dim > MAX_FEEDBACK_DIM:
            raise ValueError(f"error feedback is exact up to head_dim {MAX_FEEDBACK_DIM}, this is {self.head_dim}")

    @property
    def num_groups(self) -> int:
        """Groups (and so pairs of scale and zero point) per row; with axis channel every channel is one."""
        return self.head_dim // self.group_size if self.axis == "token" else self.head_dim

    @property
    def row_bytes(self) -> int:
        """Bytes that the codes of a row take."""
        return self.head_dim * self.bits // 8

    @property
    def clip_index(self) -> int:
        """Position of tau in the ascending order of |row|: int(rho * D), at most D - 1."""
        return min(int(self.clip_ratio * self.head_dim), self.head_dim - 1)

    @property
    def group_dim(self) -> int:
        """The dimension of ``[..., T, D]`` along which a group runs."""
        return -1 if self.axis == "token" else -2


@dataclass(frozen=True)
class RowTables:
    """Calibrated tensors that coding rows needs: `feedback` ``[K, D, D]`` and `centroids` ``[K, C, D]``, both float32."""

    feedback: Tensor | None = None
    centroids: Tensor | None = None


NO_TABLES = RowTables()


@dataclass(frozen=True)
class QuantizedRows:
    """Codes uint8 ``[..., T, D]``, scale and zero point bf16, and what else is stored of every token.

    Scale and zero point are ``[..., T, N]``, or ``[..., T / group_size, D]`` with axis channel; `zero` is None for levels
    without one. `norm` is bf16 ``[..., T]``, `centroid` int16 ``[..., T]``.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    norm: Tensor | None = field(default=None)
    centroid: Tensor | None = field(default=None)


def clip_rows(x: Tensor, index: int) -> Tensor:
    """Clamp each row ``[..., D]`` to ``+-tau``, ``tau = sort(|row|)[index]`` (seed 000 A.5; index D - 1 changes nothing)."""
    head_dim = x.shape[-1]
    if index >= head_dim - 1:
        return x
    tau = x.abs().topk(head_dim - index, dim=-1, sorted=True).values[..., -1:]
    return torch.minimum(torch.maximum(x, -tau), tau)


def token_norms(x: Tensor, kind: TokenScaleKind, scope: str) -> Tensor:
    """Norms bf16 ``[..., T]`` of rows ``[..., K, T, D]``: per KV head, or one per token over all heads (seed 002 table 10)."""
    dims = (-3, -1) if scope == "token" else (-1,)
    match kind:
        case "l2":
            norm = x.square().sum(dims, keepdim=True).sqrt()
        case "rsqrt":
            norm = 1 / (x.square().sum(dims, keepdim=True) + NORM_EPSILON).rsqrt()
        case "max":
            norm = x.abs().amax(dims, keepdim=True)
        case "mean_abs":
            norm = x.abs().mean(dims, keepdim=True)
        case _:
            raise ValueError(f"no norm of kind {kind}")
    return norm.clamp_min(NORM_EPSILON).expand(*x.shape[:-1], 1)[..., 0].bfloat16()


def nearest_centroids(x: Tensor, centroids_KCD: Tensor) -> Tensor:
    """Index int16 ``[..., K, T]`` of the centroid with the smallest Euclidean distance (seed 003 equation 5)."""
    scores = x @ centroids_KCD.mT - centroids_KCD.square().sum(-1)[..., None, :] / 2
    return scores.argmax(-1).to(torch.int16)


def quantize_rows(
    x: Tensor, fmt: RowFormat, tables: RowTables = NO_TABLES, feedback: FeedbackCoder = feedback_codes
) -> QuantizedRows:
    """Encode rows ``[..., K, T, D]`` of any float dtype (without tables and norms, K and T may be missing).

    ``s = (hi - lo) / (2^b - 1)``, ``z = -lo / s``, ``code = round(clip(x / s + z, 0, 2^b - 1))`` with ties to even.
    """
    x, norm, centroid = x.float(), None, None
    if fmt.token_scale != "none":
        norm = token_norms(x, fmt.token_scale, fmt.norm_scope)
        x = x / norm.float()[..., None]
    if tables.centroids is not None:
        centroid = nearest_centroids(x, tables.centroids)
        x = x - _gather(tables.centroids, centroid)
    clipped = clip_rows(x, fmt.clip_index)
    if fmt.zero_point == "none":
        codes, scale = _nearest_levels(clipped, fmt)
        return QuantizedRows(codes, scale, None, norm, centroid)
    groups, scale, zero = _grid(clipped, fmt)
    if fmt.rounding == "error_feedback":
        assert tables.feedback is not None, "error feedback needs its factor"
        codes = feedback(clipped, scale, zero, tables.feedback, fmt.bits, fmt.group_size, fmt.group_dim)
    else:
        levels = 2**fmt.bits - 1
        dim = fmt.group_dim
        codes = (groups / scale.unsqueeze(dim) + zero.unsqueeze(dim)).clamp_(0, levels).round_()
        codes = codes.to(torch.uint8).flatten(dim - 1, dim)
    return QuantizedRows(codes, scale.bfloat16(), zero.bfloat16(), norm, centroid)


def dequantize_rows(rows: QuantizedRows, fmt: RowFormat, tables: RowTables = NO_TABLES) -> Tensor:
    """Decode to float32 ``[..., T, D]``: ``(code - z) * s``, plus the centroid, times the norm."""
    codes, scale, dim = rows.codes, rows.scale.float(), fmt.group_dim
    if rows.zero is None:
        levels = torch.tensor(LLOYD_MAX_LEVELS[fmt.bits], device=codes.device)
        x = (levels[codes.long()].unflatten(-1, (fmt.num_groups, -1)) * scale[..., None]).flatten(-2)
    else:
        groups = codes.float().unflatten(dim, (scale.shape[dim], -1))
        x = ((groups - rows.zero.float().unsqueeze(dim)) * scale.unsqueeze(dim)).flatten(dim - 1, dim)
    if rows.centroid is not None:
        assert tables.centroids is not None, "these rows were coded with centroids"
        x = x + _gather(tables.centroids, rows.centroid)
    return x if rows.norm is None else x * rows.norm.float()[..., None]


def _grid(x: Tensor, fmt: RowFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Rows in groups, and each group's scale and zero point as float32 numbers that BF16 holds."""
    levels, dim = 2**fmt.bits - 1, fmt.group_dim
    groups = x.unflatten(dim, (x.shape[dim] // fmt.group_size, fmt.group_size))
    low, high = groups.aminmax(dim=dim)
    scale = ((high - low) / levels).bfloat16().float()
    constant = torch.where(low == 0, torch.ones_like(low), low.abs()).bfloat16().float()
    scale = torch.where(scale < SMALLEST_SCALE, constant, scale)
    offset = low / scale
    if fmt.zero_point == "integer":
        offset = offset.round()
    zero = 0 - offset  # not -offset: the sign of a stored zero is always plus
    return groups, scale, zero.bfloat16().float()


def _nearest_levels(x: Tensor, fmt: RowFormat) -> tuple[Tensor, Tensor]:
    """Codes of the nearest Lloyd-Max level, in units of each group's root mean square."""
    levels = torch.tensor(LLOYD_MAX_LEVELS[fmt.bits], device=x.device)
    groups = x.unflatten(-1, (fmt.num_groups, fmt.group_size))
    scale = groups.square().mean(-1).sqrt().clamp_min(SMALLEST_SCALE).bfloat16()
    bounds = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize((groups / scale.float()[..., None]).contiguous(), bounds).to(torch.uint8)
    return codes.flatten(-2), scale


def _gather(centroids_KCD: Tensor, index: Tensor) -> Tensor:
    """The centroids ``[..., K, T, D]`` that ``[..., K, T]`` names."""
    heads = torch.arange(centroids_KCD.shape[0], device=index.device)[:, None]
    return centroids_KCD[heads, index.long()]
