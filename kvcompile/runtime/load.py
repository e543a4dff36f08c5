"""Loading a converted directory: a transformers model that generates from a packed cache by itself."""

import types
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvcompile.artifact import Artifact, LayerRecord, Manifest, open_artifact
from kvcompile.checkpoint import Checkpoint
from kvcompile.codec import PageTables, RowTables
from kvcompile.codec.correction import Correction
from kvcompile.errors import CacheError
from kvcompile.models import load_model, load_tokenizer
from kvcompile.runtime.backend import Backend, choose_backend
from kvcompile.runtime.cache import ATTENTION, PackedCache, PackedLayer
from kvcompile.runtime.graph import can_capture, replayed_steps
from kvcompile.runtime.norms import fuse_norms
from kvcompile.runtime.plan import Capacity, Geometry, LayerPlan, Storage
from kvcompile.runtime.store import PackedStore

_RESERVED = 4096
"""Most new tokens per row that generation makes room for in advance; beyond them the page pool grows."""


@dataclass(frozen=True)
class CompiledCache:
    """What a loaded model carries (as ``model.kvcompile``) to make its caches."""

    manifest: Manifest
    backend: Backend
    device: torch.device
    plans: dict[int, LayerPlan]


def load(
    directory: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str = "auto",
    backend: str | None = None,
    source: str | Path | None = None,
    check: bool = True,
) -> tuple[PreTrainedModel, Any]:
    """The model and tokenizer of a converted directory; ``model.generate`` uses a packed cache by itself.

    `backend` is codec, cpu or triton (default: the fastest for the device). `source` says where an overlay's weights are.
    `check` compares the projections with the manifest's digests, so that a sidecar never meets foreign weights.
    Raises ArtifactError or CheckpointError for a directory that cannot be used.
    """
    artifact = open_artifact(directory, source)
    Checkpoint(artifact.weights_path)  # whole, and in safetensors
    if check:
        artifact.check_projections()
    model = load_model(artifact.weights_path, ATTENTION, device, dtype)
    attach(model, artifact, backend)
    if model.device.type == "cuda":
        fuse_norms(model)
    return model, load_tokenizer(artifact.weights_path)


def attach(model: PreTrainedModel, artifact: Artifact, backend: str | None = None) -> None:
    """Make `model` (loaded with ``attn_implementation="kvcompile"``) generate with packed caches of `artifact`."""
    device = torch.device(model.device)
    plans = {layer.index: _plan(artifact, layer, device) for layer in artifact.manifest.compiled}
    compiled: Any = model
    compiled.kvcompile = CompiledCache(
        artifact.manifest, choose_backend(backend, device, [p.storage.fmt for p in plans.values()]), device, plans
    )
    compiled.generate = types.MethodType(_generate, model)


def _plan(artifact: Artifact, layer: LayerRecord, device: torch.device) -> LayerPlan:
    """What the manifest says about a layer, with its tensors on the device."""

    def tensor(name: str | None) -> Tensor | None:
        found = artifact.tensor(name)
        return None if found is None else found.float().to(device)

    key, value = layer.key, layer.value
    assert key is not None
    assert value is not None
    tables = PageTables(*(RowTables(tensor(row.feedback), tensor(row.centroids)) for row in (key, value)))
    correction = None
    if layer.correction is not None:
        maps = layer.correction
        query_HDF, key_KDF, scale_H = tensor(maps.query), tensor(maps.key), tensor(maps.scale)
        assert query_HDF is not None
        assert key_KDF is not None
        assert scale_H is not None
        correction = Correction(query_HDF, key_KDF, scale_H, tensor(maps.decoded))
    key_rotation, key_inverse = tensor(key.rotation), tensor(key.inverse)
    value_rotation, value_inverse = (
        tensor(n) if value.apply == "online" else None for n in (value.rotation, value.inverse)
    )
    return LayerPlan(
        Storage(layer.page_format(), tables, correction),
        key_rotation=key_rotation,
        query_rotation=key_rotation if key_inverse is None else key_inverse.mT.contiguous(),
        value_rotation=value_rotation,
        output_rotation=_inverse(value_rotation, value_inverse),
        key_mean=tensor(key.mean),
        value_mean=tensor(value.mean),
    )


