"""The models of one layer: each a function, its tensors as initializers, and what goes in and out in types that numpy has.

BF16 rows are uint16, their bit patterns. Letters of shapes that a model leaves open: N blocks of tokens (or columns of a page
table), B batch rows, T tokens where they need not be a page, P pages, S and W slots of sink and ring.
"""

from collections.abc import Callable

import numpy as np
from onnx import ModelProto, ValueInfoProto

from kvcompile.export.onnx.compose import Function, make_model, tensor_info
from kvcompile.export.onnx.layer import Half, Layer
from kvcompile.export.onnx.pages import (
    coded_parts,
    decode_page_function,
    encode_function,
    encode_page_function,
    meta_cells,
    store_function,
)
from kvcompile.export.onnx.step import STATES, WINDOWS, absorb_function, attend_function, query_function, step_function

Infos = dict[str, ValueInfoProto]


def layer_models(layer: Layer) -> dict[str, ModelProto]:
    """Every model of a layer, by the name of its file."""
    builders: dict[str, Callable[[Layer], tuple[Function, Infos]]] = {
        "rotate_query": _rotate_query,
        "store_key": lambda x: _store(x, "key"),
        "store_value": lambda x: _store(x, "value"),
        "encode_key": lambda x: _encode(x, "key"),
        "encode_value": lambda x: _encode(x, "value"),
        "encode_page": _encode_page,
        "decode_page": _decode_page,
        "attend": _attend,
        "step": _step,
    }
    if layer.correction() is not None:
        builders["absorb"] = _absorb
    models = {}
    for name, build in builders.items():
        function, infos = build(layer)
        models[name] = make_model(function, infos, layer.defaults(), function.doc)
    return models


def packing_models(bits: int) -> dict[str, ModelProto]:
    """`Pack` and `Unpack` for this many bits, as models of their own."""
    models = {}
    for name, source, target in ((f"pack_{bits}", "codes", "bytes"), (f"unpack_{bits}", "bytes", "codes")):
        operation = name.split("_")[0].title()
        body = Function(
            f"{operation}{bits}", [source], f"{operation} codes of {bits} bits; docs/manifest.md, Packing order."
        )
        function = body.returns((target, body.call(operation, source, bits=bits)))
        shapes = {"codes": ["N", "K", "T", "D"], "bytes": ["N", "K", "T", "J"]}
        models[name] = make_model(
            function, {n: tensor_info(n, np.uint8, shapes[n]) for n in (source, target)}, {}, function.doc
        )
    return models


def _rows(layer: Layer, *names: str, dtype: type = np.float32, heads: int = 0, tokens: int | str = "T") -> Infos:
    shape: list[int | str] = ["N", heads or layer.num_kv_heads, tokens, layer.fmt.head_dim]
    return {name: tensor_info(name, dtype, shape) for name in names}


def _rotate_query(layer: Layer) -> tuple[Function, Infos]:
    return query_function(layer), _rows(layer, "q", "rotated", heads=layer.num_heads)


def _store(layer: Layer, half: Half) -> tuple[Function, Infos]:
    store = store_function(layer, half)
    body = Function(
        f"RotateStore{half.title()}", store.inputs, f"Rows of the model to the BF16 bits of stored {half}s."
    )
    function = body.returns(("rows", body.call("ToBits", body.call(store, *store.inputs))))
    return function, _rows(layer, "x") | _rows(layer, "rows", dtype=np.uint16)


