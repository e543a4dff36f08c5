"""One layer as the models need it: sizes, page format, and the sidecar tensors under their names in the layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from kvcompile.artifact import Artifact
from kvcompile.artifact.manifest import LayerRecord, RowRecord
from kvcompile.codec import PageFormat, PageTables, RowFormat, RowTables
from kvcompile.codec.correction import Correction

Half = Literal["key", "value"]
HALVES: tuple[Half, Half] = ("key", "value")


@dataclass(frozen=True)
class Layer:
    """A compiled layer. `tensors` are those of the sidecar without ``layers.{i}.``, float32, such as ``key.rotation [K, D, D]``,
    and those of `softmax_tensors`.

    A tensor is there if and only if the step that reads it is done. A folded rotation of values is left out: W_V did it.
    """

    num_heads: int
    num_kv_heads: int
    fmt: PageFormat
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, artifact: Artifact, record: LayerRecord, softmax: Mapping[str, Tensor]) -> "Layer":
        """A compiled layer of an artifact; `softmax` is what `softmax_tensors` says of it."""
        names: dict[str, str | None] = {}
        for half, row in (("key", record.key), ("value", record.value)):
            assert row is not None
            names |= {f"{half}.{kind}": getattr(row, kind) for kind in _row_tensors(row)}
        if record.correction is not None:
            names |= {f"correction.{kind}": name for kind, name in record.correction}
        found = {short: artifact.tensor(name) for short, name in names.items()}
        return cls(
            record.num_heads,
            record.num_key_value_heads,
            record.page_format(),
            {short: tensor.float() for short, tensor in found.items() if tensor is not None} | dict(softmax),
        )

    def row(self, half: Half) -> RowFormat:
        """How keys or values are coded."""
        return self.fmt.key if half == "key" else self.fmt.value

    def names(self, *wanted: str) -> list[str]:
        """Those of the wanted tensors that this layer has."""
        return [name for name in wanted if name in self.tensors]

    def tables(self) -> PageTables:
        """What the codec codes rows with."""
        key, value = (
            RowTables(self.tensors.get(f"{half}.feedback"), self.tensors.get(f"{half}.centroids"))
            for half in ("key", "value")
        )
        return PageTables(key, value)

    def correction(self) -> Correction | None:
        """The layer's linear correction, if it has one."""
        if "correction.key" not in self.tensors:
            return None
        query_HDF, key_KDF, scale_H = (self.tensors[f"correction.{kind}"] for kind in ("query", "key", "scale"))
        return Correction(query_HDF, key_KDF, scale_H, self.tensors.get("correction.decoded"))

    def defaults(self) -> dict[str, np.ndarray]:
        """Initializers: the tensors, the clip ratios (float64 scalars), and the usual factor of logits."""
        arrays = {name: tensor.contiguous().numpy() for name, tensor in self.tensors.items()}
        for half, row in (("key", self.fmt.key), ("value", self.fmt.value)):
            arrays[f"{half}.clip_ratio"] = np.array(row.clip_ratio, np.float64)
        arrays["scaling"] = np.array(self.fmt.head_dim**-0.5, np.float32)
        return arrays

    def geometry(self) -> tuple[object, ...]:
        """Layers whose geometry is equal have the same models, up to initializers."""
        rows = tuple(
            (r.bits, r.group_size, r.axis, r.zero_point, r.rounding, r.token_scale, r.norm_scope, r.centroids)
            for r in (self.fmt.key, self.fmt.value)
        )
        shapes = tuple(sorted((name, tuple(tensor.shape)) for name, tensor in self.tensors.items()))
        return self.num_heads, self.num_kv_heads, self.fmt.head_dim, self.fmt.tokens, rows, shapes


def _row_tensors(row: RowRecord) -> list[str]:
    kinds = ["mean", "feedback", "centroids"]
    return kinds if row.apply == "folded" else ["rotation", "inverse", *kinds]
