"""A page: 64 tokens of one KV head, keys and values, as contiguous bytes that a decode kernel reads directly.

Layout, with D head_dim, n = 8 / bits codes per byte, N groups (the bits and groups of keys and values may differ):

    key codes    uint8 [64][D/n]     row t holds token t, in packing order
    value codes  uint8 [D/n][64]     transposed: row j holds byte j of every token
    key meta     int32 [N][64]       bf16 zero point << 16 | bf16 scale, little endian
    value meta   int32 [N][64]

At D = 128, 2 bits and one group this is 4608 bytes: 2.25 bits per element. A token owns whole bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcompile.codec.packing import pack_codes, unpack_codes
from kvcompile.codec.quantizer import RowFormat, dequantize_rows, quantize_rows

PAGE_TOKENS = 64
META_BYTES = 4


@dataclass(frozen=True)
class PageFormat:
    """The byte layout of a page and the row formats behind it."""

    key: RowFormat
    value: RowFormat

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.key.head_dim

    @property
    def value_offset(self) -> int:
        """Byte offset of the value codes."""
        return PAGE_TOKENS * self.key.row_bytes

    @property
    def key_meta_offset(self) -> int:
        """Byte offset of the key metadata."""
        return self.value_offset + PAGE_TOKENS * self.value.row_bytes

    @property
    def value_meta_offset(self) -> int:
        """Byte offset of the value metadata."""
        return self.key_meta_offset + PAGE_TOKENS * META_BYTES * self.key.num_groups

    @property
    def page_bytes(self) -> int:
        """Size of a page."""
        return self.value_meta_offset + PAGE_TOKENS * META_BYTES * self.value.num_groups


def encode_pages(k: Tensor, v: Tensor, fmt: PageFormat) -> Tensor:
    """Rotated rows ``[..., 64, D]`` of keys and of values to pages uint8 ``[..., page_bytes]``."""
    k_codes, k_scale, k_zero = quantize_rows(k, fmt.key)
    v_codes, v_scale, v_zero = quantize_rows(v, fmt.value)
    parts = [
        pack_codes(k_codes, fmt.key.bits).flatten(-2),
        pack_codes(v_codes, fmt.value.bits).transpose(-1, -2).flatten(-2),
        _meta_bytes(k_scale, k_zero),
        _meta_bytes(v_scale, v_zero),
    ]
    return torch.cat(parts, dim=-1)


def decode_pages(pages: Tensor, fmt: PageFormat) -> tuple[Tensor, Tensor]:
    """Pages uint8 ``[..., page_bytes]`` to float32 rotated rows of keys and of values, each ``[..., 64, D]``."""
    ends = [fmt.value_offset, fmt.key_meta_offset, fmt.value_meta_offset]
    k_bytes, v_bytes, k_meta, v_meta = pages.tensor_split(ends, dim=-1)
    k_codes = unpack_codes(k_bytes.unflatten(-1, (PAGE_TOKENS, fmt.key.row_bytes)), fmt.key.bits)
    v_codes = unpack_codes(v_bytes.unflatten(-1, (fmt.value.row_bytes, PAGE_TOKENS)).transpose(-1, -2), fmt.value.bits)
    return (
        dequantize_rows(k_codes, *_meta_tensors(k_meta, fmt.key)),
        dequantize_rows(v_codes, *_meta_tensors(v_meta, fmt.value)),
    )


def _meta_bytes(scale: Tensor, zero: Tensor) -> Tensor:
    """bf16 ``[..., 64, N]`` twice to bytes ``[..., N * 64 * 4]`` with the scale in the low half of each word."""
    pairs = torch.stack([scale.transpose(-1, -2), zero.transpose(-1, -2)], dim=-1).contiguous()
    return pairs.view(torch.uint8).flatten(-3)


def _meta_tensors(meta: Tensor, fmt: RowFormat) -> tuple[Tensor, Tensor]:
    """Bytes ``[..., N * 64 * 4]`` to scale and zero point bf16 ``[..., 64, N]``."""
    pairs = meta.unflatten(-1, (fmt.num_groups, PAGE_TOKENS, META_BYTES)).contiguous().view(torch.bfloat16)
    return pairs[..., 0].transpose(-1, -2), pairs[..., 1].transpose(-1, -2)