def _encode(layer: Layer, half: Half) -> tuple[Function, Infos]:
    """Rotate, centre and encode: codes, metadata cells in the order of a page, norms as bits, ids of centroids."""
    store, encode = store_function(layer, half), encode_function(layer, half)
    row, kv, tokens = layer.row(half), layer.num_kv_heads, layer.fmt.tokens
    body = Function(
        f"RotateEncode{half.title()}", [*store.inputs, *encode.inputs[1:]], f"Rows of the model to codes of {half}s."
    )
    parts = coded_parts(row)
    codes, *values = body.calls(encode, body.call(store, *store.inputs), *encode.inputs[1:], outputs=1 + len(parts))
    found = dict(zip(parts, values, strict=True))
    outputs = [("codes", codes), ("meta", body.call("BitCast", meta_cells(body, row, found), to=6))]
    infos = _rows(layer, "x", tokens=tokens) | _rows(layer, "codes", dtype=np.uint8, tokens=tokens)
    infos["meta"] = tensor_info("meta", np.int32, ["N", kv, tokens * row.head_dim // row.group_size])
    if "norm" in found:
        outputs.append(("norm", body.call("ToBits", body.call("Squeeze", found["norm"], body.constant(3)))))
        infos["norm"] = tensor_info("norm", np.uint16, ["N", kv, tokens])
    if "centroid" in found:
        outputs.append(("centroid", body.call("Cast", found["centroid"], to=5)))
        infos["centroid"] = tensor_info("centroid", np.int16, ["N", kv, tokens])
    return body.returns(*outputs), infos


def _encode_page(layer: Layer) -> tuple[Function, Infos]:
    encode = encode_page_function(layer)
    body = Function("EncodePageBits", encode.inputs, "BF16 bits of stored rows to the bytes of pages.")
    rows = [body.call("FromBits", name) for name in ("k", "v")]
    function = body.returns(("pages", body.call(encode, *rows, *encode.inputs[2:])))
    return function, _rows(layer, "k", "v", dtype=np.uint16, tokens=layer.fmt.tokens) | _pages(layer, "N")


def _decode_page(layer: Layer) -> tuple[Function, Infos]:
    return decode_page_function(layer), _pages(layer, "N") | _rows(layer, "k", "v", tokens=layer.fmt.tokens)


def _pages(layer: Layer, count: str) -> Infos:
    return {"pages": tensor_info("pages", np.uint8, [count, layer.num_kv_heads, layer.fmt.page_bytes])}


def _cache(layer: Layer) -> Infos:
    infos = _pages(layer, "P") | {"table": tensor_info("table", np.int32, ["B", "N"])}
    for name in ("num_pages", "num_tokens", "new_num_tokens"):
        infos[name] = tensor_info(name, np.int32, ["B"])
    for name in WINDOWS:
        shape: list[int | str] = ["B", layer.num_kv_heads, "S" if name.startswith("sink") else "W", layer.fmt.head_dim]
        infos |= {n: tensor_info(n, np.uint16, shape) for n in (name, f"new_{name}")}
    for name, heads in (
        ("q", layer.num_heads),
        ("out", layer.num_heads),
        ("k", layer.num_kv_heads),
        ("v", layer.num_kv_heads),
    ):
        infos[name] = tensor_info(name, np.float32, ["B", heads, layer.fmt.head_dim])
    infos["lse"] = tensor_info("lse", np.float32, ["B", layer.num_heads])
    return infos


def _states(layer: Layer, *batch: str) -> Infos:
    correction = layer.correction()
    if correction is None:
        return {}
    kv, dim, features = correction.key_KDF.shape
    shapes: list[list[int | str]] = [[*batch, kv, features, dim], [*batch, kv, features]]
    return {
        f"{new}{name}": tensor_info(f"{new}{name}", np.float32, shape)
        for name, shape in zip(STATES, shapes, strict=True)
        for new in ("", "new_")
    }


def _attend(layer: Layer) -> tuple[Function, Infos]:
    attend = attend_function(layer)
    body = Function("AttendCacheBits", attend.inputs, "Attention of one rotated query per row over a cache.")
    given = [body.call("FromBits", name) if name in WINDOWS else name for name in attend.inputs]
    out, lse = body.calls(attend, *given, outputs=2)
    return body.returns(("out", out), ("lse", lse)), _cache(layer)


def _absorb(layer: Layer) -> tuple[Function, Infos]:
    rows = _rows(layer, "k", dtype=np.uint16, tokens=layer.fmt.tokens)
    return absorb_function(layer), rows | _pages(layer, "N") | _states(layer)


def _step(layer: Layer) -> tuple[Function, Infos]:
    return step_function(layer), _cache(layer) | _states(layer, "B")
