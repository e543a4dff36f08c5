"""What is special about each model family, declared: tensor names, and which layers attend to everything."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]


def _listed_kind(config: Config, index: int) -> str:
    """The kind that `layer_types` lists; without the list every layer has full attention."""
    types = config.get("layer_types")
    return str(types[index]) if types else "full_attention"


def _mistral_kind(config: Config, index: int) -> str:
    """Mistral: a window, where there is one, holds for all layers."""
    return "sliding_attention" if config.get("sliding_window") is not None else "full_attention"


def _qwen_kind(config: Config, index: int) -> str:
    """Qwen2 and Qwen3: `layer_types`, or in older configs the layers from `max_window_layers` on."""
    if config.get("layer_types"):
        return _listed_kind(config, index)
    windowed = config.get("use_sliding_window") and config.get("sliding_window") is not None
    return "sliding_attention" if windowed and index >= config.get("max_window_layers", 0) else "full_attention"


@dataclass(frozen=True)
class Family:
    """Where a family keeps its attention projections. RoPE and QK-norm need no mention: q and k are taken after both."""

    layer_prefix: str = "model.layers.{}"
    q_proj: str = "self_attn.q_proj"
    k_proj: str = "self_attn.k_proj"
    v_proj: str = "self_attn.v_proj"
    o_proj: str = "self_attn.o_proj"
    layer_kind: Callable[[Config, int], str] = _listed_kind


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(layer_kind=_mistral_kind),
    "qwen2": Family(layer_kind=_qwen_kind),
    "qwen3": Family(layer_kind=_qwen_kind),
}

_MLA = "multi-head latent attention caches a compressed latent, not keys and values"
_ENCODER = "encoder-decoder models have a cross-attention cache"
_FUSED = "q, k and v are one fused matrix, which this version does not split"

REFUSED: dict[str, str] = {
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "kimi_k2": _MLA,
    "t5": _ENCODER,
    "mt5": _ENCODER,
    "bart": _ENCODER,
    "whisper": _ENCODER,
    "phi3": _FUSED,
    "gpt2": _FUSED,
    "gpt_neox": _FUSED,
    "falcon": _FUSED,
}
