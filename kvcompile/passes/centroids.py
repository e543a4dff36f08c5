"""Pass `centroids`: codebooks of keys and of values, of which rows are stored as residuals (seed 003 appendix A.2)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvcompile.calibration import AttentionSample
from kvcompile.codec.quantizer import nearest_centroids
from kvcompile.errors import CalibrationError
from kvcompile.passes.base import Context, PassResult
from kvcompile.passes.coding import HalfCoding
from kvcompile.passes.ir import IR
from kvcompile.scheme.model import Half

ITERATIONS = 15


@dataclass(frozen=True)
class CentroidsPass:
    """Emits ``layers.{i}.{half}.centroids`` ``[K, C, D]`` bfloat16 by k-means on the rows of the calibration sample.

    1. One codebook per KV head, in the basis in which rows are stored; with a single centroid it is the mean.
    2. Lloyd's iteration from rows drawn by a fixed seed; a centroid that no row is nearest to stays where it was.
    """

    name: ClassVar[str] = "centroids"
    version: ClassVar[int] = 1
    stored: ClassVar[bool] = True

    def requires(self, ir: IR) -> str | None:
        """A sample of rows."""
        if ir.inventory is None:
            return "the inventory pass must come first"
        for index, half, _ in _coded(ir):
            if f"layers.{index}.sample_k" not in ir.statistics:
                return f"{half}.centroids is set, so the calibrate pass must come first"
        return None

    def run(self, ir: IR, context: Context) -> PassResult:
        """Cluster layer by layer."""
        tensors, layers = dict(ir.tensors), {layer.index: layer for layer in ir.layers().compiled}
        for index, half, count in context.track(_coded(ir), "centroids", "codebook", lambda _: 1):
            sample = AttentionSample.restore(ir.statistics, index)
            assert sample is not None
            rows_SKTD = sample.k_SKTD if half == "key" else sample.v_SKTD
            stored_KND = HalfCoding.of(ir, layers[index], half, 1.0).store(rows_SKTD).transpose(0, 1).flatten(1, 2)
            if stored_KND.shape[1] < count:
                raise CalibrationError(
                    f"{half}.centroids: {count} centroids need at least as many rows, but the calibration sample has "
                    f"{stored_KND.shape[1]}; raise calibration.sample_sequences and sample_length"
                )
            tensors[f"layers.{index}.{half}.centroids"] = cluster(stored_KND.float(), count).bfloat16()
        return PassResult(replace(ir, tensors=tensors), modified=len(tensors) > len(ir.tensors))

    def ensures(self, ir: IR) -> str | None:
        """A codebook of the right size wherever the scheme wants one."""
        for index, half, count in _coded(ir):
            found = ir.tensors.get(f"layers.{index}.{half}.centroids")
            if found is None or found.shape[1] != count:
                return f"layer {index} has no codebook of {count} {half} centroids"
        return None


def cluster(rows_KND: Tensor, count: int) -> Tensor:
    """`count` centroids ``[K, C, D]`` of float32 rows, per head."""
    start = torch.randperm(rows_KND.shape[1], generator=torch.Generator().manual_seed(0))[:count]
    centroids_KCD = rows_KND[:, start].clone()
    for _ in range(ITERATIONS):
        nearest_KN = nearest_centroids(rows_KND, centroids_KCD).long()
        index_KND = nearest_KN[..., None].expand_as(rows_KND)
        total_KCD = torch.zeros_like(centroids_KCD).scatter_add_(1, index_KND, rows_KND)
        ones_KN = torch.ones_like(nearest_KN, dtype=rows_KND.dtype)
        size_KC = rows_KND.new_zeros(centroids_KCD.shape[:2]).scatter_add_(1, nearest_KN, ones_KN)
        centroids_KCD = torch.where(size_KC[..., None] > 0, total_KCD / size_KC[..., None].clamp_min(1), centroids_KCD)
    return centroids_KCD


def _coded(ir: IR) -> list[tuple[int, Half, int]]:
    """Layer, half and number of centroids of everything that is stored as residuals."""
    return [
        (layer.index, half, row.centroids)
        for layer in ir.layers().compiled
        for half, row in ir.scheme.layer(layer.index).rows()
        if row.centroids
    ]
