"""What kvcompile knows about model architectures."""

from kvcompile.models.families import FAMILIES
from kvcompile.models.inventory import AttentionLayer, Inventory, take_inventory
from kvcompile.models.loading import load_model, load_tokenizer, resolve_device

__all__ = [
    "FAMILIES",
    "AttentionLayer",
    "Inventory",
    "load_model",
    "load_tokenizer",
    "resolve_device",
    "take_inventory",
]
