"""Random layers for the ONNX export, and its models on both runtimes."""

import numpy as np
import onnxruntime
import torch
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator

from kvcompile.codec import PageFormat
from kvcompile.export.onnx.layer import Layer
from tests.layers import random_tables

onnxruntime.set_default_logger_severity(3)
RUNTIMES = ("onnxruntime", "onnx.reference")
Arrays = dict[str, np.ndarray]


def random_onnx_layer(
    fmt: PageFormat,
    num_heads: int,
    num_kv_heads: int,
    *,
    rotated: str = "",
    balanced: str = "",
    centered: str = "",
    correction: str = "",
    softmax: str = "",
    seed: int = 0,
) -> Layer:
    """A layer with random tensors.

    `rotated`, `balanced` (with an inverse) and `centered` name halves, `correction` its form, `softmax` what it has besides.
    """
    generator = torch.Generator().manual_seed(seed)
    kv, dim, features = num_kv_heads, fmt.head_dim, 16

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors: dict[str, torch.Tensor] = {}
    for half in (rotated + " " + balanced).split():
        tensors[f"{half}.rotation"] = torch.linalg.qr(normal(kv, dim, dim)).Q
    for half in balanced.split():
        tensors[f"{half}.rotation"] *= torch.linspace(0.5, 2, dim)
        tensors[f"{half}.inverse"] = torch.linalg.inv(tensors[f"{half}.rotation"])
    for half in centered.split():
        tensors[f"{half}.mean"] = normal(kv, dim)
    tables = random_tables(fmt, kv, seed)
    for half, rows in (("key", tables.key), ("value", tables.value)):
        for name, table in (("feedback", rows.feedback), ("centroids", rows.centroids)):
            if table is not None:
                tensors[f"{half}.{name}"] = table.bfloat16() if name == "centroids" else table
    if correction:
        tensors["correction.query"] = normal(num_heads, dim, features) * 0.3
        tensors["correction.key"] = normal(kv, dim, features) * 0.3
        tensors["correction.scale"] = normal(num_heads).abs()
    if correction == "relative":
        tensors["correction.decoded"] = normal(kv, dim, features) * 0.3
    if "softcap" in softmax:
        tensors["softmax.softcap"] = torch.tensor(1.5)
    if "sinks" in softmax:
        tensors["softmax.sinks"] = normal(num_heads) + 3
    return Layer(num_heads, num_kv_heads, fmt, {name: tensor.float().contiguous() for name, tensor in tensors.items()})


class Session:
    """A model on one of the runtimes."""

    def __init__(self, model: ModelProto, runtime: str = "onnxruntime"):
        self.names = [output.name for output in model.graph.output]
        if runtime == "onnxruntime":
            providers = ["CPUExecutionProvider"]
            self.session = onnxruntime.InferenceSession(model.SerializeToString(), providers=providers)
        else:
            self.session = ReferenceEvaluator(model)

    def __call__(self, **inputs: np.ndarray) -> Arrays:
        with np.errstate(divide="ignore", invalid="ignore"):  # log(0) of an empty row, NaN where nobody looks
            return dict(zip(self.names, self.session.run(None, inputs), strict=True))


def assert_agrees(found: Arrays, expected: Arrays, exact: bool = False) -> None:
    """Integers exactly, floats to 1e-5."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        if exact or value.dtype.kind in "iu":
            np.testing.assert_array_equal(found[name], value, name)
        else:
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
