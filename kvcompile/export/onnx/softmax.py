"""What a model's softmax has beyond the scaling of logits, read from its config and weights: the sidecar does not hold it."""

import torch
from torch import Tensor

from kvcompile.checkpoint import Checkpoint
from kvcompile.models import take_inventory
from kvcompile.models.loading import resolve_config


def softmax_tensors(checkpoint: Checkpoint) -> dict[int, dict[str, Tensor]]:
    """``softmax.softcap`` ``[]`` and ``softmax.sinks`` ``[H]``, float32, by layer; nothing for a plain softmax."""
    config = resolve_config(checkpoint.path)
    softcap = config.get("text_config", config).get("attn_logit_softcapping")
    found: dict[int, dict[str, Tensor]] = {}
    for layer in take_inventory(checkpoint).compiled:
        found[layer.index], sinks = {}, f"{layer.prefix}.self_attn.sinks"
        if softcap is not None:
            found[layer.index]["softmax.softcap"] = torch.tensor(float(softcap))
        if sinks in checkpoint:
            found[layer.index]["softmax.sinks"] = checkpoint.load(sinks).float()
    return found
