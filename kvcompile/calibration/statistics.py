"""Attention statistics from one streaming forward pass.

Shapes: B batch, T tokens, K KV heads, G query heads per KV head, H = K G, D head_dim.

An attention function of ours stands in for the model's and sees q and k after RoPE and QK-norm, v as `v_proj` gives it,
and the attention output S V. So both targets of seed 000 come from activations that any fused attention yields; the
score matrix S is never materialised.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from kvcompile.models.attention import Softmax, dense_attention

OBSERVER = "kvcompile_observe"
ROWS_PER_CHUNK = 512
"""Rows converted to float64 at a time: bounds the memory of accumulation."""


@dataclass
class Moments:
    """Uncentred second moment of rows, summed over heads that share a KV head; float64 ``[K, D, D]`` and a row count."""

    sum_KDD: Tensor
    rows: int = 0

    @classmethod
    def zeros(cls, num_key_value_heads: int, head_dim: int, device: torch.device) -> "Moments":
        """Nothing seen yet."""
        return cls(torch.zeros(num_key_value_heads, head_dim, head_dim, dtype=torch.float64, device=device))

    def add(self, x_KND: Tensor) -> None:
        """Accumulate rows ``[K, N, D]``."""
        for chunk in x_KND.split(ROWS_PER_CHUNK, dim=1):
            rows = chunk.double()
            self.sum_KDD.baddbmm_(rows.mT, rows)
        self.rows += x_KND.shape[1]

    def mean(self) -> Tensor:
        """The second moment ``X^T X / n``, symmetrised; float64 ``[K, D, D]`` on the CPU."""
        mean = (self.sum_KDD / max(self.rows, 1)).cpu()
        return (mean + mean.mT) / 2


@dataclass(frozen=True)
class AttentionSample:
    """Whole stretches of attention of one layer, float32: the last queries of S sequences and all keys and values.

    X = G n rows are n queries of the G heads of a KV head. In a sequence that is longer than the sample the middle is
    left out, so that the first and the last tokens are there. `softcap` and `sinks_H` are None where the model has none.
    """

    q_SKXD: Tensor
    k_SKTD: Tensor
    v_SKTD: Tensor
    scaling: float
    softcap: float | None = None
    sinks_H: Tensor | None = None

    @property
    def softmax(self) -> Softmax:
        """How this layer's products become weights."""
        return Softmax(self.scaling, self.softcap, self.sinks_H)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of queries X and tokens T of every sequence."""
        return self.q_SKXD.shape[2], self.k_SKTD.shape[2]

    def weights(self, k_SKTD: Tensor) -> Tensor:
        """Attention weights ``[S, K, X, T]`` of the sample's queries over these keys; each query sees all of them."""
        logits_SKXT = self.softmax.logits(self.q_SKXD @ k_SKTD.mT)
        weights_SKXT = logits_SKXT.softmax(dim=-1)
        if self.sinks_H is None:
            return weights_SKXT
        lse_SHn = logits_SKXT.logsumexp(dim=-1).reshape(len(logits_SKXT), len(self.sinks_H), -1)
        return weights_SKXT * self.softmax.kept(lse_SHn).reshape(*logits_SKXT.shape[:3], 1)

    def tensors(self, layer: int) -> dict[str, Tensor]:
        """The sample under the names that the IR uses."""
        named = {"q": self.q_SKXD, "k": self.k_SKTD, "v": self.v_SKTD, "scaling": torch.tensor(self.scaling)}
        if self.softcap is not None:
            named["softcap"] = torch.tensor(self.softcap)
        if self.sinks_H is not None:
            named["sinks"] = self.sinks_H
        return {f"layers.{layer}.sample_{name}": tensor for name, tensor in named.items()}

    @classmethod
    def restore(cls, statistics: Mapping[str, Tensor], layer: int) -> "AttentionSample | None":
        """The sample of a layer, if calibration kept one."""
        if f"layers.{layer}.sample_q" not in statistics:
            return None
        q, k, v, scaling = (statistics[f"layers.{layer}.sample_{name}"] for name in ("q", "k", "v", "scaling"))
        softcap, sinks = (statistics.get(f"layers.{layer}.sample_{name}") for name in ("softcap", "sinks"))
        softmax = None if softcap is None else float(softcap), None if sinks is None else sinks.float()
        return cls(q.float(), k.float(), v.float(), float(scaling), *softmax)


@dataclass
class LayerStatistics:
    """What one layer has shown: second moments by target, sums of keys and values, parts of an attention sample."""

    moments: dict[str, Moments]
    sums: dict[str, Tensor] = field(default_factory=dict)
    tokens: int = 0
    parts: list[AttentionSample] = field(default_factory=list)

    def add_means(self, k_BKTD: Tensor, v_BKTD: Tensor) -> None:
        """Accumulate the sums of keys and of values, float64 ``[K, D]``."""
        for name, rows in (("key_mean", k_BKTD), ("value_mean", v_BKTD)):
            total = rows.sum(dim=(0, 2), dtype=torch.float64)
            self.sums[name] = self.sums[name] + total if name in self.sums else total
        self.tokens += k_BKTD.shape[0] * k_BKTD.shape[2]

    def tensors(self, layer: int) -> dict[str, Tensor]:
        """Second moments and means under the names that the IR uses."""
        found = {f"layers.{layer}.{target}": moments.mean() for target, moments in self.moments.items()}
        return found | {f"layers.{layer}.{name}": total.cpu() / self.tokens for name, total in self.sums.items()}

    def sample(self) -> AttentionSample:
        """The parts as one sample."""
        q, k, v = (torch.cat(x) for x in zip(*((p.q_SKXD, p.k_SKTD, p.v_SKTD) for p in self.parts), strict=True))
        return replace(self.parts[0], q_SKXD=q, k_SKTD=k, v_SKTD=v)


