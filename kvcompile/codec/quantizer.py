"""The normative meaning of clipping and of every code: rows to codes, scale and zero point, and back.

Shapes: D head_dim, N groups of one head, any leading dimensions. Arithmetic is float32; scale and zero point are
rounded to BF16 *before* codes are chosen, so that a decoder that reads them sees exactly the grid the encoder used.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_SCALE = 1e-30
"""Groups whose range is smaller than this are constant and are stored exactly (to BF16) by their zero point."""


@dataclass(frozen=True)
class RowFormat:
    """How one row of `head_dim` channels is clipped and quantized.

    `clip_ratio` is rho of seed 000 A.5; 1.0 means no clipping. `group_size` divides `head_dim`.
    """

    head_dim: int
    bits: int
    group_size: int
    clip_ratio: float = 1.0

    def __post_init__(self) -> None:
        if self.head_dim % self.group_size:
            raise ValueError(f"group_size {self.group_size} does not divide head_dim {self.head_dim}")
        if self.head_dim * self.bits % 8:
            raise ValueError(f"head_dim {self.head_dim} at {self.bits} bits is not a whole number of bytes")

    @property
    def num_groups(self) -> int:
        """Groups (and so pairs of scale and zero point) per row."""
        return self.head_dim // self.group_size

    @property
    def row_bytes(self) -> int:
        """Bytes that the codes of a row take."""
        return self.head_dim * self.bits // 8

    @property
    def clip_index(self) -> int:
        """Position of tau in the ascending order of |row|: int(rho * D), at most D - 1."""
        return min(int(self.clip_ratio * self.head_dim), self.head_dim - 1)


def clip_rows(x: Tensor, index: int) -> Tensor:
    """Clamp each row ``[..., D]`` to ``+-tau``, ``tau = sort(|row|)[index]`` (seed 000 A.5; index D - 1 changes nothing)."""
    head_dim = x.shape[-1]
    if index >= head_dim - 1:
        return x
    tau = x.abs().topk(head_dim - index, dim=-1, sorted=True).values[..., -1:]
    return torch.minimum(torch.maximum(x, -tau), tau)


def quantize_rows(x: Tensor, fmt: RowFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Encode rows ``[..., D]`` of any float dtype: codes uint8 ``[..., D]``, scale and zero point bf16 ``[..., N]``.

    ``s = (hi - lo) / (2^b - 1)``, ``z = -lo / s``, ``code = clip(round(x / s + z), 0, 2^b - 1)`` with ties to even.
    """
    levels = 2**fmt.bits - 1
    groups = clip_rows(x.float(), fmt.clip_index).unflatten(-1, (fmt.num_groups, fmt.group_size))
    low, high = groups.aminmax(dim=-1)
    scale = ((high - low) / levels).bfloat16().float()
    constant = torch.where(low == 0, torch.ones_like(low), low.abs()).bfloat16().float()
    scale = torch.where(scale < SMALLEST_SCALE, constant, scale)
    zero = (0 - low / scale).bfloat16().float()  # not -low: the sign of a stored zero is always plus
    codes = (groups / scale[..., None] + zero[..., None]).clamp_(0, levels).round_()
    return codes.to(torch.uint8).flatten(-2), scale.bfloat16(), zero.bfloat16()


def dequantize_rows(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Decode ``(code - z) * s`` to float32 ``[..., D]`` from codes ``[..., D]`` and metadata ``[..., N]``."""
    groups = codes.float().unflatten(-1, (scale.shape[-1], -1))
    return ((groups - zero.float()[..., None]) * scale.float()[..., None]).flatten(-2)
