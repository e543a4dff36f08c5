"""Tensors that lie in a file and are mapped into memory, which the system takes back when it needs it."""

import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor


def spill(tensor: Tensor, folder: Path) -> Tensor:
    """A tensor on the CPU of the same dtype, shape and content, in a file in `folder` that has no name any more.

    The file goes with the tensor, also when the process is killed. Raises OSError when there is no room for it.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return tensor.cpu()
    handle, name = tempfile.mkstemp(prefix=".spill-", dir=folder)
    try:
        os.unlink(name)
        os.posix_fallocate(handle, 0, nbytes)  # writing into a hole of a full disk would be a signal, not an error
        mapped = mmap.mmap(handle, nbytes)
    finally:
        os.close(handle)
    spilled = torch.frombuffer(mapped, dtype=tensor.dtype).view(tensor.shape)
    spilled.copy_(tensor)
    mapped.madvise(mmap.MADV_DONTNEED)  # the file keeps it; resident memory need not
    return spilled
