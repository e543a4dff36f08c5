"""Do two versions of a model say the same? Compared at one layer's projections, and at the logits."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcompile.checkpoint import Checkpoint, dequantized
from kvcompile.errors import VerificationError
from kvcompile.models.inventory import AttentionLayer
from kvcompile.models.precision import Float32Compute

LOGITS_TOLERANCE = 1e-4
"""Largest relative logit error of a folded float32 checkpoint."""
KL_TOLERANCE = 2e-4
"""Largest KL (nats per token) of a folded checkpoint in a 16-bit dtype, whose folded weights are rounded once more."""
PROJECTION_TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Largest relative error of one layer's W_O W_V product, by the dtype the weights are stored in."""


@dataclass(frozen=True)
class LogitAgreement:
    """How close candidate logits are to reference logits: relative L2 error, mean KL in nats, share of equal argmax."""

    relative_error: float
    kl: float
    agreement: float


def compare_logits(reference: Tensor, candidate: Tensor) -> LogitAgreement:
    """Compare logits ``[T, V]`` of any float dtype; KL is of the candidate from the reference, in float64 per chunk."""
    error = norm = kl = equal = 0.0
    for r, c in zip(reference.split(16), candidate.split(16), strict=True):
        r, c = r.double(), c.double()
        error += float((c - r).square().sum())
        norm += float(r.square().sum())
        p, q = r.log_softmax(-1), c.log_softmax(-1)
        kl += float((p.exp() * (p - q)).sum())
        equal += float((p.argmax(-1) == q.argmax(-1)).sum())
    tokens = reference.shape[0]
    return LogitAgreement((error / max(norm, 1e-300)) ** 0.5, kl / tokens, equal / tokens)


def logits_of(model: PreTrainedModel, ids_T: Tensor) -> Tensor:
    """Logits ``[T, V]`` of one plain forward pass without a cache, computed in float32 whatever the weights' dtype."""
    with torch.inference_mode(), Float32Compute():
        return model(ids_T[None].to(model.device), use_cache=False).logits[0]


def projection_error(layer: AttentionLayer, source: dict[str, Tensor], edited: dict[str, Tensor]) -> float:
    """Relative error of what values contribute to the residual stream, probed with random inputs in float64.

    Both dictionaries hold the layer's W_V, b_V (if any) and W_O by tensor name. A right fold leaves every query head's
    ``(x W_V^T + b_V) W_O^T`` as it was.
    """
    generator = torch.Generator().manual_seed(layer.index)
    x = torch.randn(16, source[layer.v_weight].shape[1], dtype=torch.float64, generator=generator)
    before, after = _contribution(layer, source, x), _contribution(layer, edited, x)
    return float((after - before).norm() / before.norm().clamp_min(1e-300))


def check_projections(layer: AttentionLayer, source: dict[str, Tensor], edited: dict[str, Tensor]) -> float:
    """The `projection_error` of a layer; raises VerificationError when it is more than rounding to the edited dtype.

    Rows of q and k, where they are fused with v, must be the source's bit for bit.
    """
    for name in filter(None, (layer.v_weight, layer.v_bias)):
        before, after = (tensor[: layer.v_rows.start] for tensor in (source[name].to(edited[name].dtype), edited[name]))
        if not same_bits(before, after):
            raise VerificationError(f"layer {layer.index}: rows of {name} that make no values differ from the source's")
    error = projection_error(layer, source, edited)
    tolerance = PROJECTION_TOLERANCE.get(edited[layer.v_weight].dtype, PROJECTION_TOLERANCE[torch.float32])
    if not error <= tolerance:
        raise VerificationError(
            f"layer {layer.index}: {layer.v_weight} and {layer.o_weight} do not compute what the source computes "
            f"(relative error {error:.1e}, allowed {tolerance:.0e})"
        )
    return error


def check_logits(agreement: LogitAgreement, dtypes: set[torch.dtype], source: Path) -> None:
    """Raise VerificationError unless folded weights stored in `dtypes` give the logits of the model at `source`."""
    if dtypes & {torch.float16, torch.bfloat16}:
        if not agreement.kl <= KL_TOLERANCE:
            raise VerificationError(
                f"logits differ from {source} by a KL of {agreement.kl:.1e} nats per token, allowed {KL_TOLERANCE:.0e}"
            )
    elif not agreement.relative_error <= LOGITS_TOLERANCE:
        raise VerificationError(
            f"logits differ from {source} by {agreement.relative_error:.1e} (relative), allowed {LOGITS_TOLERANCE:.0e}"
        )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of any shape and dtype are equal byte for byte: NaN equals itself, 0 is not -0."""
    as_bytes = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (a, b))
    return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(*as_bytes)


def projections(checkpoint: Checkpoint, layer: AttentionLayer) -> dict[str, Tensor]:
    """W_V, b_V (if any) and W_O of a layer by tensor name, dequantized; all of a matrix in which q and k are fused with v."""
    return {name: dequantized(checkpoint, name) for name in layer.projections()}


def _contribution(layer: AttentionLayer, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    """``[K, G, 16, hidden]``: random inputs through each query head's value and output projection."""
    v = x @ tensors[layer.v_weight][layer.v_rows].double().T
    if layer.v_bias:
        v = v + tensors[layer.v_bias][layer.v_rows].double()
    v_KND = v.unflatten(1, (layer.num_key_value_heads, layer.head_dim)).transpose(0, 1)
    w_O = tensors[layer.o_weight].double().unflatten(1, (layer.num_key_value_heads, -1, layer.head_dim))
    return v_KND[:, None] @ w_O.permute(1, 2, 3, 0)
