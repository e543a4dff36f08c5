"""What every model must answer, computed by the codec. Inputs and outputs are arrays by name, as in `models`."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from kvcompile.codec import (
    LayerCache,
    attend_layer,
    decode_pages,
    encode_pages,
    pack_codes,
    quantize_rows,
    unpack_codes,
)
from kvcompile.codec.correction import Correction, CorrectionStates
from kvcompile.export.onnx.layer import Half, Layer
from kvcompile.models import Softmax

Arrays = dict[str, np.ndarray]


def to_bits(x: Tensor) -> np.ndarray:
    """The BF16 bit patterns of a tensor, uint16."""
    return x.bfloat16().contiguous().view(torch.int16).numpy().view(np.uint16)


def from_bits(bits: np.ndarray) -> Tensor:
    """BF16 tensor of bit patterns uint16."""
    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)


def answer(model: str, layer: Layer, inputs: Mapping[str, np.ndarray]) -> Arrays:
    """Outputs of a model of `layer`."""
    half: Half = "key" if model.endswith("_key") else "value"
    answers: dict[str, Callable[[], Arrays]] = {
        "rotate_query": lambda: {"rotated": rotate_query(layer, torch.from_numpy(inputs["q"])).numpy()},
        "encode_page": lambda: {"pages": _encode_page(layer, inputs)},
        "decode_page": lambda: _decode_page(layer, inputs),
        "attend": lambda: _attend(layer, inputs),
        "absorb": lambda: _absorb(layer, inputs),
        "step": lambda: _step(layer, inputs),
    }
    if model in answers:
        return answers[model]()
    rows = store(layer, half, torch.from_numpy(inputs["x"]))
    return {"rows": to_bits(rows)} if model.startswith("store") else _encode(layer, half, rows)


def answer_packing(model: str, inputs: Mapping[str, np.ndarray]) -> Arrays:
    """Outputs of ``pack_{bits}`` and ``unpack_{bits}``."""
    operation, bits = model.split("_")
    if operation == "pack":
        return {"bytes": pack_codes(torch.from_numpy(inputs["codes"]), int(bits)).numpy()}
    return {"codes": unpack_codes(torch.from_numpy(inputs["bytes"]), int(bits)).numpy()}


def store(layer: Layer, half: Half, x_NKTD: Tensor) -> Tensor:
    """Stored rows, bfloat16."""
    rotation_KDD, mean_KD = layer.tensors.get(f"{half}.rotation"), layer.tensors.get(f"{half}.mean")
    x_NKTD = x_NKTD if rotation_KDD is None else x_NKTD @ rotation_KDD
    return (x_NKTD if mean_KD is None else x_NKTD - mean_KD[:, None]).bfloat16()


def rotate_query(layer: Layer, q_NHTD: Tensor) -> Tensor:
    """Queries in the basis of stored keys, float32."""
    inverse_KDD, rotation_KDD = layer.tensors.get("key.inverse"), layer.tensors.get("key.rotation")
    if rotation_KDD is None:
        return q_NHTD
    return _by_head(q_NHTD, rotation_KDD if inverse_KDD is None else inverse_KDD.mT)


def _by_head(x_NHTD: Tensor, r_KDD: Tensor) -> Tensor:
    return (x_NHTD.unflatten(1, (r_KDD.shape[0], -1)) @ r_KDD[:, None]).flatten(1, 2)


def _encode(layer: Layer, half: Half, rows: Tensor) -> Arrays:
    fmt, tables = layer.row(half), layer.tables()
    coded = quantize_rows(rows, fmt, tables.key if half == "key" else tables.value)
    offset, size = layer.fmt.sections[f"{half}_meta"]
    raw = encode_pages(rows, rows, layer.fmt, layer.tables())[..., offset : offset + size].contiguous().numpy()
    meta = raw.view(np.uint16).astype(np.int32) if coded.zero is None else raw.view(np.int32)
    outputs = {"codes": coded.codes.numpy(), "meta": meta}
    if coded.norm is not None:
        outputs["norm"] = to_bits(coded.norm)
    if coded.centroid is not None:
        outputs["centroid"] = coded.centroid.numpy()
    return outputs


def _encode_page(layer: Layer, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    return encode_pages(from_bits(inputs["k"]), from_bits(inputs["v"]), layer.fmt, layer.tables()).numpy()


def _decode_page(layer: Layer, inputs: Mapping[str, np.ndarray]) -> Arrays:
    k, v = decode_pages(torch.from_numpy(inputs["pages"]), layer.fmt, layer.tables())
    return {"k": k.numpy(), "v": v.numpy()}


def _cache(layer: Layer, inputs: Mapping[str, np.ndarray]) -> LayerCache:
    pages, table, num_pages, num_tokens = (
        torch.from_numpy(inputs[name]) for name in ("pages", "table", "num_pages", "num_tokens")
    )
    sink_k, sink_v, ring_k, ring_v = (from_bits(inputs[name]) for name in ("sink_k", "sink_v", "ring_k", "ring_v"))
    return LayerCache(layer.fmt, pages, table, num_pages, num_tokens, sink_k, sink_v, ring_k, ring_v, layer.tables())


def _scaling(layer: Layer, inputs: Mapping[str, np.ndarray]) -> float:
    return float(inputs.get("scaling", layer.fmt.head_dim**-0.5))


def _attend(layer: Layer, inputs: Mapping[str, np.ndarray]) -> Arrays:
    out, lse = _over_cache(layer, torch.from_numpy(inputs["q"]), _cache(layer, inputs), _scaling(layer, inputs))
    return {"out": out.numpy(), "lse": lse.numpy()}


def _over_cache(layer: Layer, q_BHD: Tensor, cache: LayerCache, scaling: float) -> tuple[Tensor, Tensor]:
    softcap = layer.tensors.get("softmax.softcap")
    return attend_layer(
        q_BHD, cache, scaling, None if softcap is None else float(softcap), _shift(layer, q_BHD, scaling)
    )


def _shift(layer: Layer, q_BHD: Tensor, scaling: float) -> Tensor | None:
    """What the mean of the keys takes from every logit ``[B, H]``."""
    mean_KD = layer.tensors.get("key.mean")
    return None if mean_KD is None else _by_head(q_BHD[:, :, None], mean_KD[:, :, None])[:, :, 0, 0] * scaling


def _correction(layer: Layer) -> Correction:
    correction = layer.correction()
    assert correction is not None
    return correction


def _absorb(layer: Layer, inputs: Mapping[str, np.ndarray]) -> Arrays:
    decoded = decode_pages(torch.from_numpy(inputs["pages"]), layer.fmt, layer.tables())
    states = CorrectionStates(*(torch.from_numpy(inputs[name].copy())[None] for name in ("state_s", "state_p")))
    states.add(0, _correction(layer), from_bits(inputs["k"]), *decoded)
    return {"new_state_s": states.s_BKFD[0].numpy(), "new_state_p": states.p_BKF[0].numpy()}


def _step(layer: Layer, inputs: Mapping[str, np.ndarray]) -> Arrays:
    q_BHD, k_BKD, v_BKD = (torch.from_numpy(inputs[name]) for name in "qkv")
    grown = dict(inputs, num_tokens=inputs["num_tokens"] + 1)
    cache = _cache(layer, grown)
    for half, x_BKD, sink, ring in (
        ("key", k_BKD, cache.sink_k_BKSD, cache.recent_k_BKWD),
        ("value", v_BKD, cache.sink_v_BKSD, cache.recent_v_BKWD),
    ):
        rows_BKD = store(layer, "key" if half == "key" else "value", x_BKD[:, :, None])[:, :, 0]
        for row, before in enumerate(inputs["num_tokens"].tolist()):
            window, slot = (
                (sink, before) if before < sink.shape[2] else (ring, (before - sink.shape[2]) % ring.shape[2])
            )
            window[row, :, slot] = rows_BKD[row]
    q_BHTD = rotate_query(layer, q_BHD[:, :, None])
    scaling = _scaling(layer, inputs)
    out_BHD, lse_BH = _over_cache(layer, q_BHTD[:, :, 0], cache, scaling)
    out_BHTD = out_BHD[:, :, None]
    if layer.correction() is not None:
        states = CorrectionStates(*(torch.from_numpy(inputs[name]) for name in ("state_s", "state_p")))
        seen_B1 = cache.num_tokens_B[:, None].float()
        out_BHTD = states.correct(out_BHTD, lse_BH[..., None], seen_B1, q_BHTD, _correction(layer))
    mean_KD, rotation_KDD = layer.tensors.get("value.mean"), layer.tensors.get("value.rotation")
    if mean_KD is not None:
        out_BHTD = out_BHTD + mean_KD.repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=0)[:, None]
    if rotation_KDD is not None:
        out_BHTD = _by_head(out_BHTD, layer.tensors.get("value.inverse", rotation_KDD.mT))
    if "softmax.sinks" in layer.tensors:
        shift_BH = None if "softmax.softcap" in layer.tensors else _shift(layer, q_BHTD[:, :, 0], scaling)
        lse_BHT = (lse_BH if shift_BH is None else lse_BH + shift_BH)[:, :, None]
        out_BHTD = out_BHTD * Softmax(scaling, None, layer.tensors["softmax.sinks"]).kept(lse_BHT)[..., None]
    outputs = {"out": out_BHTD[:, :, 0].numpy(), "new_num_tokens": grown["num_tokens"]}
    windows = (cache.sink_k_BKSD, cache.sink_v_BKSD, cache.recent_k_BKWD, cache.recent_v_BKWD)
    names = ("new_sink_k", "new_sink_v", "new_ring_k", "new_ring_v")
    return outputs | {name: to_bits(window) for name, window in zip(names, windows, strict=True)}
