"""The opset that functions are written in, and how a Python function becomes one of ours."""

from typing import TYPE_CHECKING, Any, TypeAlias

import onnxscript
from onnxscript.values import Opset

DOMAIN, VERSION = "ai.kvcompile", 1
OPSET, IR_VERSION = 26, 13
"""Opset 26 has BitCast, which reads the bits of a BF16 number; onnxruntime reads IR versions up to 13."""

FLOAT, UINT8, INT32, INT64, BFLOAT16 = 1, 2, 6, 7, 16
UINT16, UINT32 = 4, 12
NEGATIVE_INFINITY = float("-inf")

op: Any = Opset("", OPSET)
kvc: Any = Opset(DOMAIN, VERSION)
spec: Any = onnxscript.script(kvc, default_opset=op)
"""Decorator: the body is translated to a FunctionProto in our domain, with tensors as inputs and numbers as attributes."""

if TYPE_CHECKING:
    Float: TypeAlias = Any
    Double: TypeAlias = Any
    Bool: TypeAlias = Any
    Byte: TypeAlias = Any
    Word: TypeAlias = Any
    Cell: TypeAlias = Any
    Int: TypeAlias = Any
else:
    Float, Double, Bool = onnxscript.FLOAT, onnxscript.DOUBLE, onnxscript.BOOL
    Byte, Word, Cell, Int = onnxscript.UINT8, onnxscript.UINT16, onnxscript.UINT32, onnxscript.INT64
