"""How far a model with a packed cache strays from itself (or from another model) without one, teacher-forced."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvcompile.errors import KvCompileError
from kvcompile.evaluate.teacher_forcing import teacher_forced

COLUMNS = 64
"""Positions whose logits are compared at a time: bounds the memory that large vocabularies take in float32."""


@dataclass(frozen=True)
class Scores:
    """What every counted position shows, float64 ``[N]``, row after row: losses and KL in nats, 1 where argmax is equal."""

    loss_N: Tensor
    reference_loss_N: Tensor
    kl_N: Tensor
    agrees_N: Tensor


@dataclass(frozen=True)
class Divergence:
    """KL to the reference (nats per token: mean and 99th percentile), share of equal argmax, and both perplexities."""

    kl: float
    kl_p99: float
    agreement: float
    perplexity: float
    reference_perplexity: float
    positions: int

    @classmethod
    def of(cls, scores: Sequence[Scores]) -> "Divergence":
        """The summary of some windows, every position counted alike."""
        kl_N, agrees_N, loss_N, reference_N = (
            torch.cat([getattr(s, name) for s in scores]) for name in ("kl_N", "agrees_N", "loss_N", "reference_loss_N")
        )
        return cls(
            float(kl_N.mean()),
            float(kl_N.quantile(0.99)),
            float(agrees_N.mean()),
            float(loss_N.mean().exp()),
            float(reference_N.mean().exp()),
            len(kl_N),
        )


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
    start: int = 0,
    prefill: int | None = None,
    stepwise: bool = False,
    on_step: Callable[[int], None] = lambda _: None,
) -> Divergence:
    """Feed `ids_BT` through `cache` as it would be decoded and compare with `reference_BTV` from position `start` on.

    Position t predicts token t + 1, so the positions start .. T - 2 are counted. The first `prefill` columns go in at once
    and exactly (default, and at most: as many as the smallest window keeps); `stepwise` decodes the others one by one
    instead of in chunks, which gives the same numbers. `on_step` is told how many columns are done. Raises KvCompileError
    when the reference has another shape.
    """
    return Divergence.of([scores(model, cache, ids_BT, reference_BTV, start, prefill, stepwise, on_step)])


def scores(
    model: PreTrainedModel,
    cache: Cache,
    ids_BT: Tensor,
    reference_BTV: Tensor,
    start: int = 0,
    prefill: int | None = None,
    stepwise: bool = False,
    on_step: Callable[[int], None] = lambda _: None,
) -> Scores:
    """`divergence`, position by position."""
    parts = []
    for begin, q_BCV in _pieces(model, cache, ids_BT, start, prefill, stepwise, on_step):
        p_BCV = reference_BTV[:, begin : begin + q_BCV.shape[1]]
        if p_BCV.shape != q_BCV.shape:
            raise KvCompileError(
                f"the reference has logits {list(reference_BTV.shape)}, but the model gives {q_BCV.shape[-1]} per token of "
                f"{list(ids_BT.shape)}: compare models with one tokenizer"
            )
        p_BCV, q_BCV = p_BCV.to(q_BCV.device).float().log_softmax(-1), q_BCV.float().log_softmax(-1)
        targets_BC = ids_BT[:, begin + 1 : begin + 1 + q_BCV.shape[1]].to(q_BCV.device)
        kl_BC = (p_BCV.exp() * (p_BCV - q_BCV)).sum(-1)
        agrees_BC = p_BCV.argmax(-1) == q_BCV.argmax(-1)
        found = [_loss(q_BCV, targets_BC), _loss(p_BCV, targets_BC), kl_BC, agrees_BC]
        parts.append(torch.stack([x.double().cpu() for x in found]))
    return Scores(*torch.cat(parts, dim=2).flatten(1))


def losses(model: PreTrainedModel, cache: Cache, ids_BT: Tensor, start: int = 0) -> Tensor:
    """Loss ``[N]`` (nats, float64) at the positions start .. T - 2; perplexity is ``exp`` of the mean."""
    parts = []
    for begin, q_BCV in _pieces(model, cache, ids_BT, start):
        targets_BC = ids_BT[:, begin + 1 : begin + 1 + q_BCV.shape[1]].to(q_BCV.device)
        parts.append(_loss(q_BCV.float().log_softmax(-1), targets_BC).double().cpu())
    return torch.cat(parts, dim=1).flatten()


def _pieces(
    model: PreTrainedModel,
    cache: Cache,
    ids_BT: Tensor,
    start: int,
    prefill: int | None = None,
    stepwise: bool = False,
    on_step: Callable[[int], None] = lambda _: None,
) -> Iterator[tuple[int, Tensor]]:
    """Position and logits ``[B, C, V]`` of every counted column, at most `COLUMNS` at a time."""
    for begin, logits_BCV in teacher_forced(model, cache, ids_BT[:, :-1], prefill=prefill, stepwise=stepwise):
        end = begin + logits_BCV.shape[1]
        for column in range(max(begin, start), end, COLUMNS):
            yield column, logits_BCV[:, column - begin : min(column + COLUMNS, end) - begin]
        on_step(end)


def _loss(log_probabilities_BCV: Tensor, targets_BC: Tensor) -> Tensor:
    return -log_probabilities_BCV.gather(-1, targets_BC[..., None])[..., 0]
