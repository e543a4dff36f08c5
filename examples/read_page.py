"""A reader of kvcompile artifacts and pages with numpy and safetensors alone, written from docs/manifest.md.

    python examples/read_page.py OUT LAYER HEAD page.bin

prints what a page holds. Shapes: K KV heads, D head_dim, T tokens of a page, C centroids.
"""

import json
import re
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
from safetensors import deserialize

LEVELS = {
    1: [0.7978846],
    2: [0.4527800, 1.5104176],
    4: [0.1283950, 0.3880483, 0.6567591, 0.9423404, 1.2562312, 1.6180463, 2.0690172, 2.7325896],
}
"""The positive ones, ascending: codes without a zero point."""
KNOWN = {
    "bits": (1, 2, 4),
    "axis": ("token", "channel"),
    "zero_point": ("float", "integer", "none"),
    "rounding": ("nearest", "error_feedback"),
    "token_scale": ("none", "l2", "rsqrt", "max", "mean_abs"),
    "norm_scope": ("head", "token"),
    "apply": ("online", "folded"),
}
"""Values that this reader understands. Any other is an error, never a guess."""
DEFAULTS = {
    "axis": "token", "zero_point": "float", "rounding": "nearest", "token_scale": "none", "norm_scope": "head",
    "num_centroids": 0, "inverse": None, "mean": None, "centroids": None,
}  # fmt: skip


def bf16(raw):
    """Little-endian BF16 to float32, exactly."""
    return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)


class Artifact:
    """Manifest and sidecar of a converted directory."""

    def __init__(self, directory):
        directory = Path(directory)
        self.manifest = json.loads((directory / "kvcompile.json").read_text("utf-8"))
        version = self.manifest["schema_version"]
        if not (isinstance(version, str) and re.fullmatch("[01][.][0-9]+", version)):
            raise ValueError(f"schema version {version!r} is too new for this reader, or none")
        sidecar = (directory / self.manifest["sidecar"]["file"]).read_bytes()
        if sha256(sidecar).hexdigest() != self.manifest["sidecar"]["sha256"]:
            raise ValueError("the sidecar is not the one that its manifest was written for")
        dtypes = {"F32": lambda b: np.frombuffer(b, "<f4"), "F64": lambda b: np.frombuffer(b, "<f8"), "BF16": bf16}
        self.tensors = {
            name: dtypes[entry["dtype"]](entry["data"]).reshape(entry["shape"])
            for name, entry in deserialize(sidecar)
            if entry["dtype"] in dtypes
        }

    def layer(self, index):
        """A layer's record with the defaults of fields that older writers did not know; raises ValueError for the unknown."""
        layer = self.manifest["layers"][index]
        if layer["key"] is None:
            raise ValueError(f"layer {index} is not packed: {layer['reason']}")
        halves = {half: checked(DEFAULTS | layer[half]) for half in ("key", "value")}
        return {"page_tokens": 64} | layer | halves

    def read_page(self, index, head, page):
        """Keys and values of a page ``[T, D]`` float32, rotated and centred as they are stored."""
        layer = self.layer(index)
        return read_page(page, layer, *(self._tensor(layer[half]["centroids"], head) for half in ("key", "value")))

    def restore(self, index, head, rows, half):
        """Stored rows ``[T, D]`` of a half in the basis of the source model: ``(x + mean) @ R^-1``."""
        row = self.layer(index)[half]
        mean, r, inverse = (self._tensor(row[name], head) for name in ("mean", "rotation", "inverse"))
        rows = rows if mean is None else rows + mean
        return rows if r is None else rows @ (r.T if inverse is None else inverse)

    def _tensor(self, name, head):
        return None if name is None else self.tensors[name][head]


def checked(half):
    """The record of a half, if this reader knows what it says."""
    for field, known in KNOWN.items():
        if half.get(field) not in known:
            raise ValueError(f"{field} {half.get(field)!r} is unknown to this reader")
    return half


def read_page(page, layer, key_book=None, value_book=None):
    """Split the bytes of a page of one KV head into its parts and decode them; books are centroids ``[C, D]`` float32."""
    dim, tokens, key, value = layer["head_dim"], layer["page_tokens"], layer["key"], layer["value"]
    at = 0

    def take(size):
        nonlocal at
        at += size
        return page[at - size : at]

    def meta_bytes(half):
        cells = dim * tokens // half["group_size"]  # the same count along either axis
        return (2 if half["zero_point"] == "none" else 4) * cells

    def ids(half):
        return np.frombuffer(take(2 * tokens), "<i2") if half["num_centroids"] else None

    k_packed = np.frombuffer(take(tokens * dim * key["bits"] // 8), np.uint8).reshape(tokens, -1)
    v_packed = np.frombuffer(take(tokens * dim * value["bits"] // 8), np.uint8).reshape(-1, tokens).T
    k_meta, v_meta = take(meta_bytes(key)), take(meta_bytes(value))
    norm = bf16(take(2 * tokens)) if key["token_scale"] != "none" else None
    k_ids, v_ids = ids(key), ids(value)
    if at != len(page):
        raise ValueError(f"the page has {len(page)} bytes, its format implies {at}")
    k = dequantize(k_packed, k_meta, key, tokens, dim, norm, key_book, k_ids)
    return k, dequantize(v_packed, v_meta, value, tokens, dim, None, value_book, v_ids)


def dequantize(packed, meta, half, tokens, dim, norm, book, ids):
    """Packed codes ``[T, D / n]`` and metadata to rows ``[T, D]``."""
    bits, group = half["bits"], half["group_size"]
    codes = np.concatenate([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], axis=1)

    def spread(cells):  # one number per group to [T, D]
        if half["axis"] == "token":
            return np.repeat(cells.reshape(dim // group, tokens).T, group, axis=1)
        return np.repeat(cells.reshape(tokens // group, dim), group, axis=0)

    if half["zero_point"] == "none":
        level = np.array([-x for x in LEVELS[bits][::-1]] + LEVELS[bits], np.float32)
        x = level[codes] * spread(bf16(meta))
    else:
        scale, zero = bf16(meta).reshape(-1, 2).T
        x = (codes.astype(np.float32) - spread(zero)) * spread(scale)
    x = x if ids is None else x + book[ids]
    return x if norm is None else x * norm[:, None]


if __name__ == "__main__":
    artifact, layer, head = Artifact(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for half, rows in zip(
        ("key", "value"), artifact.read_page(layer, head, Path(sys.argv[4]).read_bytes()), strict=True
    ):
        restored = artifact.restore(layer, head, rows, half)
        print(f"{half}s {list(rows.shape)}: stored {rows[0, :4]} ..., in the source's basis {restored[0, :4]} ...")
