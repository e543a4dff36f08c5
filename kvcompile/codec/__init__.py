"""The normative codec in plain torch. A kernel, a cache or an export is right when it agrees with this package."""

from kvcompile.codec.layer import LayerCache, attend_layer
from kvcompile.codec.packing import pack_codes, unpack_codes
from kvcompile.codec.page import PAGE_TOKENS, PageFormat, decode_pages, encode_pages
from kvcompile.codec.quantizer import RowFormat, clip_rows, dequantize_rows, quantize_rows

__all__ = [
    "PAGE_TOKENS",
    "LayerCache",
    "PageFormat",
    "RowFormat",
    "attend_layer",
    "clip_rows",
    "decode_pages",
    "dequantize_rows",
    "encode_pages",
    "pack_codes",
    "quantize_rows",
    "unpack_codes",
]
