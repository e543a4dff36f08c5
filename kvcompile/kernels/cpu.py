"""Decode attention on a CPU: attend.c, compiled for a page format and a number of query heads on first use.

Shapes: B batch rows, K KV heads, G query heads per KV head, H = K G, D head_dim.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from kvcompile.codec import LayerCache, PageFormat, RowFormat
from kvcompile.errors import CacheError
from kvcompile.kernels.compiler import load_library

_DTYPES = (torch.uint8, *3 * [torch.int32], *4 * [torch.bfloat16])
_POINTERS, _SIZES = 11 * [ctypes.c_void_p], [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int, ctypes.c_int]


def attend(q_BHD: Tensor, layer: LayerCache, scaling: float) -> tuple[Tensor, Tensor]:
    """What `codec.attend_layer` computes, to about 1e-6: output float32 ``[B, H, D]`` and log-sum-exp ``[B, H]``.

    `q_BHD` holds rotated queries of any float dtype. Uses `torch.get_num_threads()` threads. The tensors of the layer
    are contiguous, in the types that `LayerCache` names; only rows of the page table may lie further apart.
    """
    batch, num_heads, _ = q_BHD.shape
    num_kv_heads = layer.pages_PKX.shape[1]
    table_BN, sink_k, recent_k = layer.table_BN, layer.sink_k_BKSD, layer.recent_k_BKWD
    tensors = (
        layer.pages_PKX,
        table_BN,
        layer.num_pages_B,
        layer.num_tokens_B,
        sink_k,
        layer.sink_v_BKSD,
        recent_k,
        layer.recent_v_BKWD,
    )
    for tensor, dtype in zip(tensors, _DTYPES, strict=True):
        if tensor.dtype is not dtype or not (tensor.is_contiguous() or (tensor is table_BN and tensor.stride(1) == 1)):
            raise CacheError(
                f"The CPU kernel reads contiguous {dtype} here, but a tensor {list(tensor.shape)} of the layer is "
                f"{tensor.dtype} with strides {tensor.stride()}; make it so where the cache is allocated."
            )
        if not tensor.is_cpu:
            raise CacheError(f"The CPU kernel was given a layer on {tensor.device}; use the backend of that device.")
    function = _kernel(layer.fmt, num_heads // num_kv_heads)
    q_BHD = q_BHD.to("cpu", torch.float32).contiguous()
    out_BHD, lse_BH = torch.empty_like(q_BHD), q_BHD.new_empty(q_BHD.shape[:2])
    failed = function(
        q_BHD.data_ptr(),
        *[tensor.data_ptr() for tensor in tensors],
        out_BHD.data_ptr(),
        lse_BH.data_ptr(),
        batch,
        num_kv_heads,
        table_BN.stride(0),
        sink_k.shape[2],
        recent_k.shape[2],
        scaling,
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("The CPU kernel could not allocate its partial results.")
    lse_BH[layer.num_tokens_B == 0] = -torch.inf  # -ffast-math knows no infinity, and would hide what is not a number
    finite_BH = q_BHD.isfinite().all(dim=-1)
    if not finite_BH.all():
        out_BHD[~finite_BH] = lse_BH[~finite_BH] = torch.nan
    return out_BHD, lse_BH


def supports(fmt: PageFormat) -> bool:
    """Whether the kernel can read this format: even levels, values by token, key rows of whole 32-bit words."""
    even = all(row.zero_point != "none" and not row.centroids for row in (fmt.key, fmt.value))
    whole = fmt.key.row_bytes % 4 == 0 and (fmt.key.axis == "channel" or fmt.key.group_size % 4 == 0)
    return even and whole and fmt.value.axis == "token" and fmt.value.token_scale == "none"


@cache
def is_available() -> bool:
    """Whether a working compiler was found and the kernel builds."""
    try:
        _kernel(PageFormat(RowFormat(16, 2, 16), RowFormat(16, 2, 16)), 1)
    except CacheError:
        return False
    return True


@cache
def _kernel(fmt: PageFormat, queries: int) -> Callable[..., int]:
    """The C function for one format and number of query heads per KV head."""
    if not supports(fmt):
        raise CacheError(
            f"The CPU kernel needs evenly spaced levels without centroids, values by token, and key rows of whole 32-bit "
            f"words in groups of whole fours, but this format is {fmt}; use the codec backend."
        )
    macros = {
        "HEAD_DIM": fmt.head_dim,
        "PAGE_TOKENS": fmt.tokens,
        "QUERIES": queries,
        "KEY_BITS": fmt.key.bits,
        "KEY_GROUP": fmt.key.group_size,
        "KEYS_BY_CHANNEL": int(fmt.key.axis == "channel"),
        "KEYS_SCALED": int(fmt.key.token_scale != "none"),
        "VALUE_BITS": fmt.value.bits,
        "VALUE_GROUP": fmt.value.group_size,
        "VALUE_CODES_AT": fmt.value_offset,
        "KEY_META_AT": fmt.key_meta_offset,
        "VALUE_META_AT": fmt.value_meta_offset,
        "KEY_NORM_AT": fmt.sections["key_norm"][0],
        "PAGE_BYTES": fmt.page_bytes,
    }
    library = load_library("attend.c", "-ffast-math", *(f"-D{name}={value}" for name, value in macros.items()))
    library.attend.argtypes = [*_POINTERS, *_SIZES, ctypes.c_float, ctypes.c_int]
    function: Callable[..., int] = library.attend
    return function
