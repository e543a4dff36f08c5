"""What kvcompile knows about model architectures."""

from kvcompile.models.attention import EXACT, Softmax, dense_attention
from kvcompile.models.families import FAMILIES
from kvcompile.models.inventory import AttentionLayer, Inventory, take_inventory
from kvcompile.models.loading import decoder_of, load_model, load_tokenizer, resolve_device

__all__ = [
    "EXACT",
    "FAMILIES",
    "AttentionLayer",
    "Inventory",
    "Softmax",
    "decoder_of",
    "dense_attention",
    "load_model",
    "load_tokenizer",
    "resolve_device",
    "take_inventory",
]
