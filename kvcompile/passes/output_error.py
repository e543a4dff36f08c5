"""What quantizing a layer's history does to its attention output, on the attention sample of the calibration text."""

from torch import Tensor

from kvcompile.calibration import AttentionSample
from kvcompile.checkpoint import dequantized
from kvcompile.errors import CheckpointError
from kvcompile.models import AttentionLayer, head_grams
from kvcompile.passes.coding import HalfCoding, history_slice
from kvcompile.passes.ir import IR


class OutputError:
    """Relative squared error of a layer's attention output when the history of one half is quantized.

    Shapes: S sequences, K KV heads, X = G n rows of queries, T tokens, D head_dim. Output differences are weighted with
    the Gram matrix of W_O, averaged over the query heads of a KV head.
    """

    def __init__(self, ir: IR, layer: AttentionLayer, sample: AttentionSample):
        self.sample = sample
        self.history = history_slice(ir.scheme.layer(layer.index).window, sample.k_SKTD.shape[2])
        self.gram_KDD = output_gram(ir, layer).float()
        self.weights_SKXT = self._attend(sample.k_SKTD)
        self.norm = self._weigh(self.weights_SKXT @ sample.v_SKTD)

    def __call__(self, half: str, coding: HalfCoding) -> float:
        """The error when history is stored with this coding."""
        rows = self.sample.k_SKTD if half == "key" else self.sample.v_SKTD
        quantized = rows.clone()
        quantized[:, :, self.history] = coding(rows[:, :, self.history])
        if half == "key":
            change = (self._attend(quantized) - self.weights_SKXT) @ self.sample.v_SKTD
        else:
            change = self.weights_SKXT @ (quantized - rows)
        return self._weigh(change) / self.norm

    def key_metric(self) -> Tensor:
        """float64 ``[K, D, D]``: the metric of key errors that are independent from token to token, to first order.

        An error e in the key of token t moves the output of query q by ``p_t (q . e) (v_t - o)``; so a query counts with
        ``sum_t p_t^2 |v_t - o|^2`` over history, lengths being taken after W_O.
        """
        v_SKTD, out_SKXD = self.sample.v_SKTD[:, :, self.history], self.weights_SKXT @ self.sample.v_SKTD
        seen_v, seen_out = v_SKTD @ self.gram_KDD, out_SKXD @ self.gram_KDD
        distance_SKXT = (seen_v * v_SKTD).sum(-1)[:, :, None] - 2 * out_SKXD @ seen_v.mT
        distance_SKXT += (seen_out * out_SKXD).sum(-1)[..., None]
        weight_SKX = (self.weights_SKXT[..., self.history].square() * distance_SKXT.clamp_min(0)).sum(-1)
        q_SKXD = self.sample.q_SKXD.double()
        return ((q_SKXD * weight_SKX.double()[..., None]).mT @ q_SKXD).sum(0)

    def _attend(self, k_SKTD: Tensor) -> Tensor:
        return self.sample.weights(k_SKTD)

    def _weigh(self, change_SKXD: Tensor) -> float:
        return float(((change_SKXD @ self.gram_KDD) * change_SKXD).sum().clamp_min(1e-30))


def output_gram(ir: IR, layer: AttentionLayer) -> Tensor:
    """float64 ``[K, D, D]``: `head_grams` of a layer's W_O, from the checkpoint, or where that is packed from calibration.

    Raises CheckpointError for a W_O that holds NaN or infinity.
    """
    if (found := ir.statistics.get(f"layers.{layer.index}.output_gram")) is not None:
        return found
    weight = dequantized(ir.checkpoint, layer.o_weight)
    if not weight.isfinite().all():
        raise CheckpointError(
            f"tensor {layer.o_weight} (layer {layer.index}) in {ir.checkpoint.path} holds NaN or infinity; "
            "repair the checkpoint"
        )
    return head_grams(weight, layer)
