"""Where the error of a quantized cache arises and what becomes of it on its way through attention, layer by layer.

Shapes: S sequences, K KV heads, G query heads per KV head, n queries, X = G n, T tokens, D head_dim, H = K G.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvcompile.calibration import OBSERVER, AttentionSample, Recorder, recording
from kvcompile.checkpoint import dequantized
from kvcompile.codec.quantizer import token_norms
from kvcompile.models import AttentionLayer, decoder_of, load_model, output_weight
from kvcompile.passes.coding import HalfCoding, history_slice
from kvcompile.passes.ir import IR
from kvcompile.scheme.model import TokenScale

STAGES = {"key": "K", "value": "V", "logits": "QKᵀ", "weighted": "SV", "output": "SVW_O"}
"""The stages and how they are written: S are the attention weights."""
QUERIES = 64


@dataclass(frozen=True)
class StageErrors:
    """Relative squared error when the history of keys and values is quantized: of rows, logits, S V, and S V W_O."""

    key: float
    value: float
    logits: float
    weighted: float
    output: float


@dataclass(frozen=True)
class LayerErrors:
    """One layer's errors with the same bits and nothing done to rows (`before`), and under the scheme (`after`)."""

    layer: int
    before: StageErrors
    after: StageErrors


@dataclass(frozen=True)
class TokenNorms:
    """Norms of one layer's stored key rows by token ``[T]``, over their mean, before and after the scheme's scaling."""

    layer: int
    before: tuple[float, ...]
    after: tuple[float, ...]


@dataclass(frozen=True)
class Observation:
    """What layers show on a piece of text: attention samples, and the eigenvalues ``[D]`` of C_Q and C_S.

    Eigenvalues are sorted, divided by their sum, and averaged over KV heads. W_O is kept where the checkpoint has it packed.
    """

    samples: Mapping[int, AttentionSample]
    spectra: Mapping[int, Mapping[str, tuple[float, ...]]]
    output_weights: Mapping[int, Tensor]


def observe(path: Path, layers: Iterable[AttentionLayer], windows_NT: Tensor, device: torch.device) -> Observation:
    """Run the model at `path` over the windows and keep what the pictures of a comparison need."""
    length = windows_NT.shape[1]
    layers = tuple(layers)
    wanted = {layer.index for layer in layers}
    recorder = Recorder(wanted, frozenset({"query", "score_value"}), len(windows_NT), length, 0, QUERIES)
    model = load_model(path, OBSERVER, device, dequantize=True)
    with torch.inference_mode(), recording(recorder):
        for ids_T in windows_NT:
            decoder_of(model)(ids_T[None].to(device), use_cache=False)
    samples, spectra = {}, {}
    for index, seen in sorted(recorder.layers.items()):
        sample = AttentionSample.restore(seen.sample().tensors(index), index)
        assert sample is not None
        samples[index] = sample
        spectra[index] = {target: _spectrum(moments.mean()) for target, moments in seen.moments.items()}
    weights = {layer.index: output_weight(model, layer) for layer in layers if layer.storage == "packed"}
    return Observation(samples, spectra, weights)


def layer_errors(ir: IR, observation: Observation) -> tuple[LayerErrors, ...]:
    """The errors of every compiled layer under the scheme that `ir` has been solved for."""
    found = []
    for layer in ir.layers().compiled:
        w_O = observation.output_weights.get(layer.index)
        w_O = dequantized(ir.checkpoint, layer.o_weight) if w_O is None else w_O
        attention = _Attention(ir, layer, observation.samples[layer.index], w_O)
        scheme = ir.scheme.layer(layer.index)
        before = attention.errors(HalfCoding.plain(layer, scheme.key), HalfCoding.plain(layer, scheme.value))
        after = attention.errors(_solved(ir, layer, "key"), _solved(ir, layer, "value"))
        found.append(LayerErrors(layer.index, before, after))
    return tuple(found)


def token_norm_picture(ir: IR, observation: Observation) -> TokenNorms | None:
    """Norms of the layer whose tokens differ most among those whose keys are scaled by token, or None if none is."""
    found = []
    for layer in ir.layers().compiled:
        if not isinstance(scale := ir.scheme.layer(layer.index).key.token_scale, TokenScale):
            continue
        stored_KTD = _solved(ir, layer, "key").store(observation.samples[layer.index].k_SKTD[0]).float()
        norms_KT = token_norms(stored_KTD, scale.kind, scale.scope).float()
        before_T, after_T = stored_KTD.norm(dim=-1)[0], (stored_KTD / norms_KT[..., None]).norm(dim=-1)[0]
        before_T, after_T = before_T / before_T.mean(), after_T / after_T.mean()
        found.append(
            (float(before_T.std()), TokenNorms(layer.index, tuple(before_T.tolist()), tuple(after_T.tolist())))
        )
    return max(found, key=lambda entry: entry[0])[1] if found else None


class _Attention:
    """The attention of one layer on a sample, in float32, with exact rows and with rows that have been in the cache."""

    def __init__(self, ir: IR, layer: AttentionLayer, sample: AttentionSample, w_O: Tensor):
        self.sample = sample
        self.history = history_slice(ir.scheme.layer(layer.index).window, sample.k_SKTD.shape[2])
        w_OKGD = w_O.float().unflatten(1, (layer.num_key_value_heads, -1, layer.head_dim))
        self.w_KGDO = w_OKGD.permute(1, 2, 3, 0)

    def errors(self, key: HalfCoding, value: HalfCoding) -> StageErrors:
        """Every stage's error with history stored by these codings."""
        k, v = self.sample.k_SKTD, self.sample.v_SKTD
        k_hat, v_hat = self._stored(k, key), self._stored(v, value)
        exact, quantized = self._attend(k, v), self._attend(k_hat, v_hat)
        history = (slice(None), slice(None), self.history)
        return StageErrors(
            _relative(k_hat[history], k[history]),
            _relative(v_hat[history], v[history]),
            *(_relative(ours, theirs) for ours, theirs in zip(quantized, exact, strict=True)),
        )

    def _stored(self, rows_SKTD: Tensor, coding: HalfCoding) -> Tensor:
        stored = rows_SKTD.clone()
        stored[:, :, self.history] = coding(rows_SKTD[:, :, self.history])
        return stored

    def _attend(self, k_SKTD: Tensor, v_SKTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the history, S V, and S V W_O summed over heads."""
        logits_SKXT = self.sample.softmax.logits(self.sample.q_SKXD @ k_SKTD.mT)
        out_SKXD = self.sample.weights(k_SKTD) @ v_SKTD
        out_SKGnD = out_SKXD.unflatten(2, (self.w_KGDO.shape[1], -1))
        return logits_SKXT[..., self.history], out_SKXD, (out_SKGnD @ self.w_KGDO).sum(dim=(1, 2))


def _solved(ir: IR, layer: AttentionLayer, half: str) -> HalfCoding:
    ratio = float(ir.tensors[f"layers.{layer.index}.{half}.clip_ratio"])
    return HalfCoding.of(ir, layer, "key" if half == "key" else "value", ratio)


def _relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).square().sum() / theirs.square().sum().clamp_min(1e-30))


def _spectrum(c_KDD: Tensor) -> tuple[float, ...]:
    values_KD = torch.linalg.eigvalsh(c_KDD).clamp_min(0).flip(-1)
    return tuple((values_KD / values_KD.sum(-1, keepdim=True).clamp_min(1e-300)).mean(0).tolist())
