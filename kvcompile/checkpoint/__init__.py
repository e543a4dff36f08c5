"""Checkpoints on disk: lazy reading, and writing by patching a copy."""

from kvcompile.checkpoint.pickled import is_pickled, write_as_safetensors
from kvcompile.checkpoint.quantized import (
    OUR_TAG,
    Storage,
    decodes,
    dense_bytes,
    dense_dtype,
    dequantized,
    edited_dtype,
    quant_method,
    quantization,
    scale_names,
    storage,
    stored_tensors,
    with_unquantized,
)
from kvcompile.checkpoint.reader import DTYPES, Checkpoint, open_checkpoint
from kvcompile.checkpoint.tensors import save_tensors, tensor_bytes
from kvcompile.checkpoint.writer import (
    Edit,
    copy_companions,
    dropped_tensors,
    file_digest,
    write_companions,
    write_patched,
)

__all__ = [
    "DTYPES",
    "OUR_TAG",
    "Checkpoint",
    "Edit",
    "Storage",
    "copy_companions",
    "decodes",
    "dense_bytes",
    "dense_dtype",
    "dequantized",
    "dropped_tensors",
    "edited_dtype",
    "file_digest",
    "is_pickled",
    "open_checkpoint",
    "quant_method",
    "quantization",
    "save_tensors",
    "scale_names",
    "storage",
    "stored_tensors",
    "tensor_bytes",
    "with_unquantized",
    "write_as_safetensors",
    "write_companions",
    "write_patched",
]
