"""Pass `clip`: choose each layer's clip ratio for keys and values by the error that attention reads."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvcompile.codec import RowFormat, dequantize_rows, quantize_rows
from kvcompile.models import AttentionLayer
from kvcompile.passes.base import Context, PassResult
from kvcompile.passes.ir import IR
from kvcompile.scheme import RowCodec, group_size
from kvcompile.scheme.model import QuantileClip

CANDIDATES = (0.84, 0.86, 0.88, 0.90, 0.92, 0.94, 0.96, 0.98, 1.0)


@dataclass(frozen=True)
class ClipPass:
    """Calibrates rho of seed 000 A.5 per layer, separately for keys and values.

    1. A fixed ratio is taken as it is; without clipping the ratio is 1.
    2. `calibrated` minimises ``tr(E M E^T) / tr(X M X^T)`` over sampled calibration rows X, E the quantization error. The
       metric M is what reads the error: C_Q for keys, ``sum_h W_O,h^T W_O,h`` over the query heads h for values.
    3. Reported per layer: this residual without rotation and clip, and with both.
    """

    name: ClassVar[str] = "clip"
    version: ClassVar[int] = 1
    stored: ClassVar[bool] = True

    def requires(self, ir: IR) -> str | None:
        """Sampled rows wherever a ratio is to be calibrated."""
        if ir.inventory is None:
            return "the inventory pass must come first"
        for half, row in ir.scheme.rows():
            if _is_calibrated(row) and not ir.statistics:
                return f"{half}.clip.ratio is to be calibrated, so the calibrate pass must come first"
        return None

    def run(self, ir: IR, context: Context) -> PassResult:
        """Fill ``layers.{i}.{half}.clip_ratio`` (float64 scalar) for every compiled layer."""
        tensors, metrics = dict(ir.tensors), {}
        for layer in context.track(ir.layers().compiled, "clip", "layer", lambda _: 1):
            found: dict[str, float] = {}
            for half, row in ir.scheme.rows():
                ratio = getattr(row.clip, "ratio", 1.0)
                rows = ir.statistics.get(f"layers.{layer.index}.{half}_rows")
                if rows is not None:
                    search = LayerResidual(ir, layer, half, rows)
                    if _is_calibrated(row):
                        ratio = min(CANDIDATES, key=lambda r: search(row, r))
                    found[f"{half}_residual_before"] = search.unrotated(row)
                    found[f"{half}_residual_after"] = search(row, ratio)
                found[f"{half}_clip"] = ratio
                tensors[f"layers.{layer.index}.{half}.clip_ratio"] = torch.tensor(ratio, dtype=torch.float64)
            metrics[layer.index] = found
        return PassResult(replace(ir, tensors=tensors, metrics=ir.with_metrics(metrics)), modified=True)

    def ensures(self, ir: IR) -> str | None:
        """Every compiled layer has both ratios, in (0, 1]."""
        for layer in ir.layers().compiled:
            for half, _ in ir.scheme.rows():
                ratio = ir.tensors.get(f"layers.{layer.index}.{half}.clip_ratio")
                if ratio is None or not 0 < float(ratio) <= 1:
                    return f"layer {layer.index} has no valid {half} clip ratio"
        return None


class LayerResidual:
    """The weighted relative quantization error of one half of one layer, as a function of the clip ratio.

    Takes rows ``[K, n, D]``; the metric is taken along into the rotated basis, ``R^T M R``.
    """

    def __init__(self, ir: IR, layer: AttentionLayer, half: str, rows_KND: Tensor):
        self.head_dim = layer.head_dim
        self.rows_KND = rows_KND.float()
        self.metric_KDD = _metric(ir, layer, half).float()
        r_KDD = ir.tensors.get(f"layers.{layer.index}.{half}.rotation")
        self.rotated_KND, self.rotated_metric_KDD = self.rows_KND, self.metric_KDD
        if r_KDD is not None:
            self.rotated_KND = (self.rows_KND @ r_KDD).bfloat16().float()
            self.rotated_metric_KDD = r_KDD.mT @ self.metric_KDD @ r_KDD

    def __call__(self, row: RowCodec, ratio: float) -> float:
        """Residual with the scheme's rotation at this clip ratio."""
        return self._residual(self.rotated_KND, self.rotated_metric_KDD, row, ratio)

    def unrotated(self, row: RowCodec) -> float:
        """Residual of the raw rows, neither rotated nor clipped."""
        return self._residual(self.rows_KND, self.metric_KDD, row, 1.0)

    def _residual(self, x_KND: Tensor, m_KDD: Tensor, row: RowCodec, ratio: float) -> float:
        fmt = RowFormat(self.head_dim, row.quantizer.bits, group_size(row.quantizer, self.head_dim), ratio)
        error = dequantize_rows(*quantize_rows(x_KND, fmt)) - x_KND
        return float(((error @ m_KDD) * error).sum() / ((x_KND @ m_KDD) * x_KND).sum().clamp_min(1e-30))


def _metric(ir: IR, layer: AttentionLayer, half: str) -> Tensor:
    """``[K, D, D]``: how errors of this half are read, C_Q for keys and the Gram matrix of W_O for values."""
    if half == "key":
        query = ir.statistics.get(f"layers.{layer.index}.query")
        return torch.eye(layer.head_dim).expand(layer.num_key_value_heads, -1, -1) if query is None else query
    w_KOD = ir.checkpoint.load(layer.o_weight).float().unflatten(1, (layer.num_key_value_heads, -1, layer.head_dim))
    w_KOD = w_KOD.permute(1, 0, 2, 3).flatten(1, 2)
    return w_KOD.mT @ w_KOD


def _is_calibrated(row: RowCodec) -> bool:
    return isinstance(row.clip, QuantileClip) and row.clip.ratio == "calibrated"
