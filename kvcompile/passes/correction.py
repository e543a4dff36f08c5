"""Pass `correction`: train the linear correction adapters of every layer (KVLinC, seed 004 section 3.2)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvcompile.artifact import correction_record
from kvcompile.calibration import AttentionSample
from kvcompile.codec.correction import Correction
from kvcompile.models import AttentionLayer
from kvcompile.passes.adapters import AttentionRows, Trained, train
from kvcompile.passes.base import Context, PassResult
from kvcompile.passes.coding import HalfCoding
from kvcompile.passes.ir import IR
from kvcompile.scheme.model import LinearCorrection, Window


@dataclass(frozen=True)
class CorrectionPass:
    """Emits ``layers.{i}.correction.`` `query` ``[H, D, F]``, `key` and `decoded` ``[K, D, F]`` and `scale` ``[H]``, float32.

    1. The loss is the cross-entropy between exact attention rows and the corrected rows of the quantized cache, on the
       attention sample. Each query sees the pages and windows that it would see at run time; in a short sample windows shrink.
    2. One sequence in eight is held out (of a single one, its last queries). Training stops when its loss has not
       fallen for `patience` evaluations, and the best maps are kept.
    3. A head that gains nothing on held-out text gets scale 0, which is no correction.
    4. Form paper is equation 5 with a scale per head; relative also reads decoded keys, and adds a share of attention.
    5. Reported per layer: held-out cross-entropy in nats without and with the correction, and the steps taken.
    """

    name: ClassVar[str] = "correction"
    version: ClassVar[int] = 3
    stored: ClassVar[bool] = True

    seed: int = 0

    def requires(self, ir: IR) -> str | None:
        """What quantized keys depend on, and an attention sample of every compiled layer."""
        if ir.inventory is None:
            return "the inventory pass must come first"
        if not isinstance(ir.scheme.correction, LinearCorrection):
            return None
        for layer in ir.inventory.compiled:
            if f"layers.{layer.index}.sample_q" not in ir.statistics:
                return "adapters are trained on the attention sample, so the calibrate pass must come first"
            if f"layers.{layer.index}.key.clip_ratio" not in ir.tensors:
                return "adapters are trained on quantized keys, so the clip pass must come first"
        return None

    def run(self, ir: IR, context: Context) -> PassResult:
        """Train layer by layer."""
        plan = ir.scheme.correction
        if not isinstance(plan, LinearCorrection):
            return PassResult(ir, modified=False)
        tensors, metrics = dict(ir.tensors), {}
        for layer in context.track(ir.layers().compiled, "correction", "layer", lambda _: 1):
            samples, held_out = split(attention_rows(ir, layer, context.device))
            trained = train(samples, held_out, plan, self.seed + layer.index)
            tensors |= {f"layers.{layer.index}.correction.{n}": x for n, x in _named(trained.correction).items()}
            metrics[layer.index] = _metrics(trained)
        return PassResult(replace(ir, tensors=tensors, metrics=ir.with_metrics(metrics)), modified=True)

    def ensures(self, ir: IR) -> str | None:
        """Maps of the right shapes for every compiled layer, if the scheme has a correction."""
        plan = ir.scheme.correction
        if not isinstance(plan, LinearCorrection):
            return None
        for layer in ir.layers().compiled:
            heads, num_kv = layer.num_heads, layer.num_key_value_heads
            map_shape = (layer.head_dim, plan.features)
            expected = {"query": (heads, *map_shape), "scale": (heads,)}
            record = correction_record(layer.index, ir.scheme.layer(layer.index))
            assert record is not None
            for field, name in record:
                shape = expected.get(field, (num_kv, *map_shape))
                if name is not None and (name not in ir.tensors or tuple(ir.tensors[name].shape) != shape):
                    return f"layer {layer.index} has no tensor {name} of shape {list(shape)}"
        return None


def attention_rows(ir: IR, layer: AttentionLayer, device: torch.device) -> list[AttentionRows]:
    """Every sequence of a layer's sample as the cache sees it: in the basis of stored keys, with what decoding makes of them.

    Raises nothing: `CorrectionPass.requires` has checked that the sample is there.
    """
    sample = AttentionSample.restore(ir.statistics, layer.index)
    assert sample is not None
    coding = HalfCoding.of(ir, layer, "key", float(ir.tensors[f"layers.{layer.index}.key.clip_ratio"]))
    q_SKXD = sample.q_SKXD if coding.inverse is None else sample.q_SKXD @ coding.inverse.mT
    q_SHnD = q_SKXD.unflatten(2, (layer.num_heads // layer.num_key_value_heads, -1)).flatten(1, 2)
    stored_SKTD = coding.store(sample.k_SKTD)
    quantized_nT, visible_nT = masks(ir.scheme.layer(layer.index).window, q_SHnD.shape[2], stored_SKTD.shape[2])
    paged = quantized_nT.any(0)
    decoded_SKTD = stored_SKTD.float()
    if paged.any():
        decoded_SKTD[:, :, paged] = coding.decode(stored_SKTD[:, :, paged])
    return [
        AttentionRows(
            q_HnD.to(device), stored_KTD.float().to(device), decoded_KTD.to(device),
            quantized_nT.to(device), visible_nT.to(device), sample.scaling,
        )
        for q_HnD, stored_KTD, decoded_KTD in zip(q_SHnD, stored_SKTD, decoded_SKTD, strict=True)
    ]  # fmt: skip


def masks(window: Window, queries: int, tokens: int) -> tuple[Tensor, Tensor]:
    """For the last queries of a sequence, bool ``[n, T]``: tokens that are in pages by then, and tokens seen at all.

    A row of t tokens has ``max(0, ceil((t - sink - recent) / block) - 1)`` pages (`runtime.store`). In a short sequence the
    windows shrink to leave some history, as in `history_slice`.
    """
    sink, recent = min(window.sink, tokens // 8), min(window.recent, tokens // 4)
    seen_n, token_T = torch.arange(tokens - queries, tokens) + 1, torch.arange(tokens)
    pages_n = (torch.ceil((seen_n - sink - recent) / window.block).long() - 1).clamp_min(0)
    last_n = sink + pages_n * window.block
    return (token_T >= sink) & (token_T < last_n[:, None]), token_T < seen_n[:, None]


def split(rows: list[AttentionRows]) -> tuple[list[AttentionRows], list[AttentionRows]]:
    """Sequences to train on, and those held out: every eighth, from the middle of the positions they may be spread over."""
    if len(rows) > 1:
        held_out = range(min(4, len(rows) - 1), len(rows), 8)
        return [x for i, x in enumerate(rows) if i not in held_out], [rows[i] for i in held_out]
    positions = torch.arange(rows[0].q_HnD.shape[1], device=rows[0].q_HnD.device)
    cut = max(1, len(positions) * 3 // 4)
    return [rows[0].take(positions[:cut])], [rows[0].take(positions[min(cut, len(positions) - 1) :])]


def _named(correction: Correction) -> dict[str, Tensor]:
    found = {"query": correction.query_HDF, "key": correction.key_KDF, "scale": correction.scale_H}
    if correction.decoded_KDF is not None:
        found["decoded"] = correction.decoded_KDF
    return {name: x.cpu().contiguous() for name, x in found.items()}


def _metrics(trained: Trained) -> dict[str, float]:
    return {
        "correction_loss_before": trained.before,
        "correction_loss_after": trained.after,
        "correction_steps": float(trained.steps),
    }
