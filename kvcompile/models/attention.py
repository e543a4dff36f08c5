"""Attention over dense keys and values, with what SDPA does not know: soft-capped logits and attention sinks.

Shapes: B batch, T queries, N keys, K KV heads, G query heads per KV head, H = K G, D head_dim.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

EXACT = "kvcompile_exact"
"""Name under which `dense_attention` is registered: ``attn_implementation=EXACT`` runs every family that we support."""
_LOGITS_AT_ONCE = 1 << 24
"""Elements of the score matrix that are there at one time where SDPA cannot be used."""


@dataclass(frozen=True)
class Softmax:
    """How products ``q k^T`` become weights: scaled, soft-capped where `softcap` is set, and with sinks ``[H]``.

    A sink is one more logit in a head's denominator, with nothing behind it: weights then sum to less than 1.
    """

    scaling: float
    softcap: float | None = None
    sinks_H: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether SDPA computes it."""
        return self.softcap is None and self.sinks_H is None

    def logits(self, products: Tensor) -> Tensor:
        """Scaled and capped, any shape."""
        logits = products * self.scaling
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    def kept(self, lse_BHT: Tensor) -> Tensor:
        """The share ``[B, H, T]`` of all weight that sinks leave to keys whose logits have this log-sum-exp."""
        if self.sinks_H is None:
            return torch.ones_like(lse_BHT)
        return (lse_BHT - self.sinks_H.float()[:, None]).sigmoid()


def dense_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention ``[B, T, H, D]`` of queries ``[B, H, T, D]`` over keys and values ``[B, K, N, D]``, and None for its weights.

    `attention_mask` is boolean ``[B, 1, T, N]``; None means causal. SDPA does it where it can; soft-capping and sinks take
    float32 maths, so many queries at a time that memory grows with N alone.
    """
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    softmax = Softmax(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    batch, heads, length, _ = query.shape
    total = key.shape[2]
    causal = attention_mask is None and length > 1 and getattr(module, "is_causal", True)
    positions_N = torch.arange(total, device=query.device)
    k_BKDN, v_BKND = key.float().mT, value.float()
    out_BHTD = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    for rows in torch.arange(length).split(max(1, _LOGITS_AT_ONCE // (batch * heads * total))):
        first, last = int(rows[0]), int(rows[-1]) + 1
        q_BKXD = query[:, :, first:last].float().unflatten(1, (key.shape[1], -1)).flatten(2, 3)
        logits_BHTN = softmax.logits(q_BKXD @ k_BKDN).view(batch, heads, last - first, total)
        if causal:  # a few rows at a time: all of them would be quadratic
            seen_TN = positions_N <= positions_N[total - length + first : total - length + last, None]
            logits_BHTN = logits_BHTN.masked_fill(~seen_TN, torch.finfo(torch.float32).min)
        elif attention_mask is not None:
            logits_BHTN = logits_BHTN.masked_fill(~attention_mask[:, :, first:last], torch.finfo(torch.float32).min)
        weights_BHTN = logits_BHTN.softmax(dim=-1) * softmax.kept(logits_BHTN.logsumexp(dim=-1))[..., None]
        weights_BKXN = weights_BHTN.view(batch, key.shape[1], -1, total)
        out_BHTD[:, :, first:last] = (weights_BKXN @ v_BKND).view(batch, heads, last - first, -1)
    return out_BHTD.transpose(1, 2).to(query.dtype), None


AttentionInterface.register(EXACT, dense_attention)
AttentionMaskInterface.register(EXACT, sdpa_mask)
