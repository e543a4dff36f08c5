"""W_O of a layer, as a loaded model multiplies with it, and as a metric of errors in front of it.

Shapes: O hidden, K KV heads, G query heads per KV head, D head_dim.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcompile.models.inventory import AttentionLayer
from kvcompile.models.loading import decoder_of

_ROWS_AT_ONCE = 512


def head_grams(w_O: Tensor, layer: AttentionLayer) -> Tensor:
    """float64 ``[K, D, D]`` of a weight ``[O, K G D]``: ``sum_h W_O,h^T W_O,h`` over the query heads h of each KV head."""
    w_OKGD = w_O.double().unflatten(1, (layer.num_key_value_heads, -1, layer.head_dim))
    w_KXD = w_OKGD.permute(1, 0, 2, 3).flatten(1, 2)
    return w_KXD.mT @ w_KXD


@torch.inference_mode()
def output_weight(model: PreTrainedModel, layer: AttentionLayer) -> Tensor:
    """W_O ``[O, K G D]`` of a layer, whatever form it is stored in: what its module makes of unit vectors, in float32."""
    decoder: Any = decoder_of(model)
    module = decoder.layers[layer.index].get_submodule(
        layer.o_weight.removeprefix(f"{layer.prefix}.").removesuffix(".weight")
    )
    width = layer.num_heads * layer.head_dim
    zero = module(torch.zeros(1, width, dtype=model.dtype, device=model.device)).float()
    units = torch.eye(width, dtype=model.dtype, device=model.device).split(_ROWS_AT_ONCE)
    return torch.cat([module(part).float() - zero for part in units]).mT.cpu()
