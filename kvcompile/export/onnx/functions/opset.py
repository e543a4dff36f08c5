"""The opset that functions are written in, and how a Python function becomes one of ours."""

from typing import TYPE_CHECKING, Any

from onnxscript import script
from onnxscript.values import Opset

DOMAIN, VERSION = "ai.kvcompile", 1
OPSET, IR_VERSION = 26, 13
"""Opset 26 has BitCast, which reads the bits of a BF16 number; onnxruntime 1.31 reads IR versions up to 13."""

FLOAT, UINT8, INT32, INT64, BFLOAT16 = 1, 2, 6, 7, 16
UINT16, UINT32 = 4, 12
NEGATIVE_INFINITY = float("-inf")

op: Any = Opset("", OPSET)
kvc: Any = Opset(DOMAIN, VERSION)
spec: Any = script(kvc, default_opset=op)
"""Decorator: the body is translated to a FunctionProto in our domain, with tensors as inputs and numbers as attributes."""

if TYPE_CHECKING:
    Float = Double = Bool = Byte = Word = Cell = Int = Any
else:
    from onnxscript import BOOL as Bool
    from onnxscript import DOUBLE as Double
    from onnxscript import FLOAT as Float
    from onnxscript import INT64 as Int
    from onnxscript import UINT8 as Byte
    from onnxscript import UINT16 as Word
    from onnxscript import UINT32 as Cell
