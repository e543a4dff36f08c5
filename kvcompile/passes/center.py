"""Pass `center`: the mean of keys and of values over the calibration text, to be subtracted from every row."""

from dataclasses import dataclass, replace
from typing import ClassVar

from kvcompile.passes.base import Context, PassResult
from kvcompile.passes.ir import IR


@dataclass(frozen=True)
class CenterPass:
    """Emits ``layers.{i}.{half}.mean`` ``[K, D]`` float32 where the scheme centres that half (algorithms.md section 6).

    1. The mean is of rows after RoPE and QK-norm, per KV head, turned into the basis in which rows are stored.
    2. Keys: every logit of a query changes by the same amount, so no softmax changes. Values: probabilities sum to 1, so the
       mean is added to the attention output again.
    """

    name: ClassVar[str] = "center"
    version: ClassVar[int] = 1
    stored: ClassVar[bool] = False

    def requires(self, ir: IR) -> str | None:
        """Means for every half that is centred."""
        if ir.inventory is None:
            return "the inventory pass must come first"
        for index, half in _centred(ir):
            if f"layers.{index}.{half}_mean" not in ir.statistics:
                return f"{half}.center is on, so the calibrate pass must come first"
        return None

    def run(self, ir: IR, context: Context) -> PassResult:
        """Rotate each mean; the metric is its length relative to the root mean square of rows."""
        tensors = dict(ir.tensors)
        for index, half in _centred(ir):
            mean_KD = ir.statistics[f"layers.{index}.{half}_mean"]
            r_KDD = ir.tensors.get(f"layers.{index}.{half}.rotation")
            if r_KDD is not None:
                mean_KD = (mean_KD[:, None] @ r_KDD.double())[:, 0]
            tensors[f"layers.{index}.{half}.mean"] = mean_KD.float().contiguous()
        return PassResult(replace(ir, tensors=tensors), modified=len(tensors) > len(ir.tensors))

    def ensures(self, ir: IR) -> str | None:
        """A mean for every half that is centred."""
        for index, half in _centred(ir):
            if f"layers.{index}.{half}.mean" not in ir.tensors:
                return f"layer {index} has no {half} mean"
        return None


def _centred(ir: IR) -> list[tuple[int, str]]:
    layers = ir.layers().compiled
    return [(x.index, half) for x in layers for half, row in ir.scheme.layer(x.index).rows() if row.center]
