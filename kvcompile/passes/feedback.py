"""Pass `feedback`: factor the metric under which rounding errors of keys and of values are read."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvcompile.calibration import AttentionSample
from kvcompile.codec import feedback_factor
from kvcompile.models import AttentionLayer
from kvcompile.passes.base import Context, PassResult
from kvcompile.passes.coding import HalfCoding
from kvcompile.passes.ir import IR
from kvcompile.passes.output_error import OutputError, output_gram
from kvcompile.scheme.model import Half, Quantizer


@dataclass(frozen=True)
class FeedbackPass:
    """Emits ``layers.{i}.{half}.feedback`` ``[K, D, D]`` where the scheme rounds with error feedback (algorithms.md section 6).

    1. The metric of keys is a second moment of the queries that read them: C_Q, or with `metric` attention each query counts
       by what an error in its logits does to the attention output (`OutputError.key_metric`). The metric of values is
       ``sum_h W_O,h^T W_O,h`` over the query heads of the KV head, which needs no data.
    2. Metrics are per KV head, in the basis in which rows are stored, brought to a mean diagonal of 1, damped, and factored;
       the factor is rounded to steps of 1/64.
    """

    name: ClassVar[str] = "feedback"
    version: ClassVar[int] = 1
    stored: ClassVar[bool] = False

    def requires(self, ir: IR) -> str | None:
        """C_Q and an attention sample where keys are rounded with feedback."""
        if ir.inventory is None:
            return "the inventory pass must come first"
        for layer, half, _ in _fed(ir):
            needed = {f"layers.{layer.index}.query", f"layers.{layer.index}.sample_q"}
            if half == "key" and not needed <= set(ir.statistics):
                return "key.quantizer.rounding is error_feedback, so the calibrate pass must come first"
        return None

    def run(self, ir: IR, context: Context) -> PassResult:
        """Factor layer by layer."""
        tensors = dict(ir.tensors)
        for layer, half, quantizer in context.track(_fed(ir), "feedback", "factor", lambda _: 1):
            metric_KDD = key_metric(ir, layer, quantizer.metric) if half == "key" else output_gram(ir, layer)
            inverse_KDD = HalfCoding.of(ir, layer, half, 1.0).inverse
            if inverse_KDD is not None:  # an error e in a stored row is e R^-1 in a row of the source
                metric_KDD = inverse_KDD.double() @ metric_KDD @ inverse_KDD.double().mT
            tensors[f"layers.{layer.index}.{half}.feedback"] = feedback_factor(
                metric_KDD, quantizer.damping
            ).contiguous()
        return PassResult(replace(ir, tensors=tensors), modified=len(tensors) > len(ir.tensors))

    def ensures(self, ir: IR) -> str | None:
        """Strictly upper factors for every half that wants them."""
        for layer, half, _ in _fed(ir):
            factor = ir.tensors.get(f"layers.{layer.index}.{half}.feedback")
            if factor is None or not torch.equal(factor, factor.triu(1)):
                return f"layer {layer.index} has no strictly upper {half} feedback factor"
        return None


def key_metric(ir: IR, layer: AttentionLayer, kind: str) -> Tensor:
    """float64 ``[K, D, D]``: C_Q, or half of it and half of the metric that counts queries by their attention.

    The latter comes from a sample of queries, which may be few for a large head; C_Q fills the directions it leaves open.
    """
    query_KDD = _unit(ir.statistics[f"layers.{layer.index}.query"])
    if kind == "query":
        return query_KDD
    sample = AttentionSample.restore(ir.statistics, layer.index)
    assert sample is not None
    return query_KDD + _unit(OutputError(ir, layer, sample).key_metric())


def _unit(metric_KDD: Tensor) -> Tensor:
    """The metric with a mean diagonal of 1."""
    mean_K = metric_KDD.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-300)
    return metric_KDD / mean_K[:, None, None]


def _fed(ir: IR) -> list[tuple[AttentionLayer, Half, Quantizer]]:
    """Layer, half and quantizer of everything that is rounded with error feedback."""
    return [
        (layer, half, row.quantizer)
        for layer in ir.layers().compiled
        for half, row in ir.scheme.layer(layer.index).rows()
        if row.quantizer.rounding == "error_feedback"
    ]
