"""Packing order of codes: a byte holds codes that lie a fraction of a row apart, so that a mask yields whole chunks.

With b bits and n = 8 / b codes per byte, byte j of a row of D codes is ``sum_i c[j + i D/n] << (b i)``. This is also
the order of the OSCAR (2 bit) and SAW-INT4 (4 bit) engines.
"""

import torch
from torch import Tensor


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes ``[..., D]`` to bytes uint8 ``[..., D bits / 8]``."""
    chunks = codes.unflatten(-1, (8 // bits, -1))
    packed = chunks[..., 0, :].clone()
    for i in range(1, 8 // bits):
        packed |= chunks[..., i, :] << (bits * i)
    return packed


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Bytes uint8 ``[..., D bits / 8]`` to codes uint8 ``[..., D]``."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None, :] >> shifts[:, None]) & (2**bits - 1)).flatten(-2)
