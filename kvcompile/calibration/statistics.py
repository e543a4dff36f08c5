"""Attention statistics from one streaming forward pass.

Shapes: B batch, T tokens, K KV heads, G query heads per KV head, H = K G, D head_dim.

An attention function of ours stands in for the model's and sees q and k after RoPE and QK-norm, v as `v_proj` gives it,
and the attention output S V. So both targets of seed 000 come from activations that any fused attention yields; the
score matrix S is never materialised.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

OBSERVER = "kvcompile_observe"
ROWS_PER_CHUNK = 4096
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


@dataclass
class LayerStatistics:
    """What one layer has shown: second moments by target, and a sample of raw key and value rows."""

    moments: dict[str, Moments]
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class Recorder:
    """Collects the statistics of the layers it was made for; other layers pass through unseen. `seconds` is the time it took.

    `targets` are of query (C_Q), score_value (C_S), key and value. Every `stride`-th token from `skip` on is sampled.
    """

    def __init__(self, layers: dict[int, int], targets: frozenset[str], stride: int, skip: int):
        self.num_kv_of_layer, self.targets, self.stride, self.skip = layers, targets, stride, skip
        self.layers: dict[int, LayerStatistics] = {}
        self.seconds = 0.0

    def observe(self, index: int, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, out_BTHD: Tensor) -> None:
        """Take in one attention call of layer `index`."""
        if index not in self.num_kv_of_layer:
            return
        started = time.perf_counter()
        num_kv = self.num_kv_of_layer[index]
        if index not in self.layers:
            moments = {t: Moments.zeros(num_kv, q_BHTD.shape[-1], q_BHTD.device) for t in sorted(self.targets)}
            self.layers[index] = LayerStatistics(moments)
        layer = self.layers[index]
        rows: dict[str, Callable[[], Tensor]] = {
            "query": lambda: _rows_per_kv_head(q_BHTD, num_kv),
            "score_value": lambda: _rows_per_kv_head(out_BTHD.transpose(1, 2), num_kv),
            "key": lambda: _rows_per_kv_head(k_BKTD, num_kv),
            "value": lambda: _rows_per_kv_head(v_BKTD, num_kv),
        }
        for target, moments in layer.moments.items():
            moments.add(rows[target]())
        skip = self.skip if k_BKTD.shape[2] > 2 * self.skip else 0
        layer.keys.append(_sample(k_BKTD, skip, self.stride))
        layer.values.append(_sample(v_BKTD, skip, self.stride))
        self.seconds += time.perf_counter() - started


_active: Recorder | None = None


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
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: object
) -> tuple[Tensor, None]:
    out_BTHD, weights = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)  # type: ignore[arg-type]
    if _active is not None:
        _active.observe(module.layer_idx, query, key, value, out_BTHD)  # type: ignore[arg-type]
    return out_BTHD, weights


def _rows_per_kv_head(x_BHTD: Tensor, num_kv: int) -> Tensor:
    """``[B, K G, T, D]`` to ``[K, G B T, D]``: all rows that belong to one KV head."""
    return x_BHTD.unflatten(1, (num_kv, -1)).permute(1, 2, 0, 3, 4).flatten(1, 3)


def _sample(x_BKTD: Tensor, skip: int, stride: int) -> Tensor:
    """Every `stride`-th token as rows ``[K, n, D]`` on the CPU; a copy, so that the activation itself can go."""
    return x_BKTD[:, :, skip::stride].transpose(0, 1).flatten(1, 2).cpu().clone()


AttentionInterface.register(OBSERVER, _observe_attention)
AttentionMaskInterface.register(OBSERVER, sdpa_mask)
