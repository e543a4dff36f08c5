"""Caches of a scheme with random numbers where calibrated ones would be: what speed and memory can be measured on.

Shapes: B batch rows, K KV heads, G query heads per KV head, H = K G, D head_dim, P pages, X page bytes.

Layouts, launches and sizes are those of a real conversion; what such a cache attends to means nothing.
"""

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcompile.artifact import row_record
from kvcompile.codec import NO_TABLES, PageFormat, PageTables, RowTables, encode_pages, feedback_factor
from kvcompile.codec.correction import Correction
from kvcompile.errors import KvCompileError
from kvcompile.models import AttentionLayer
from kvcompile.passes.inventory import check_fit
from kvcompile.runtime.backend import choose_backend
from kvcompile.runtime.cache import PackedCache, PackedLayer
from kvcompile.runtime.plan import Geometry, LayerPlan, Storage
from kvcompile.runtime.store import PackedStore
from kvcompile.scheme import Scheme
from kvcompile.scheme.model import Identity, LinearCorrection, QuantileClip, RowCodec

_CLIP = 0.96
"""Stands for a calibrated clip ratio."""
_EXAMPLES = 16
"""Pages that are really encoded, to take their metadata from."""


@dataclass(frozen=True)
class Shape:
    """The attention of a model: its layers, query and KV heads, and channels of a head."""

    layers: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    def __post_init__(self) -> None:
        if min(self.layers, self.heads, self.kv_heads, self.head_dim) < 1:
            raise KvCompileError(f"a shape has at least one of everything: {self}")
        if self.heads % self.kv_heads:
            raise KvCompileError(f"{self.heads} query heads cannot share {self.kv_heads} KV heads; choose a multiple")


def page_format(scheme: Scheme, head_dim: int) -> PageFormat:
    """The byte format of layer 0's pages; a clip ratio that would be calibrated is 0.96."""
    key, value = (
        row_record(0, half, row, head_dim, _clip(row), folded=False).row_format(head_dim)
        for half, row in scheme.layer(0).rows()
    )
    return PageFormat(key, value, scheme.layer(0).window.block)


def random_plan(scheme: Scheme, shape: Shape, device: torch.device, seed: int = 0) -> LayerPlan:
    """What the runtime would do to layer 0 of a model converted with `scheme`. Raises SchemeError where it does not fit."""
    check_fit(scheme, AttentionLayer(0, "", shape.heads, shape.kv_heads, shape.head_dim, "the shape", "", "", None))
    generator = torch.Generator().manual_seed(seed)
    layer, dim = scheme.layer(0), shape.head_dim

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device)

    def rotation(row: RowCodec) -> Tensor | None:
        return None if isinstance(row.rotation, Identity) else torch.linalg.qr(normal(shape.kv_heads, dim, dim)).Q

    def tables(row: RowCodec) -> RowTables:
        if row.quantizer.rounding != "error_feedback" and not row.centroids:
            return NO_TABLES
        samples = normal(shape.kv_heads, 4 * dim, dim).double().cumsum(-1)
        feedback = feedback_factor(samples.mT @ samples, damping=0.2)
        return RowTables(
            feedback if row.quantizer.rounding == "error_feedback" else None,
            normal(shape.kv_heads, row.centroids, dim) if row.centroids else None,
        )

    correction = None
    if isinstance(layer.correction, LinearCorrection):
        features, relative = layer.correction.features, layer.correction.form == "relative"
        correction = Correction(
            normal(shape.heads, dim, features),
            normal(shape.kv_heads, dim, features),
            torch.full((shape.heads,), 0.01, device=device),
            normal(shape.kv_heads, dim, features) if relative else None,
        )
    key_rotation = rotation(layer.key)
    balanced = getattr(layer.key.rotation, "balance", 0) > 0
    value_rotation = None if layer.folds_values() else rotation(layer.value)
    return LayerPlan(
        Storage(page_format(scheme, dim), PageTables(tables(layer.key), tables(layer.value)), correction),
        key_rotation=key_rotation,
        query_rotation=rotation(layer.key) if balanced else key_rotation,
        value_rotation=value_rotation,
        output_rotation=None if value_rotation is None else value_rotation.mT.contiguous(),
        key_mean=normal(shape.kv_heads, dim) if layer.key.center else None,
        value_mean=normal(shape.kv_heads, dim) if layer.value.center else None,
    )


def geometry_of(scheme: Scheme, shape: Shape) -> Geometry:
    """Windows and pages of a layer."""
    window, fmt = scheme.layer(0).window, page_format(scheme, shape.head_dim)
    return Geometry(shape.kv_heads, shape.head_dim, window.sink, window.recent, fmt.page_bytes, fmt.tokens)


def random_cache(scheme: Scheme, shape: Shape, device: torch.device, backend: str | None = None) -> PackedCache:
    """An empty cache for a model of this shape, every layer packed as `scheme` packs layer 0."""
    plans = [random_plan(scheme, shape, device, seed) for seed in range(shape.layers)]
    chosen = choose_backend(backend, device, [plan.storage.fmt for plan in plans])
    store = PackedStore(geometry_of(scheme, shape), [plan.storage for plan in plans], chosen, device)
    return PackedCache([PackedLayer(plan, store, position, chosen) for position, plan in enumerate(plans)])


@torch.no_grad()
def fill(cache: PackedCache, batch: int, tokens: int, room: int = 0) -> None:
    """Leave an empty cache as a prefill of `tokens` tokens in every row would: random pages, scattered over the pool.

    `room` tokens per row will find pages in the pool. Nothing is shared between rows.
    """
    for store in cache.stores:
        geometry, pool = store.geometry, store.pool
        pool.grow(batch * geometry.full_pages(tokens + room))
        random.Random(0).shuffle(pool.free)
        store.begin(None, batch, tokens)
        for position, storage in enumerate(store.layers):
            fill_pages(pool.pages_LPKX[position], storage)
        for window in store.windows.values():
            window.normal_()
        store.appended(len(store.layers))
    for layer in cache.layers:
        assert isinstance(layer, PackedLayer)
        layer.columns += tokens
        layer.steps += 1


def fill_pages(pages_PKX: Tensor, storage: Storage) -> None:
    """Random codes, with the metadata of pages that were encoded from normal rows."""
    fmt, num_heads = storage.fmt, pages_PKX.shape[1]
    k, v = (
        torch.randn(_EXAMPLES, num_heads, fmt.tokens, fmt.head_dim, device=pages_PKX.device).bfloat16() for _ in "kv"
    )
    nearest = PageFormat(replace(fmt.key, rounding="nearest"), replace(fmt.value, rounding="nearest"), fmt.tokens)
    examples = encode_pages(k, v, nearest, storage.tables)  # metadata are the same, whatever the rounding
    codes = fmt.sections["key_meta"][0]
    for part in pages_PKX.split(4096):
        part[..., codes:] = examples[torch.randint(_EXAMPLES, (len(part),), device=part.device), :, codes:]
        part[..., :codes] = torch.randint(256, (*part.shape[:2], codes), dtype=torch.uint8, device=part.device)


def _clip(row: RowCodec) -> float:
    if not isinstance(row.clip, QuantileClip):
        return 1.0
    return _CLIP if row.clip.ratio == "calibrated" else row.clip.ratio
