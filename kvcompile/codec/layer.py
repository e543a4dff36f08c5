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

    def dense_row(self, row: int) -> tuple[Tensor, Tensor]:
        """All keys and values of one batch row in order of position, decoded, float32 ``[K, n, D]`` each."""
        num_tokens, num_pages = int(self.num_tokens_B[row]), int(self.num_pages_B[row])
        num_sink = min(num_tokens, self.sink_k_BKSD.shape[2])
        ids = self.table_BN[row, :num_pages].long()
        k_NKTD, v_NKTD = decode_pages(self.pages_PKX[ids], self.fmt, self.tables)
        first = self.fmt.tokens * num_pages
        slots = torch.arange(first, max(num_tokens - num_sink, first), device=ids.device) % self.recent_k_BKWD.shape[2]
        k = [
            self.sink_k_BKSD[row, :, :num_sink],
            k_NKTD.transpose(0, 1).flatten(1, 2),
            self.recent_k_BKWD[row][:, slots],
        ]
        v = [
            self.sink_v_BKSD[row, :, :num_sink],
            v_NKTD.transpose(0, 1).flatten(1, 2),
            self.recent_v_BKWD[row][:, slots],
        ]
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
