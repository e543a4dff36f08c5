"""Pass `clip`: choose each layer's clip ratio for keys and values by the error that reaches the attention output."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from kvcompile.calibration import AttentionSample
from kvcompile.codec import RowFormat, dequantize_rows, quantize_rows
from kvcompile.models import AttentionLayer
from kvcompile.passes.base import Context, PassResult
from kvcompile.passes.ir import IR
from kvcompile.scheme import RowCodec, Window, group_size
from kvcompile.scheme.model import QuantileClip

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
    version: ClassVar[int] = 3
    stored: ClassVar[bool] = True

    def requires(self, ir: IR) -> str | None:
        """Attention samples wherever a ratio is to be calibrated."""
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
            sample = AttentionSample.restore(ir.statistics, layer.index)
            outputs = None if sample is None else OutputError(ir, layer, sample)
            found: dict[str, float] = {}
            for half, row in ir.scheme.rows():
                ratio = getattr(row.clip, "ratio", 1.0)
                if outputs is not None:
                    r_KDD = ir.tensors.get(f"layers.{layer.index}.{half}.rotation")
                    error = partial(outputs, half, row, r_KDD)
                    ratio, smallest = search(error) if _is_calibrated(row) else (ratio, error(ratio))
                    found[f"{half}_residual_before"] = outputs(half, row, None, 1.0)
                    found[f"{half}_residual_after"] = smallest
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


class OutputError:
    """Relative squared error of a layer's attention output when the history of one half is quantized.

    Shapes: S sequences, K KV heads, X = G n rows of queries, T tokens, D head_dim. Output differences are weighted with
    the Gram matrix of W_O, averaged over the query heads of a KV head.
    """

    def __init__(self, ir: IR, layer: AttentionLayer, sample: AttentionSample):
        self.sample, self.head_dim = sample, layer.head_dim
        self.history = history_slice(ir.scheme.window, sample.k_SKTD.shape[2])
        self.gram_KDD = _output_gram(ir, layer)
        self.weights_SKXT = self._attend(sample.k_SKTD)
        self.norm = self._weigh(self.weights_SKXT @ sample.v_SKTD)

    def __call__(self, half: str, row: RowCodec, r_KDD: Tensor | None, ratio: float) -> float:
        """The error with this rotation (None is the identity) and clip ratio."""
        fmt = RowFormat(self.head_dim, row.quantizer.bits, group_size(row.quantizer, self.head_dim), ratio)
        rows = self.sample.k_SKTD if half == "key" else self.sample.v_SKTD
        exact = rows[:, :, self.history]
        rotated = (exact if r_KDD is None else exact @ r_KDD).bfloat16()
        decoded = dequantize_rows(*quantize_rows(rotated, fmt))
        quantized = rows.clone()
        quantized[:, :, self.history] = decoded if r_KDD is None else decoded @ r_KDD.mT
        if half == "key":
            change = (self._attend(quantized) - self.weights_SKXT) @ self.sample.v_SKTD
        else:
            change = self.weights_SKXT @ (quantized - rows)
        return self._weigh(change) / self.norm

    def _attend(self, k_SKTD: Tensor) -> Tensor:
        return (self.sample.q_SKXD @ k_SKTD.mT * self.sample.scaling).softmax(dim=-1)

    def _weigh(self, change_SKXD: Tensor) -> float:
        return float(((change_SKXD @ self.gram_KDD) * change_SKXD).sum().clamp_min(1e-30))


def history_slice(window: Window, tokens: int) -> slice:
    """The tokens of a sample that are quantized; in a short sample the exact windows shrink to leave it some history."""
    return slice(min(window.sink, tokens // 8), tokens - min(window.recent, tokens // 4))


def _output_gram(ir: IR, layer: AttentionLayer) -> Tensor:
    """``[K, D, D]``: ``sum_h W_O,h^T W_O,h`` over the query heads h of each KV head."""
    w_OKGD = ir.checkpoint.load(layer.o_weight).float().unflatten(1, (layer.num_key_value_heads, -1, layer.head_dim))
    w_KXD = w_OKGD.permute(1, 0, 2, 3).flatten(1, 2)
    return w_KXD.mT @ w_KXD


def _is_calibrated(row: RowCodec) -> bool:
    return isinstance(row.clip, QuantileClip) and row.clip.ratio == "calibrated"
