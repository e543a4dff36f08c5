"""What kvcompile knows about model architectures."""

from kvcompile.models.attention import EXACT, Softmax, dense_attention
from kvcompile.models.families import FAMILIES
from kvcompile.models.inventory import AttentionLayer, Inventory, take_inventory
from kvcompile.models.loading import check_quantization, decoder_of, load_model, load_tokenizer, resolve_device
from kvcompile.models.output import head_grams, output_weight

__all__ = [
    "EXACT",
    "FAMILIES",
    "AttentionLayer",
    "Inventory",
    "Softmax",
    "check_quantization",
    "decoder_of",
    "dense_attention",
    "head_grams",
    "load_model",
    "load_tokenizer",
    "output_weight",
    "resolve_device",
    "take_inventory",
]
