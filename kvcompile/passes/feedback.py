"""Pass `feedback`: factor the metric under which rounding errors of keys and of values are read."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvcompile.codec import feedback_factor
from kvcompile.models import AttentionLayer
from kvcompile.passes.base import Context, PassResult
from kvcompile.passes.ir import IR


@dataclass(frozen=True)
class FeedbackPass:
    """Emits ``layers.{i}.{half}.feedback`` ``[K, D, D]`` where the scheme rounds with error feedback (algorithms.md section 6).

    1. The metric of keys is the second moment of the queries that read them, C_Q; of values ``sum_h W_O,h^T W_O,h`` over the
       query heads of the KV head, which needs no data. Both per KV head, in the basis in which rows are stored.
    2. The metric is brought to a mean diagonal of 1, damped, and factored; the factor is rounded to steps of 1/64.
    """

    name: ClassVar[str] = "feedback"
    version: ClassVar[int] = 1
    stored: ClassVar[bool] = False

    def requires(self, ir: IR) -> str | None:
        """C_Q where keys are rounded with feedback."""
        if ir.inventory is None:
            return "the inventory pass must come first"
        for layer, half, _ in _fed(ir):
            if half == "key" and f"layers.{layer.index}.query" not in ir.statistics:
                return "key.quantizer.rounding is error_feedback, so the calibrate pass must come first"
        return None

    def run(self, ir: IR, context: Context) -> PassResult:
        """Factor layer by layer."""
        tensors = dict(ir.tensors)
        for layer, half, damping in context.track(_fed(ir), "feedback", "factor", lambda _: 1):
            key = half == "key"
            metric_KDD = ir.statistics[f"layers.{layer.index}.query"] if key else output_gram(ir, layer)
            r_KDD = ir.tensors.get(f"layers.{layer.index}.{half}.rotation")
            if r_KDD is not None:
                metric_KDD = r_KDD.double().mT @ metric_KDD @ r_KDD.double()
            tensors[f"layers.{layer.index}.{half}.feedback"] = feedback_factor(metric_KDD, damping).contiguous()
        return PassResult(replace(ir, tensors=tensors), modified=len(tensors) > len(ir.tensors))

    def ensures(self, ir: IR) -> str | None:
        """Strictly upper factors for every half that wants them."""
        for layer, half, _ in _fed(ir):
            factor = ir.tensors.get(f"layers.{layer.index}.{half}.feedback")
            if factor is None or not torch.equal(factor, factor.triu(1)):
                return f"layer {layer.index} has no strictly upper {half} feedback factor"
        return None


def output_gram(ir: IR, layer: AttentionLayer) -> Tensor:
    """float64 ``[K, D, D]``: ``sum_h W_O,h^T W_O,h`` over the query heads h of each KV head."""
    w_OKGD = ir.checkpoint.load(layer.o_weight).double().unflatten(1, (layer.num_key_value_heads, -1, layer.head_dim))
    w_KXD = w_OKGD.permute(1, 0, 2, 3).flatten(1, 2)
    return w_KXD.mT @ w_KXD


def _fed(ir: IR) -> list[tuple[AttentionLayer, str, float]]:
    """Layer, half and damping of everything that is rounded with error feedback."""
    return [
        (layer, half, row.quantizer.damping)
        for layer in ir.layers().compiled
        for half, row in ir.scheme.layer(layer.index).rows()
        if row.quantizer.rounding == "error_feedback"
    ]