class Recorder:
    """Collects the statistics of the layers that are wanted; others pass through unseen. `seconds` is its time.

    `targets` are of query (C_Q), score_value (C_S), score_weighted (V^T diag(w) V), key and value. Of the first `sequences`
    sequences an attention sample of `length` tokens is kept, whose first `head` tokens are the sequence's own first, with
    the last `queries` queries.
    """

    def __init__(self, wanted: set[int], targets: frozenset[str], sequences: int, length: int, head: int, queries: int):
        self.wanted, self.targets = wanted, targets
        self.sequences, self.length, self.head, self.queries = sequences, length, head, queries
        self.layers: dict[int, LayerStatistics] = {}
        self.seconds = 0.0

    def observe(
        self,
        index: int,
        q_BHTD: Tensor,
        k_BKTD: Tensor,
        v_BKTD: Tensor,
        out_BTHD: Tensor,
        scaling: float,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> None:
        """Take in one attention call of layer `index`."""
        if index not in self.wanted:
            return
        started = time.perf_counter()
        num_kv = k_BKTD.shape[1]
        if index not in self.layers:
            moments = {t: Moments.zeros(num_kv, q_BHTD.shape[-1], q_BHTD.device) for t in sorted(self.targets)}
            self.layers[index] = LayerStatistics(moments)
        layer = self.layers[index]
        rows: dict[str, Callable[[], Tensor]] = {
            "query": lambda: _rows_per_kv_head(q_BHTD, num_kv),
            "score_value": lambda: _rows_per_kv_head(out_BTHD.transpose(1, 2), num_kv),
            "score_weighted": lambda: _weighted_values(q_BHTD, k_BKTD, v_BKTD),
            "key": lambda: _rows_per_kv_head(k_BKTD, num_kv),
            "value": lambda: _rows_per_kv_head(v_BKTD, num_kv),
        }
        for target, accumulated in layer.moments.items():
            accumulated.add(rows[target]())
        layer.add_means(k_BKTD, v_BKTD)
        wanted = self.sequences - sum(len(part.q_SKXD) for part in layer.parts)
        if wanted > 0:
            sample = self._sample(q_BHTD[:wanted], k_BKTD[:wanted], v_BKTD[:wanted], scaling)
            sinks_H = None if sinks_H is None else sinks_H.detach().cpu().clone()
            if not layer.parts or sample.shape == layer.parts[0].shape:  # a shorter last sequence does not stack
                layer.parts.append(replace(sample, softcap=softcap, sinks_H=sinks_H))
        self.seconds += time.perf_counter() - started

    def take(self, index: int) -> dict[str, Tensor]:
        """Hand over what a layer has shown, under the names that the IR uses; nothing where it was not observed."""
        layer = self.layers.pop(index, None)
        return {} if layer is None else layer.tensors(index) | layer.sample().tensors(index)

    def _sample(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scaling: float) -> AttentionSample:
        """Copies of the first and last tokens, so that the activations themselves can go."""
        queries = min(self.queries, max(q_BHTD.shape[2] // 4, 1))
        q_BKGnD = q_BHTD[:, :, -queries:].unflatten(1, (k_BKTD.shape[1], -1))
        return AttentionSample(q_BKGnD.flatten(2, 3).cpu().clone(), self._ends(k_BKTD), self._ends(v_BKTD), scaling)

    def _ends(self, x_BKTD: Tensor) -> Tensor:
        if x_BKTD.shape[2] <= self.length:
            return x_BKTD.cpu().clone()
        return torch.cat([x_BKTD[:, :, : self.head], x_BKTD[:, :, self.head - self.length :]], dim=2).cpu()


_active: Recorder | None = None
_SPECIAL = {"softcap": "softcap", "sinks_H": "s_aux"}
"""What no plain softmax takes: our names, and those under which models hand it to their attention."""


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Route attention calls of models loaded with ``attn_implementation=OBSERVER`` to `recorder`."""
    global _active
    _active = recorder
    try:
        yield
    finally:
        _active = None


def _observe_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    out_BTHD, weights = dense_attention(module, query, key, value, attention_mask, **kwargs)
    if _active is not None:
        scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
        special = {ours: kwargs[theirs] for ours, theirs in _SPECIAL.items() if kwargs.get(theirs) is not None}
        _active.observe(module.layer_idx, query, key, value, out_BTHD, scaling, **special)  # type: ignore[arg-type]
    return out_BTHD, weights


def _rows_per_kv_head(x_BHTD: Tensor, num_kv: int) -> Tensor:
    """``[B, K G, T, D]`` to ``[K, G B T, D]``: all rows that belong to one KV head."""
    return x_BHTD.unflatten(1, (num_kv, -1)).permute(1, 2, 0, 3, 4).flatten(1, 3)


def _weighted_values(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
    """Values ``[K, B T, D]`` times sqrt(w), ``w_t = k_t (Q^T Q) k_t^T`` with mean 1: the public code's value target."""
    q_KND, k_KND, v_KND = (_rows_per_kv_head(x, k_BKTD.shape[1]).float() for x in (q_BHTD, k_BKTD, v_BKTD))
    w_KN = ((k_KND @ (q_KND.mT @ q_KND)) * k_KND).sum(-1).clamp_min(0)
    return v_KND * (w_KN / w_KN.mean(-1, keepdim=True).clamp_min(1e-30)).sqrt()[..., None]


AttentionInterface.register(OBSERVER, _observe_attention)
AttentionMaskInterface.register(OBSERVER, sdpa_mask)
