"""What kvcompile knows about model architectures."""

from kvcompile.models.families import FAMILIES
from kvcompile.models.inventory import AttentionLayer, Inventory, take_inventory

__all__ = ["FAMILIES", "AttentionLayer", "Inventory", "take_inventory"]