def _inverse(r_KDD: Tensor | None, inverse_KDD: Tensor | None) -> Tensor | None:
    """The inverse of a rotation: as stored, or the transpose of an orthogonal one."""
    return inverse_KDD if r_KDD is None or inverse_KDD is not None else r_KDD.mT.contiguous()


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`generate` of the model's class, with a packed cache unless the call brings a cache or wants none.

    On CUDA its steps of one token are replays of a CUDA graph, where they can be.
    """
    config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None) or self.generation_config
    names = ("use_cache", "cache_implementation", "num_beams", "max_new_tokens", "max_length", "custom_generate")
    settings = {name: kwargs.get(name, getattr(config, name, None)) for name in names}
    wants_ours = settings["use_cache"] is not False and settings["cache_implementation"] is None
    if wants_ours and kwargs.get("past_key_values") is None:
        kwargs["past_key_values"] = new_cache(self)
    cache, prompt = kwargs.get("past_key_values"), _prompt_columns(args, kwargs)
    selects_rows = settings["num_beams"] not in (None, 1) or settings["custom_generate"] is not None
    steps: AbstractContextManager[object] = nullcontext()
    if prompt is not None and not selects_rows and can_capture(cache, self):
        new_tokens = settings["max_new_tokens"] or (settings["max_length"] or prompt) - prompt
        cache.reserve(prompt + max(0, min(new_tokens, _RESERVED)))
        steps = replayed_steps(self, cache, prompt)
    with steps:
        return type(self).generate(self, *args, **kwargs)


def _prompt_columns(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Columns of the prompt, those of a cache that is handed over included; None where it does not consist of token ids."""
    ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
    if not isinstance(ids, Tensor) or ids.ndim != 2 or kwargs.get("inputs_embeds") is not None:
        return None
    mask = kwargs.get("attention_mask")
    return max(ids.shape[1], mask.shape[-1] if isinstance(mask, Tensor) else 0)


def new_cache(
    model: PreTrainedModel,
    *,
    sink: int | None = None,
    recent: int | None = None,
    max_tokens: int | None = None,
) -> PackedCache:
    """An empty packed cache for a model from `load`; `sink` and `recent` override the windows of its scheme.

    With `max_tokens` the first step allocates pages for so many tokens in each of its rows, and never more: a step that
    needs a page when all are taken raises CacheError. Rows share the pool, so one may be longer if others are shorter.

    Raises CacheError for a model that was not loaded by kvcompile.
    """
    compiled = getattr(model, "kvcompile", None)
    if not isinstance(compiled, CompiledCache):
        raise CacheError("this model has no compiled KV cache; load a converted directory with kvcompile.load")
    capacity = Capacity() if max_tokens is None else Capacity(max_tokens, fixed=True)
    groups: dict[Geometry, list[int]] = {}
    for record in compiled.manifest.compiled:
        fmt, window = compiled.plans[record.index].storage.fmt, compiled.manifest.scheme.layer(record.index).window
        geometry = Geometry(
            record.num_key_value_heads,
            record.head_dim,
            window.sink if sink is None else sink,
            window.recent if recent is None else recent,
            fmt.page_bytes,
            fmt.tokens,
        )
        groups.setdefault(geometry, []).append(record.index)
    layers: list[Any] = list(DynamicCache(config=model.config).layers)
    for geometry, indices in groups.items():
        storages = [compiled.plans[i].storage for i in indices]
        store = PackedStore(geometry, storages, compiled.backend, compiled.device, capacity)
        for position, index in enumerate(indices):
            layers[index] = PackedLayer(compiled.plans[index], store, position, compiled.backend)
    return PackedCache(layers)
