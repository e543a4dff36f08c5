"""Inputs of conformance cases: small, odd, and such that every right implementation gives the same bytes.

What the format leaves open is the order of additions. So rows that are rotated have two entries that are not 0, powers of two:
``x @ R`` is then one addition. And rows are drawn again until no norm, root mean square or nearest centroid is so close to
another that the order of additions could decide.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kvcompile.codec import RowFormat, RowTables, quantize_rows
from kvcompile.export.onnx.layer import Half, Layer
from kvcompile.export.onnx.oracle import Arrays, answer, store, to_bits

SINK, RECENT = 5, 10
MARGIN = 2.0**-20
"""Relative distance that a rounded sum keeps from a tie; far above the error of a float32 sum, far below a step of BF16."""


def layer_cases(layer: Layer, seed: int = 0) -> dict[str, Arrays]:
    """Inputs for every model of a layer, by its name."""
    draw = Draw(layer, seed)
    x_key, x_value = draw.page_rows("key"), draw.page_rows("value")
    k, v = to_bits(store(layer, "key", x_key)), to_bits(store(layer, "value", x_value))
    pages = answer("encode_page", layer, {"k": k, "v": v})["pages"]
    cache = draw.cache(pages)
    cases: dict[str, Arrays] = {
        "rotate_query": {"q": draw.normal(2, layer.num_heads, 3).numpy()},
        "store_key": {"x": x_key[:, :, :7].numpy()},
        "store_value": {"x": x_value[:, :, :7].numpy()},
        "encode_key": {"x": x_key.numpy()},
        "encode_value": {"x": x_value.numpy()},
        "encode_page": {"k": k, "v": v},
        "decode_page": {"pages": pages},
        "attend": {"q": draw.normal(len(cache["num_tokens"]), layer.num_heads).numpy(), **cache},
    }
    cases["step"] = {**cases["attend"]}
    for half, name in (("key", "k"), ("value", "v")):
        cases["step"][name] = draw.rows("key" if half == "key" else "value", len(cache["num_tokens"]), 1)[
            :, :, 0
        ].numpy()
    correction = layer.correction()
    if correction is not None:
        features = correction.key_KDF.shape[-1]
        state_s = draw.normal(layer.num_kv_heads, features).numpy()
        state_p = draw.normal(layer.num_kv_heads, features)[..., 0].abs().numpy() * 8
        cases["absorb"] = {"k": k, "pages": pages, "state_s": state_s, "state_p": state_p}
        batch = len(cache["num_tokens"])
        cases["step"] |= {"state_s": np.stack([state_s] * batch), "state_p": np.stack([state_p] * batch)}
    return cases


def packing_cases(bits: int) -> dict[str, Arrays]:
    """Every byte, and the codes in it."""
    packed = np.arange(256, dtype=np.uint8).reshape(1, 2, 4, 32)
    codes = np.random.default_rng(bits).integers(0, 2**bits, (1, 2, 3, 80), dtype=np.uint8)
    return {f"pack_{bits}": {"codes": codes}, f"unpack_{bits}": {"bytes": packed}}


class Draw:
    """Random rows and caches of a layer."""

    def __init__(self, layer: Layer, seed: int):
        self.layer, self.generator = layer, torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Normal entries ``[*shape, D]`` float32."""
        return torch.randn(*shape, self.layer.fmt.head_dim, generator=self.generator)

    def rows(self, half: Half, blocks: int, tokens: int) -> Tensor:
        """Rows of the model ``[N, K, T, D]`` float32 whose stored form does not depend on the order of additions."""
        dim, shape = self.layer.fmt.head_dim, (blocks, self.layer.num_kv_heads, tokens)
        if f"{half}.rotation" not in self.layer.tensors:
            return self.normal(*shape) * torch.linspace(0.25, 3, dim)
        places = torch.rand(*shape, dim, generator=self.generator).topk(2, dim=-1).indices
        sizes = 2.0 ** torch.randint(0, 4, (*shape, 2), generator=self.generator)
        signs = torch.randint(0, 2, (*shape, 2), generator=self.generator) * 2 - 1
        return torch.zeros(*shape, dim).scatter_(-1, places, sizes * signs)

    def page_rows(self, half: Half, blocks: int = 2) -> Tensor:
        """Rows of whole pages whose codes do not depend on the order of additions, ties in other roundings among them."""
        layer, tables, tokens = self.layer, self.layer.tables(), self.layer.fmt.tokens
        x, channels = self.rows(half, blocks, tokens), torch.arange(layer.fmt.head_dim)
        x[:, :, 0] = 0
        if f"{half}.rotation" not in layer.tensors:
            x[:, :, 1] = channels % 7 - 3.0  # codes half way between two
            x[:, :, 2] = 1 + channels % 8 / 256  # half way between two BF16 numbers
        for _ in range(100):
            stored = store(layer, half, x).float()
            clear = settled(stored, layer.row(half), tables.key if half == "key" else tables.value)
            if clear.all():
                return x
            x = torch.where(clear[..., None], x, self.rows(half, blocks, tokens))
        raise AssertionError(f"no rows of {half}s whose norms and centroids are clear")

    def cache(self, pages_NKX: np.ndarray) -> Arrays:
        """Four rows: empty, within the sink, no page yet, and every page; the pool is larger and out of order."""
        layer, tokens = self.layer, self.layer.fmt.tokens
        ring = -(-(RECENT + tokens) // tokens) * tokens
        count = len(pages_NKX)
        table = np.full((4, count + 1), 2**30, np.int32)
        table[3, :count] = np.arange(count)[::-1] + 1
        pool = np.concatenate([np.full_like(pages_NKX[:1], 255), pages_NKX, pages_NKX[:1]])
        lengths = [0, SINK - 2, SINK + RECENT + 3, SINK + count * tokens + RECENT + 27]
        cache = {
            "pages": pool,
            "table": table,
            "num_pages": np.array([0, 0, 0, count], np.int32),
            "num_tokens": np.array(lengths, np.int32),
        }
        for name in ("sink_k", "sink_v", "ring_k", "ring_v"):
            slots = SINK if name.startswith("sink") else ring
            cache[name] = to_bits(self.normal(4, layer.num_kv_heads, slots))
        return cache


def settled(rows_NKTD: Tensor, fmt: RowFormat, tables: RowTables) -> Tensor:
    """Which stored rows, bool ``[N, K, T]``, have no rounded sum within the margin of a tie when they are coded."""
    low, high = (quantize_rows(rows_NKTD * (1 + sign * MARGIN), fmt, tables) for sign in (-1, 1))
    clear_NKT = torch.ones(rows_NKTD.shape[:-1], dtype=torch.bool)
    if low.norm is not None and high.norm is not None:
        clear_NKT &= low.norm == high.norm
    if fmt.zero_point == "none":
        clear_NKT &= (low.scale == high.scale).all(-1)
    if tables.centroids is not None:
        norm = quantize_rows(rows_NKTD, fmt, tables).norm
        x = rows_NKTD.double() if norm is None else rows_NKTD.double() / norm.double()[..., None]
        scores = x @ tables.centroids.double().mT - tables.centroids.double().square().sum(-1)[:, None] / 2
        best = scores.topk(2, dim=-1).values
        clear_NKT &= best[..., 0] - best[..., 1] > 32 * MARGIN * scores.abs().amax(-1)
    return clear_NKT


def with_answers(layer: Layer, cases: Mapping[str, Arrays]) -> dict[str, tuple[Arrays, Arrays]]:
    """Inputs and outputs by model."""
    return {model: (inputs, answer(model, layer, inputs)) for model, inputs in cases.items()}
