"""The intermediate representation that passes hand on: an inventory, statistics, tensors to emit, planned edits.

Weights stay references into the checkpoint until emit; a loaded model is never part of the IR. Values are immutable:
a pass returns a new IR made with `dataclasses.replace`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from kvcompile.artifact import CalibrationRecord
from kvcompile.checkpoint import Checkpoint
from kvcompile.models import Inventory
from kvcompile.passes.imported import ImportedRotations
from kvcompile.scheme import Scheme


@dataclass(frozen=True)
class Fold:
    """A planned edit: rotate `tensor` of `layer` by the sidecar rotation; `role` says on which side."""

    tensor: str
    layer: int
    role: Literal["v_weight", "v_bias", "o_weight"]


@dataclass(frozen=True)
class IR:
    """Everything known about a conversion between two passes.

    `statistics` holds ``layers.{i}.{target}`` (float64 ``[K, D, D]``) and the attention sample
    of each layer (`calibration.AttentionSample`);
    `imported` are rotations that the user brought;
    `tensors` holds what goes into the sidecar; `metrics` is per layer; `summary` is about the whole model.
    """

    checkpoint: Checkpoint
    scheme: Scheme
    weights: Literal["fold", "overlay"]
    imported: ImportedRotations | None = None
    inventory: Inventory | None = None
    calibration: CalibrationRecord | None = None
    statistics: Mapping[str, Tensor] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    folds: tuple[Fold, ...] = ()
    metrics: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    summary: Mapping[str, float] = field(default_factory=dict)

    def layers(self) -> Inventory:
        """The inventory, which every pass but the first may rely on."""
        assert self.inventory is not None
        return self.inventory

    def with_metrics(self, added: Mapping[int, Mapping[str, float]]) -> dict[int, dict[str, float]]:
        """The per-layer metrics with `added` merged in."""
        return {i: {**self.metrics.get(i, {}), **added.get(i, {})} for i in sorted({*self.metrics, *added})}
