"""Pass `clip`: choose each layer's clip ratio for keys and values by the error that reaches the attention output."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch

from kvcompile.calibration import AttentionSample
from kvcompile.models import AttentionLayer
from kvcompile.passes.base import Context, PassResult
from kvcompile.passes.coding import HalfCoding
from kvcompile.passes.ir import IR
from kvcompile.passes.output_error import OutputError
from kvcompile.scheme import RowCodec
from kvcompile.scheme.model import Half, QuantileClip

CANDIDATES = (0.80, 0.82, 0.84, 0.86, 0.88, 0.90, 0.92, 0.94, 0.96, 0.98, 1.0)
START = CANDIDATES.index(0.94)
SLACK = 0.05


@dataclass(frozen=True)
class ClipPass:
    """Calibrates rho of seed 000 A.5 per layer, separately for keys and values.

    1. A fixed ratio is taken as it is; without clipping the ratio is 1.
    2. `calibrated` takes the mildest candidate with nearly the smallest error of the attention output, seen through W_O, on
       calibration sequences in which only history is quantized, as at run time: sink and recent tokens stay exact. An
       error per row (even weighted by C_Q) is no substitute: it prefers ratios that shrink history against the windows.
    3. Reported per layer: that relative error without rotation and clip, and with both.
    """

    name: ClassVar[str] = "clip"
    version: ClassVar[int] = 4
    stored: ClassVar[bool] = True

    def requires(self, ir: IR) -> str | None:
        """Attention samples wherever a ratio is to be calibrated."""
        if ir.inventory is None:
            return "the inventory pass must come first"
        for layer in ir.inventory.compiled:
            for half, row in ir.scheme.layer(layer.index).rows():
                if _is_calibrated(row) and not ir.statistics:
                    return f"{half}.clip.ratio is to be calibrated, so the calibrate pass must come first"
        return None

    def run(self, ir: IR, context: Context) -> PassResult:
        """Fill ``layers.{i}.{half}.clip_ratio`` (float64 scalar) for every compiled layer."""
        tensors, metrics = dict(ir.tensors), {}
        for layer in context.track(ir.layers().compiled, "clip", "layer", lambda _: 1):
            sample = AttentionSample.restore(ir.statistics, layer.index)
            outputs = None if sample is None else OutputError(ir, layer, sample)
            found: dict[str, float] = {}
            for half, row in ir.scheme.layer(layer.index).rows():
                ratio = getattr(row.clip, "ratio", 1.0)
                if outputs is not None:
                    error = partial(_error_at, ir, layer, half, outputs)
                    ratio, smallest = search(error) if _is_calibrated(row) else (ratio, error(ratio))
                    found[f"{half}_residual_before"] = outputs(half, HalfCoding.plain(layer, row))
                    found[f"{half}_residual_after"] = smallest
                found[f"{half}_clip"] = ratio
                tensors[f"layers.{layer.index}.{half}.clip_ratio"] = torch.tensor(ratio, dtype=torch.float64)
            metrics[layer.index] = found
        return PassResult(replace(ir, tensors=tensors, metrics=ir.with_metrics(metrics)), modified=True)

    def ensures(self, ir: IR) -> str | None:
        """Every compiled layer has both ratios, in (0, 1]."""
        for layer in ir.layers().compiled:
            for half in ("key", "value"):
                ratio = ir.tensors.get(f"layers.{layer.index}.{half}.clip_ratio")
                if ratio is None or not 0 < float(ratio) <= 1:
                    return f"layer {layer.index} has no valid {half} clip ratio"
        return None


def search(error: Callable[[float], float]) -> tuple[float, float]:
    """The largest candidate whose error is within `SLACK` of a local minimum's, and its error.

    Downhill from 0.94 over `CANDIDATES`, then up again as long as it costs next to nothing: on a flat stretch the milder
    clip is the safer one, because a sample sees little of what clipping takes away.
    """
    known = {START: error(CANDIDATES[START])}

    def at(place: int) -> float:
        if not 0 <= place < len(CANDIDATES):
            return math.inf
        if place not in known:
            known[place] = error(CANDIDATES[place])
        return known[place]

    best = START
    for step in (-1, 1):
        while at(best + step) < at(best):
            best += step
    limit = at(best) * (1 + SLACK)
    while at(best + 1) <= limit:
        best += 1
    return CANDIDATES[best], at(best)


def _error_at(ir: IR, layer: AttentionLayer, half: Half, outputs: OutputError, ratio: float) -> float:
    return outputs(half, HalfCoding.of(ir, layer, half, ratio))


def _is_calibrated(row: RowCodec) -> bool:
    return isinstance(row.clip, QuantileClip) and row.clip.ratio == "calibrated"
