"""A page: 64 or 128 tokens of one KV head, keys and values, as contiguous bytes that a decode kernel reads directly.

Layout, with T tokens, D head_dim, n = 8 / bits codes per byte, N groups (bits and groups of keys and values may differ):

    key codes    uint8 [T][D/n]     row t holds token t, in packing order
    value codes  uint8 [D/n][T]     transposed: row j holds byte j of every token
    key meta     int32 [N][T]       bf16 zero point << 16 | bf16 scale, little endian
    value meta   int32 [N][T]
    key norms    bf16 [T]           where tokens are scaled
    centroids    int16 [T]          of keys, then of values, where there are any

With axis channel the metadata are [T / group_size][D]: row g holds every channel's, for the g-th group of tokens. Without
zero point they are bf16 scales. At D = 128, T = 64, 2 bits and one group a page takes 4608 bytes: 2.25 bits per element.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvcompile.codec.feedback import feedback_codes
from kvcompile.codec.packing import pack_codes, unpack_codes
from kvcompile.codec.quantizer import (
    NO_TABLES,
    FeedbackCoder,
    QuantizedRows,
    RowFormat,
    RowTables,
    dequantize_rows,
    quantize_rows,
)

PAGE_TOKENS = 64
"""Tokens of a page, unless a format asks for more."""
META_BYTES = 4


@dataclass(frozen=True)
class PageTables:
    """The calibrated tensors behind the rows of keys and of values."""

    key: RowTables = NO_TABLES
    value: RowTables = NO_TABLES


NO_PAGE_TABLES = PageTables()


@dataclass(frozen=True)
class PageFormat:
    """The byte layout of a page and the row formats behind it."""

    key: RowFormat
    value: RowFormat
    tokens: int = PAGE_TOKENS

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.key.head_dim

    @cached_property
    def sections(self) -> dict[str, tuple[int, int]]:
        """Byte offset and size of every part, in order."""
        sizes = {
            "key_codes": self.tokens * self.key.row_bytes,
            "value_codes": self.tokens * self.value.row_bytes,
            "key_meta": self._meta_bytes(self.key),
            "value_meta": self._meta_bytes(self.value),
            "key_norm": 2 * self.tokens * (self.key.token_scale != "none"),
            "key_centroid": 2 * self.tokens * bool(self.key.centroids),
            "value_centroid": 2 * self.tokens * bool(self.value.centroids),
        }
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name] = (end, size)
            end += size
        return offsets

    @property
    def value_offset(self) -> int:
        """Byte offset of the value codes."""
        return self.sections["value_codes"][0]

    @property
    def key_meta_offset(self) -> int:
        """Byte offset of the key metadata."""
        return self.sections["key_meta"][0]

    @property
    def value_meta_offset(self) -> int:
        """Byte offset of the value metadata."""
        return self.sections["value_meta"][0]

    @property
    def page_bytes(self) -> int:
        """Size of a page."""
        return sum(self.sections["value_centroid"])

    @property
    def bits_per_element(self) -> float:
        """Bits that a key or value element takes in a page, metadata counted."""
        return self.page_bytes * 8 / (2 * self.tokens * self.head_dim)

    def _meta_bytes(self, row: RowFormat) -> int:
        width = META_BYTES // 2 if row.zero_point == "none" else META_BYTES
        groups = self.tokens * row.num_groups if row.axis == "token" else self.tokens // row.group_size * row.head_dim
        return width * groups


def encode_pages(
    k: Tensor,
    v: Tensor,
    fmt: PageFormat,
    tables: PageTables = NO_PAGE_TABLES,
    feedback: FeedbackCoder = feedback_codes,
) -> Tensor:
    """Rotated rows ``[..., K, T, D]`` of keys and of values to pages uint8 ``[..., K, page_bytes]``."""
    key = quantize_rows(k, fmt.key, tables.key, feedback)
    value = quantize_rows(v, fmt.value, tables.value, feedback)
    parts = [
        pack_codes(key.codes, fmt.key.bits).flatten(-2),
        pack_codes(value.codes, fmt.value.bits).transpose(-1, -2).flatten(-2),
        _meta_to_bytes(key, fmt.key),
        _meta_to_bytes(value, fmt.value),
        *(x.contiguous().view(torch.uint8) for x in (key.norm, key.centroid, value.centroid) if x is not None),
    ]
    return torch.cat(parts, dim=-1)


def decode_pages(pages: Tensor, fmt: PageFormat, tables: PageTables = NO_PAGE_TABLES) -> tuple[Tensor, Tensor]:
    """Pages uint8 ``[..., K, page_bytes]`` to float32 rotated rows of keys and of values, each ``[..., K, T, D]``."""
    parts = dict(_split(pages, fmt))
    k_codes = unpack_codes(parts["key_codes"].unflatten(-1, (fmt.tokens, fmt.key.row_bytes)), fmt.key.bits)
    v_bytes = parts["value_codes"].unflatten(-1, (fmt.value.row_bytes, fmt.tokens)).transpose(-1, -2)
    v_codes = unpack_codes(v_bytes, fmt.value.bits)
    norm = parts["key_norm"].contiguous().view(torch.bfloat16) if "key_norm" in parts else None
    k_centroid, v_centroid = (
        parts[name].contiguous().view(torch.int16) if name in parts else None
        for name in ("key_centroid", "value_centroid")
    )
    key = QuantizedRows(k_codes, *_bytes_to_meta(parts["key_meta"], fmt.key, fmt.tokens), norm, k_centroid)
    value = QuantizedRows(v_codes, *_bytes_to_meta(parts["value_meta"], fmt.value, fmt.tokens), None, v_centroid)
    return dequantize_rows(key, fmt.key, tables.key), dequantize_rows(value, fmt.value, tables.value)


def _split(pages: Tensor, fmt: PageFormat) -> Iterator[tuple[str, Tensor]]:
    """The parts of a page that are there, by name."""
    for name, (offset, size) in fmt.sections.items():
        if size:
            yield name, pages[..., offset : offset + size]


def _meta_to_bytes(rows: QuantizedRows, fmt: RowFormat) -> Tensor:
    """Metadata to bytes, groups outside and what a kernel reads side by side (tokens or channels) inside."""
    grids = [rows.scale] if rows.zero is None else [rows.scale, rows.zero]
    if fmt.axis == "token":
        grids = [grid.transpose(-1, -2) for grid in grids]
    return torch.stack(grids, dim=-1).contiguous().view(torch.uint8).flatten(-3)


def _bytes_to_meta(meta: Tensor, fmt: RowFormat, tokens: int) -> tuple[Tensor, Tensor | None]:
    """Bytes to scale and zero point bf16, shaped as in `QuantizedRows`."""
    width = META_BYTES // 2 if fmt.zero_point == "none" else META_BYTES
    inside = tokens if fmt.axis == "token" else fmt.head_dim
    grids = meta.unflatten(-1, (-1, inside, width)).contiguous().view(torch.bfloat16)
    if fmt.axis == "token":
        grids = grids.transpose(-2, -3)
    return grids[..., 0], None if fmt.zero_point == "none" else grids[..., 1]
