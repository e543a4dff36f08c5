"""The operations of the specification, each a function that onnxscript translates; together they are the domain ai.kvcompile."""

from onnx import FunctionProto
from onnxscript import OnnxFunction

from kvcompile.export.onnx.functions import attention, correction, grid, packing, rows
from kvcompile.export.onnx.functions.opset import DOMAIN, IR_VERSION, OPSET, VERSION

__all__ = ["DOMAIN", "FUNCTIONS", "IR_VERSION", "OPSET", "VERSION"]


def _translated() -> dict[str, FunctionProto]:
    found = {}
    for module in (rows, grid, packing, attention, correction):
        for value in vars(module).values():
            if isinstance(value, OnnxFunction):
                found[value.name] = value.to_function_proto()
    return found


FUNCTIONS: dict[str, FunctionProto] = _translated()
"""Every operation by its name."""
