"""Checkpoints on disk: lazy reading, and writing by patching a copy."""

from kvcompile.checkpoint.pickled import is_pickled, write_as_safetensors
from kvcompile.checkpoint.reader import DTYPES, Checkpoint, open_checkpoint
from kvcompile.checkpoint.writer import Edit, copy_companions, file_digest, tensor_bytes, write_patched

__all__ = [
    "DTYPES",
    "Checkpoint",
    "Edit",
    "copy_companions",
    "file_digest",
    "is_pickled",
    "open_checkpoint",
    "tensor_bytes",
    "write_as_safetensors",
    "write_patched",
]
