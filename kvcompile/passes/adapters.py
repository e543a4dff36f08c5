"""Training of linear correction adapters on attention rows of one layer (KVLinC, seed 004 section 3.2).

Shapes: S sequences, K KV heads, G query heads per KV head, H = K G, n queries, T tokens, D head_dim, F features.

The loss of a row is the cross-entropy between exact attention and what the corrected, quantized cache attends to. Both are
over all tokens the query sees; only quantized ones are corrected. Everything is in the basis of the stored rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvcompile.codec.correction import Correction
from kvcompile.scheme.model import LinearCorrection

EVALUATE_EVERY = 20
ROWS_PER_STEP = 64
"""Query positions of one sequence, of all heads, that a step sees."""
SHARES = (0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 1e-4, 1e-5, 1e-6)
"""Ratios of correction to softmax that training may start from."""
QUERY_SPREAD = 1.0
"""Standard deviation of the logits in ``phi_q`` before training."""


@dataclass(frozen=True)
class AttentionRows:
    """Attention of one sequence, float32: ``q_HnD``, stored and decoded keys ``[K, T, D]``, and masks ``[n, T]``.

    `quantized_nT` marks the tokens that are in pages when a query comes, `visible_nT` those it may see.
    """

    q_HnD: Tensor
    k_KTD: Tensor
    decoded_KTD: Tensor
    quantized_nT: Tensor
    visible_nT: Tensor
    scaling: float

    def take(self, rows: Tensor) -> "AttentionRows":
        """Only these queries."""
        return replace(
            self,
            q_HnD=self.q_HnD[:, rows],
            quantized_nT=self.quantized_nT[rows],
            visible_nT=self.visible_nT[rows],
        )

    def attention(self) -> tuple[Tensor, Tensor, Tensor]:
        """Exact and quantized attention rows ``[H, n, T]`` and the log denominator ``[H, n]`` of the latter."""
        q_KXD = self.q_HnD.unflatten(0, (len(self.k_KTD), -1)).flatten(1, 2) * self.scaling
        shape = (*self.q_HnD.shape[:2], self.k_KTD.shape[1])
        exact_HnT = (q_KXD @ self.k_KTD.mT).view(shape)
        quantized_HnT = torch.where(self.quantized_nT, (q_KXD @ self.decoded_KTD.mT).view(shape), exact_HnT)
        exact_HnT, quantized_HnT = (
            logits_HnT.masked_fill(~self.visible_nT, -torch.inf) for logits_HnT in (exact_HnT, quantized_HnT)
        )
        return exact_HnT.softmax(-1), quantized_HnT.softmax(-1), quantized_HnT.logsumexp(-1)

    def correction(self, correction: Correction) -> Tensor:
        """``phi_q(q) phi_k`` of every query and token, float32 ``[H, n, T]``; 0 for tokens that are in no page."""
        phi_KTF = correction.key_features(self.k_KTD - self.decoded_KTD, self.decoded_KTD)
        phi_KXF = correction.query_features(self.q_HnD).unflatten(0, (len(phi_KTF), -1)).flatten(1, 2)
        return (phi_KXF @ phi_KTF.mT).view(*self.q_HnD.shape[:2], -1) * self.quantized_nT

    def losses(self, correction: Correction | None) -> Tensor:
        """Cross-entropy in nats, mean over queries: float32 ``[H]``. None: attention over the quantized cache as it is."""
        target_HnT, weight_HnT, lse_Hn = self.attention()
        total_Hn = torch.ones_like(lse_Hn)
        if correction is not None:
            kept_Hn, added_Hn = correction.weights(lse_Hn, self.visible_nT.sum(-1))
            added_HnT = self.correction(correction) * added_Hn[..., None]
            weight_HnT = weight_HnT * kept_Hn[..., None] + added_HnT
            total_Hn = kept_Hn + added_HnT.sum(-1)
        return (total_Hn.log() - (target_HnT * weight_HnT.clamp_min(1e-30).log()).sum(-1)).mean(-1)


@dataclass(frozen=True)
class Trained:
    """Maps, and the held-out cross-entropy (nats, mean over heads and queries) without and with them."""

    correction: Correction
    before: float
    after: float
    steps: int


def train(
    samples: Sequence[AttentionRows], held_out: Sequence[AttentionRows], plan: LinearCorrection, seed: int
) -> Trained:
    """Fit the maps of one layer with Adam; what is returned are those with the smallest held-out loss.

    The learning rate falls to 0 along a cosine. A head whose held-out loss the best maps do not lower gets scale 0: its
    attention is then exactly the uncorrected one. Same samples, plan and seed, same bits.
    """
    generator = torch.Generator().manual_seed(seed)
    before_H = mean_losses(held_out, None)
    start = starting_maps(samples, plan, generator)
    log_scale_H = best_scale(samples[0], start).log().requires_grad_()
    named = {name: x.clone().requires_grad_() for name, x in vars(start).items() if name != "scale_H" and x is not None}

    def current() -> Correction:
        return Correction(**named, scale_H=log_scale_H.exp())

    optimizer = torch.optim.Adam([*named.values(), log_scale_H], lr=plan.learning_rate)
    best, after_H, stale, step = current(), before_H, 0, 0
    for step in range(plan.steps + 1):
        if step % EVALUATE_EVERY == 0 or step == plan.steps:
            with torch.no_grad():
                losses_H = mean_losses(held_out, current())
            if step == 0 or losses_H.mean() < after_H.mean():
                best, after_H, stale = _frozen(current()), losses_H, 0
            else:
                stale += 1
            if stale >= plan.patience or step == plan.steps:
                break
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * (1 + math.cos(math.pi * step / plan.steps)) / 2
        sample = samples[int(torch.randint(len(samples), (), generator=generator))]
        rows = torch.randperm(sample.q_HnD.shape[1], generator=generator)[:ROWS_PER_STEP]
        loss = sample.take(rows.to(sample.q_HnD.device)).losses(current()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    gains_H = after_H < before_H
    best = replace(best, scale_H=best.scale_H * gains_H)
    return Trained(best, float(before_H.mean()), float(torch.where(gains_H, after_H, before_H).mean()), step)


def mean_losses(samples: Sequence[AttentionRows], correction: Correction | None) -> Tensor:
    """`AttentionRows.losses` over several sequences: float32 ``[H]``."""
    return torch.stack([sample.losses(correction) for sample in samples]).mean(0)


def starting_maps(samples: Sequence[AttentionRows], plan: LinearCorrection, generator: torch.Generator) -> Correction:
    """Maps whose features are prototypes: queries of the sample, drawn at random for every KV head; scale 1.

    Feature j of a key is large where prototype j's logit is, and feature j of a query where it resembles prototype j, so
    that their product begins as the correction ``exp(q (k - k_q))`` of a similar query.
    """
    q_SHnD, num_kv = torch.stack([sample.q_HnD for sample in samples]), len(samples[0].k_KTD)
    q_KND = q_SHnD.unflatten(1, (num_kv, -1)).permute(1, 0, 2, 3, 4).flatten(1, 3)
    prototypes = torch.randint(q_KND.shape[1], (plan.features,), generator=generator).to(q_KND.device)
    key_KDF = (q_KND[:, prototypes] * samples[0].scaling).mT.contiguous()
    query_KDF = (q_KND[:, prototypes] - q_KND.mean(1, keepdim=True)).mT
    spread_K = (samples[0].q_HnD.unflatten(0, (num_kv, -1)).flatten(1, 2) @ query_KDF).std(-1).mean(-1)
    query_KDF = query_KDF * (QUERY_SPREAD / spread_K.clamp_min(1e-6))[:, None, None]
    query_HDF = query_KDF.repeat_interleave(q_SHnD.shape[1] // num_kv, 0)
    ones_H = torch.ones(len(query_HDF), device=q_KND.device)
    return Correction(query_HDF, key_KDF, ones_H, key_KDF.clone() if plan.form == "relative" else None)


def best_scale(sample: AttentionRows, correction: Correction) -> Tensor:
    """For every head the scale, float32 ``[H]``, at which untrained maps cost least, out of a few shares of attention."""
    _, _, lse_Hn = sample.attention()
    kept_Hn, added_Hn = correction.weights(lse_Hn, sample.visible_nT.sum(-1))
    ratio_H = (sample.correction(correction).sum(-1) * added_Hn / kept_Hn).clamp(1e-20, 1e20).log().mean(-1).exp()
    scales_CH = torch.tensor(SHARES, device=ratio_H.device)[:, None] / ratio_H
    losses_CH = torch.stack([sample.losses(replace(correction, scale_H=scale_H)) for scale_H in scales_CH])
    return scales_CH.gather(0, losses_CH.argmin(0)[None])[0]


def _frozen(correction: Correction) -> Correction:
    maps: dict[str, Any] = {name: None if x is None else x.detach().clone() for name, x in vars(correction).items()}
    return Correction(**maps)
