"""Functions made of calls of other functions, and models around them.

What a layer's format leaves out, its functions leave out too; so they are put together here call by call, while the operations
that they call are written down once, in `functions`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from kvcompile.export.onnx.functions import DOMAIN, FUNCTIONS, IR_VERSION, OPSET, VERSION

OPSETS = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)]
PRODUCER = "kvcompile"


@dataclass
class Function:
    """A function that grows call by call; `inputs` are names, and every call returns the names of what it computes."""

    name: str
    inputs: Sequence[str]
    doc: str = ""
    known: dict[str, FunctionProto] = field(default_factory=dict)
    nodes: list[NodeProto] = field(default_factory=list)

    def call(self, operation: "str | Function", *inputs: str, **attributes: Any) -> str:
        """Call an operation of ours, or of ONNX itself where we have none of that name, for its one output."""
        return self.calls(operation, *inputs, outputs=1, **attributes)[0]

    def calls(self, operation: "str | Function", *inputs: str, outputs: int, **attributes: Any) -> list[str]:
        """Call an operation that has several outputs."""
        if isinstance(operation, Function):
            self.known |= operation.known
            operation = operation.name
        names = [f"{operation}_{len(self.nodes)}_{i}" for i in range(outputs)]
        domain = DOMAIN if operation in FUNCTIONS or operation in self.known else ""
        self.nodes.append(helper.make_node(operation, inputs, names, domain=domain, **attributes))
        return names

    def constant(self, *values: int) -> str:
        """A list of integers."""
        return self.call("Constant", value_ints=list(values))

    def returns(self, *outputs: tuple[str, str]) -> "Function":
        """Finish: outputs as pairs of their name and the value."""
        for name, value in outputs:
            self.nodes.append(helper.make_node("Identity", [value], [name]))
        proto = helper.make_function(DOMAIN, self.name, self.inputs, [name for name, _ in outputs], self.nodes, OPSETS)
        proto.doc_string = self.doc
        self.known[self.name] = proto
        return self


def tensor_info(name: str, dtype: Any, shape: Sequence[int | str]) -> ValueInfoProto:
    """What a model says about an input or output: numpy dtype, and a shape of numbers and letters."""
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)


def make_model(
    function: Function, values: Mapping[str, ValueInfoProto], defaults: Mapping[str, np.ndarray], doc: str
) -> ModelProto:
    """A model of one node: `function`, with the inputs that have a default as initializers which a caller may override."""
    proto = function.known[function.name]
    node = helper.make_node(function.name, proto.input, proto.output, domain=DOMAIN)
    initializers: list[TensorProto] = [numpy_helper.from_array(defaults[n], n) for n in proto.input if n in defaults]
    fixed = {n: tensor_info(n, defaults[n].dtype, defaults[n].shape) for n in proto.input if n in defaults}
    inputs = [values[n] if n in values else fixed[n] for n in proto.input]
    graph: GraphProto = helper.make_graph(
        [node], function.name, inputs, [values[n] for n in proto.output], initializers, doc_string=doc
    )
    model: ModelProto = helper.make_model(
        graph,
        opset_imports=OPSETS,
        functions=_needed([node], function.known),
        producer_name=PRODUCER,
        ir_version=IR_VERSION,
    )
    return model


def _needed(nodes: Iterable[NodeProto], known: Mapping[str, FunctionProto]) -> list[FunctionProto]:
    """Every function that nodes call, directly or not, callees first."""
    found: dict[str, FunctionProto] = {}

    def visit(nodes: Iterable[NodeProto]) -> None:
        for node in nodes:
            for attribute in node.attribute:
                visit(attribute.g.node)
            if node.domain == DOMAIN and node.op_type not in found:
                proto = known[node.op_type] if node.op_type in known else FUNCTIONS[node.op_type]
                visit(proto.node)
                found[node.op_type] = proto

    visit(nodes)
    return list(found.values())
