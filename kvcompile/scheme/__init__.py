"""Declarative schemes: models, built-in files, overrides, and their cost in bits."""

from kvcompile.scheme.bits import bits_per_element, group_size, history_bits
from kvcompile.scheme.library import DEFAULT_SCHEME, builtin_names, load_scheme, parse_scheme, scheme_text
from kvcompile.scheme.model import Quantizer, RowCodec, Scheme, Spectral, Window

__all__ = [
    "DEFAULT_SCHEME",
    "Quantizer",
    "RowCodec",
    "Scheme",
    "Spectral",
    "Window",
    "bits_per_element",
    "builtin_names",
    "group_size",
    "history_bits",
    "load_scheme",
    "parse_scheme",
    "scheme_text",
]
