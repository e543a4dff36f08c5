"""How one half of a layer will be stored, as far as an IR has it: what rows become once they have been in the cache."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kvcompile.artifact import row_record
from kvcompile.codec import NO_TABLES, RowFormat, RowTables, dequantize_rows, quantize_rows
from kvcompile.kernels import cpu_encode
from kvcompile.models import AttentionLayer
from kvcompile.passes.ir import IR
from kvcompile.scheme.model import RowCodec, Window


@dataclass(frozen=True)
class HalfCoding:
    """Rotation ``[K, D, D]`` and its inverse, mean ``[K, D]``, format and tables of the keys or values of one layer."""

    fmt: RowFormat
    rotation: Tensor | None = None
    inverse: Tensor | None = None
    mean: Tensor | None = None
    tables: RowTables = NO_TABLES

    @classmethod
    def of(cls, ir: IR, layer: AttentionLayer, half: Literal["key", "value"], clip_ratio: float) -> "HalfCoding":
        """What the passes have solved so far for `half` of `layer`."""
        row = getattr(ir.scheme.layer(layer.index), half)
        fmt = row_record(layer.index, half, row, layer.head_dim, clip_ratio, folded=False).row_format(layer.head_dim)
        rotation, inverse, mean, feedback, centroids = (
            ir.tensors.get(f"layers.{layer.index}.{half}.{name}")
            for name in ("rotation", "inverse", "mean", "feedback", "centroids")
        )
        if rotation is not None and inverse is None:
            inverse = rotation.mT
        centroids = None if centroids is None else centroids.float()
        return cls(fmt, rotation, inverse, mean, RowTables(feedback, centroids))

    @classmethod
    def plain(cls, layer: AttentionLayer, row: RowCodec) -> "HalfCoding":
        """The same bits and groups with nothing done to the rows: what a scheme is to be better than."""
        bare = RowCodec(quantizer=row.quantizer.model_copy(update={"rounding": "nearest"}))
        record = row_record(layer.index, "", bare, layer.head_dim, 1.0, folded=False)
        return cls(record.row_format(layer.head_dim))

    def store(self, rows: Tensor) -> Tensor:
        """Rows ``[..., K, T, D]`` of the source as the cache holds them before they are quantized: bfloat16."""
        stored = rows.float() if self.rotation is None else rows.float() @ self.rotation
        return (stored if self.mean is None else stored - self.mean[:, None]).bfloat16()

    def decode(self, stored: Tensor) -> Tensor:
        """What a decoder reads of stored rows that were quantized, float32 and still in the cache's basis."""
        coded = quantize_rows(stored, self.fmt, self.tables, cpu_encode.feedback_codes)
        return dequantize_rows(coded, self.fmt, self.tables)

    def __call__(self, rows: Tensor) -> Tensor:
        """Rows ``[..., K, T, D]`` through the cache and back into the source's basis, float32."""
        decoded = self.decode(self.store(rows))
        decoded = decoded if self.mean is None else decoded + self.mean[:, None]
        return decoded if self.inverse is None else decoded @ self.inverse


def history_slice(window: Window, tokens: int) -> slice:
    """The tokens of a sample that are quantized, whole blocks of them.

    In a short sample the exact windows shrink to leave it some history.
    """
    start = min(window.sink, tokens // 8)
    blocks = (tokens - min(window.recent, tokens // 4) - start) // window.block
    return slice(start, start + blocks * window.block)
