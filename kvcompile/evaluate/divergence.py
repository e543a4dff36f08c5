"""How far a model with a packed cache strays from itself without one, decoding teacher-forced, token by token."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache


@dataclass(frozen=True)
class Divergence:
    """KL to the reference (nats per token), share of equal argmax, and both perplexities, on the positions counted."""

    kl: float
    agreement: float
    perplexity: float
    reference_perplexity: float
    positions: int


def reference_logits(model: PreTrainedModel, ids_BT: Tensor) -> Tensor:
    """Logits ``[B, T, V]`` (in the model's dtype) of one ordinary forward pass without a cache."""
    with torch.inference_mode():
        return torch.cat([model(row[None].to(model.device), use_cache=False).logits for row in ids_BT])


def divergence(
    model: PreTrainedModel,
    cache: Cache,
    ids_BT: Tensor,
    reference_BTV: Tensor,
    *,
    prefill: int,
    start: int,
    on_step: Callable[[int], None] = lambda _: None,
) -> Divergence:
    """Feed `ids_BT` through `cache`, the first `prefill` columns at once and then one by one; compare from `start` on.

    `reference_BTV` are the logits to compare with; position t predicts token t + 1. Counted are the positions
    start .. T - 2.
    """
    batch, length = ids_BT.shape
    kl = equal = loss = reference_loss = 0.0
    with torch.inference_mode():
        steps = [(0, prefill), *((t, t + 1) for t in range(prefill, length - 1))]
        for begin, end in steps:
            logits_BTV = model(ids_BT[:, begin:end].to(model.device), past_key_values=cache, use_cache=True).logits
            for t in range(max(begin, start), min(end, length - 1)):
                q = logits_BTV[:, t - begin].float().log_softmax(-1)
                p = reference_BTV[:, t].to(q.device).float().log_softmax(-1)
                target = ids_BT[:, t + 1, None].to(q.device)
                kl += float((p.exp() * (p - q)).sum())
                equal += float((p.argmax(-1) == q.argmax(-1)).sum())
                loss -= float(q.gather(1, target).sum())
                reference_loss -= float(p.gather(1, target).sum())
            on_step(end)
    count = batch * (length - 1 - start)
    perplexities = torch.tensor([loss / count, reference_loss / count]).exp().tolist()
    return Divergence(kl / count, equal / count, perplexities[0], perplexities[1], count)
