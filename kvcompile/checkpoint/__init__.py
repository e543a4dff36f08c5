"""Checkpoints on disk: lazy reading, and writing by patching a copy."""

from kvcompile.checkpoint.reader import DTYPES, Checkpoint, open_checkpoint
from kvcompile.checkpoint.tensors import save_tensors
from kvcompile.checkpoint.writer import Edit, copy_companions, file_digest, tensor_bytes, write_patched

__all__ = [
    "DTYPES",
    "Checkpoint",
    "Edit",
    "copy_companions",
    "file_digest",
    "open_checkpoint",
    "save_tensors",
    "tensor_bytes",
    "write_patched",
]
