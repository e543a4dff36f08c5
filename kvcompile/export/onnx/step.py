"""Functions over a whole cache: attention over pages and windows, the linear correction, and one decode step of a layer.

Shapes: B batch rows, K KV heads, H query heads, D head_dim, S sink slots, W ring slots, P pages in the pool, N columns of the
page table, X page bytes, F features. Windows are uint16, the bit patterns of BF16 rows; lengths and tables are int32.
"""

from kvcompile.export.onnx.compose import Function
from kvcompile.export.onnx.layer import Layer
from kvcompile.export.onnx.pages import decode_page_function, store_function

CACHE = ("pages", "table", "num_pages", "num_tokens")
WINDOWS = ("sink_k", "sink_v", "ring_k", "ring_v")
STATES = ("state_s", "state_p")


def attend_function(layer: Layer) -> Function:
    """``AttendCache(q, pages, table, num_pages, num_tokens, windows, scaling, ...)``: `Attend` over a cache.

    Windows are float32 here. Returns the output ``[B, H, D]`` in the basis of stored values, and the log of the denominator.
    """
    decode = decode_page_function(layer)
    tables = decode.inputs[1:]
    capping = layer.names("softmax.softcap", "key.mean") if "softmax.softcap" in layer.tensors else []
    body = Function(
        "AttendCache",
        ["q", *CACHE, *WINDOWS, "scaling", *tables, *capping],
        "Attention over sink, pages and ring, one token per row.",
    )
    ids = body.call("KnownPages", "table", "num_pages")
    visible = body.call("Visible", "num_tokens", "num_pages", ids, "sink_k", "ring_k", page=layer.fmt.tokens)
    pages = body.call("GatherPages", "pages", ids)
    k, v = (body.call("PagesOfRows", x, ids) for x in body.calls(decode, pages, *tables, outputs=2))
    k, v = (body.call("Concat", f"sink_{n}", x, f"ring_{n}", axis=2) for n, x in (("k", k), ("v", v)))
    logits = body.call("Logits", "q", k, "scaling")
    if "key.mean" in capping:
        logits = body.call("AddShift", logits, body.call("Shift", "q", "key.mean", "scaling"))
    if capping:
        logits = body.call("SoftCap", logits, "softmax.softcap")
    out, lse = body.calls("Attend", logits, v, visible, outputs=2)
    return body.returns(("out", out), ("lse", lse))


def absorb_function(layer: Layer) -> Function:
    """``Absorb(k_NKTD, pages_NKX, state_s_KFD, state_p_KF, ...)``: the states of one sequence after N more pages.

    `k` are the stored keys (uint16) that the pages were made of.
    """
    decode = decode_page_function(layer)
    tables = decode.inputs[1:]
    maps = layer.names("correction.key", "correction.decoded")
    body = Function("Absorb", ["k", "pages", *STATES, *maps, *tables], "States of the linear correction take in pages.")
    decoded_k, decoded_v = body.calls(decode, "pages", *tables, outputs=2)
    features = "KeyFeaturesRelative" if "correction.decoded" in maps else "KeyFeatures"
    phi = body.call(features, body.call("FromBits", "k"), decoded_k, *maps)
    s, p = body.calls("AbsorbPages", *STATES, phi, decoded_v, outputs=2)
    return body.returns(("new_state_s", s), ("new_state_p", p))


def step_function(layer: Layer) -> Function:
    """``DecodeStep``: rotate q, k, v, append k and v, attend, correct, and restore the output; see docs/onnx.md.

    q ``[B, H, D]`` and k, v ``[B, K, D]`` are float32 rows after RoPE; `num_tokens` and `num_pages` are those before the step.
    The output float32 ``[B, H, D]`` is what W_O is applied to. Pages are written by `EncodePage`, before a step.
    """
    attend = attend_function(layer)
    stores = {half: store_function(layer, half) for half in ("key", "value")}
    corrected = "correction.key" in layer.tensors
    names = layer.names(
        "key.rotation", "key.inverse", "key.mean", "value.rotation", "value.inverse", "value.mean", "correction.query",
        "correction.scale", "key.centroids", "value.centroids", "softmax.softcap", "softmax.sinks",
    )  # fmt: skip
    states = STATES if corrected else ()
    body = Function(
        "DecodeStep", ["q", "k", "v", *CACHE, *WINDOWS, *states, "scaling", *names], "One step of one layer."
    )
    one, two = body.constant(1), body.constant(2)
    q = _query(body, layer, body.call("Unsqueeze", "q", two))
    q = body.call("Squeeze", q, two)
    windows, outputs = {}, []
    for half, x in (("key", "k"), ("value", "v")):
        row = body.call(stores[half], body.call("Unsqueeze", x, two), *stores[half].inputs[1:])
        sink, ring = (body.call("FromBits", f"{window}_{x}") for window in ("sink", "ring"))
        windows[f"sink_{x}"] = body.call("AppendSink", sink, row, "num_tokens")
        windows[f"ring_{x}"] = body.call("AppendRing", ring, row, "num_tokens", sink)
    seen = body.call("Add", "num_tokens", body.call("Cast", one, to=6))
    cache = ["pages", "table", "num_pages", seen, *(windows[name] for name in WINDOWS)]
    out, lse = body.calls(attend, q, *cache, *attend.inputs[len(cache) + 1 :], outputs=2)
    if corrected:
        weights = "WeightsRelative" if "correction.decoded" in layer.tensors else "Weights"
        kept, weight = body.calls(weights, lse, seen, "correction.scale", outputs=2)
        out = body.call("Correct", out, q, *STATES, "correction.query", kept, weight)
    out = body.call("Squeeze", _restore(body, layer, body.call("Unsqueeze", out, two)), two)
    if "softmax.sinks" in layer.tensors:
        if "key.mean" in layer.tensors and "softmax.softcap" not in layer.tensors:
            lse = body.call("Add", lse, body.call("Shift", q, "key.mean", "scaling"))
        out = body.call("LeaveToSinks", out, lse, "softmax.sinks")
    outputs += [(f"new_{name}", body.call("ToBits", windows[name])) for name in WINDOWS]
    return body.returns(("out", out), ("new_num_tokens", seen), *outputs)


def _query(body: Function, layer: Layer, q: str) -> str:
    """``q (R_K^-1)^T``; R_K itself where it is orthogonal."""
    if "key.inverse" in layer.tensors:
        return body.call("RotateBack", q, "key.inverse")
    return body.call("Rotate", q, "key.rotation") if "key.rotation" in layer.tensors else q


def _restore(body: Function, layer: Layer, out: str) -> str:
    """The mean of values is added, an online rotation undone."""
    if "value.mean" in layer.tensors:
        out = body.call("AddMean", out, "value.mean")
    if "value.inverse" in layer.tensors:
        return body.call("Rotate", out, "value.inverse")
    return body.call("RotateBack", out, "value.rotation") if "value.rotation" in layer.tensors else out


def query_function(layer: Layer) -> Function:
    """``RotateQuery(q_NHTD, rotation or inverse?)``: queries in the basis of stored keys, float32, not rounded."""
    body = Function("RotateQuery", ["q", *_query_tensor(layer)], "Queries in the basis of the stored keys.")
    return body.returns(("rotated", body.call("Identity", _query(body, layer, "q"))))


def _query_tensor(layer: Layer) -> list[str]:
    return layer.names("key.inverse") or layer.names("key.rotation")
