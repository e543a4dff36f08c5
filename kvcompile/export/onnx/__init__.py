"""ONNX as an executable specification: functions of the codec, models of an artifact's layers, and a conformance kit.

`functions` has the operations, `pages` and `step` what a format makes of them, `models` the graphs around those; `oracle` is the
codec behind the same names, `cases` draws inputs, `kit` writes both. Only `target` can be imported without onnx.
"""

from kvcompile.export.onnx.target import OnnxTarget

__all__ = ["OnnxTarget"]
