"""Error-feedback rounding on a CPU: encode.c, compiled on first use; the codec itself where that cannot be.

Shapes: K KV heads, T tokens, D head_dim.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from kvcompile import codec
from kvcompile.errors import CacheError
from kvcompile.kernels.compiler import load_library

_FLAGS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_BLOCK = 4
"""Channels that encode.c works on at a time."""


def feedback_codes(
    x: Tensor, scale: Tensor, zero: Tensor, factor_KDD: Tensor, bits: int, group_size: int, group_dim: int
) -> Tensor:
    """`codec.feedback_codes`, bit for bit: codes uint8 ``[..., K, T, D]`` of float32 rows on the CPU."""
    function = _function()
    num_heads, num_tokens, head_dim = x.shape[-3:]
    if function is None or not x.is_cpu or head_dim % _BLOCK:
        return codec.feedback_codes(x, scale, zero, factor_KDD, bits, group_size, group_dim)
    x, scale, zero, factor_KDD = (tensor.float().contiguous() for tensor in (x, scale, zero, factor_KDD))
    codes = torch.empty(x.shape, dtype=torch.uint8)
    function(
        *[tensor.data_ptr() for tensor in (x, scale, zero, factor_KDD, codes)],
        x.shape[:-2].numel(),
        num_heads,
        num_tokens,
        head_dim,
        *((1, group_size) if group_dim == -1 else (group_size, 1)),
        bits,
        torch.get_num_threads(),
    )
    return codes


@cache
def _function() -> Callable[..., None] | None:
    """The C function, or None where there is no working compiler."""
    try:
        function = load_library("encode.c", *_FLAGS).feedback_codes
    except CacheError:
        return None
    function.argtypes, function.restype = [*5 * [ctypes.c_void_p], *8 * [ctypes.c_int]], None
    return function
