"""The normative codec in plain torch. A kernel, a cache or an export is right when it agrees with this package."""

from kvcompile.codec.feedback import feedback_codes, feedback_factor
from kvcompile.codec.layer import LayerCache, attend_chunk, attend_layer
from kvcompile.codec.packing import pack_codes, unpack_codes
from kvcompile.codec.page import (
    NO_PAGE_TABLES,
    PAGE_TOKENS,
    PageFormat,
    PageTables,
    decode_pages,
    encode_pages,
)
from kvcompile.codec.quantizer import (
    NO_TABLES,
    QuantizedRows,
    RowFormat,
    RowTables,
    clip_rows,
    dequantize_rows,
    quantize_rows,
    token_norms,
)

__all__ = [
    "NO_PAGE_TABLES",
    "NO_TABLES",
    "PAGE_TOKENS",
    "LayerCache",
    "PageFormat",
    "PageTables",
    "QuantizedRows",
    "RowFormat",
    "RowTables",
    "attend_chunk",
    "attend_layer",
    "clip_rows",
    "decode_pages",
    "dequantize_rows",
    "encode_pages",
    "feedback_codes",
    "feedback_factor",
    "pack_codes",
    "quantize_rows",
    "token_norms",
    "unpack_codes",
]
