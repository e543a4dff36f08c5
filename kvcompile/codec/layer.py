"""One layer of a packed cache as a kernel sees it, and attention over it in plain torch: the oracle of all backends.

Shapes: B batch rows, K KV heads, G query heads per KV head, H = K G, D head_dim, P pages in the pool,
N page-table columns, S sink slots, W ring slots (a multiple of the page's tokens), X page bytes.

A row of n tokens stores token i at sink slot i while i < S. Every later token has the history index h = i - S; the
first ``fmt.tokens num_pages`` of these live in pages, the rest in the ring at slot h % W. So one row's order is: sink,
pages, ring.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from kvcompile.codec.page import NO_PAGE_TABLES, PageFormat, PageTables, decode_pages


@dataclass(frozen=True)
class LayerCache:
    """Tensors of one layer; keys and values are rotated, windows are bfloat16."""

    fmt: PageFormat
    pages_PKX: Tensor  # uint8
    table_BN: Tensor  # int32, page ids in order of age; columns past num_pages are undefined
    num_pages_B: Tensor  # int32
    num_tokens_B: Tensor  # int32, tokens of the row, padding not counted
    sink_k_BKSD: Tensor
    sink_v_BKSD: Tensor
    recent_k_BKWD: Tensor
    recent_v_BKWD: Tensor
    tables: PageTables = NO_PAGE_TABLES

    def window_slots(self, row: int) -> tuple[Tensor, Tensor]:
        """Sink slots and ring slots of a batch row's tokens, int64, each in order of position."""
        num_tokens, device = int(self.num_tokens_B[row]), self.num_tokens_B.device
        num_sink = min(num_tokens, self.sink_k_BKSD.shape[2])
        first = self.fmt.tokens * int(self.num_pages_B[row])
        history = torch.arange(first, max(num_tokens - num_sink, first), device=device)
        return torch.arange(num_sink, device=device), history % max(self.recent_k_BKWD.shape[2], 1)

    def dense_row(self, row: int) -> tuple[Tensor, Tensor]:
        """All keys and values of one batch row in order of position, decoded, float32 ``[K, n, D]`` each."""
        ids, (sink, ring) = self.table_BN[row, : int(self.num_pages_B[row])].long(), self.window_slots(row)
        k_NKTD, v_NKTD = decode_pages(self.pages_PKX[ids], self.fmt, self.tables)
        k, v = (
            [sink_BKSD[row, :, sink], pages_NKTD.transpose(0, 1).flatten(1, 2), recent_BKWD[row, :, ring]]
            for sink_BKSD, pages_NKTD, recent_BKWD in (
                (self.sink_k_BKSD, k_NKTD, self.recent_k_BKWD),
                (self.sink_v_BKSD, v_NKTD, self.recent_v_BKWD),
            )
        )
        return torch.cat([x.float() for x in k], dim=1), torch.cat([x.float() for x in v], dim=1)


def attend_layer(
    q_BHD: Tensor, layer: LayerCache, scaling: float, softcap: float | None = None, shift_BH: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of one new token per row over everything in the layer, in the rotated value basis.

    `q_BHD` holds rotated queries. With `softcap` logits become ``softcap tanh((logit + shift) / softcap)``; the shift is what
    the mean of centred keys adds to every logit of a query, which a softmax alone would not notice. Returns the output float32
    ``[B, H, D]`` and the log of the softmax denominator ``[B, H]``; a row without tokens gives zeros and minus infinity.
    """
    out_BHD = torch.zeros(q_BHD.shape, dtype=torch.float32, device=q_BHD.device)
    lse_BH = torch.full(q_BHD.shape[:2], -torch.inf, device=q_BHD.device)
    for row in range(q_BHD.shape[0]):
        k_KTD, v_KTD = layer.dense_row(row)
        if k_KTD.shape[1]:
            q_KGD = q_BHD[row].float().unflatten(0, (k_KTD.shape[0], -1))
            logits_KGT = q_KGD @ k_KTD.transpose(1, 2) * scaling
            if softcap is not None:
                if shift_BH is not None:
                    logits_KGT += shift_BH[row].view(*logits_KGT.shape[:2], 1)
                logits_KGT = softcap * (logits_KGT / softcap).tanh()
            out_BHD[row] = (logits_KGT.softmax(dim=-1) @ v_KTD).flatten(0, 1)
            lse_BH[row] = logits_KGT.logsumexp(dim=-1).flatten()
    return out_BHD, lse_BH


def attend_chunk(q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, layer: LayerCache, row: int, scaling: float) -> Tensor:
    """Attention of T new tokens of a row over all that it holds and, causally, over one another; float32 ``[H, T, D]``.

    Queries, keys and values are in the stored basis.
    """
    history_k_KTD, history_v_KTD = layer.dense_row(row)
    k_KTD, v_KTD = torch.cat([history_k_KTD, k_KTD.float()], dim=1), torch.cat([history_v_KTD, v_KTD.float()], dim=1)
    visible = causal_lower_right(q_HTD.shape[1], k_KTD.shape[1])
    out_1HTD = scaled_dot_product_attention(
        q_HTD[None].float(), k_KTD[None], v_KTD[None], visible, scale=scaling, enable_gqa=True
    )
    return out_1HTD[0]
