"""What is special about each model family, declared: tensor names, and which layers attend to everything."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]

LAYER_PREFIXES = (
    "model.layers.{}",
    "language_model.model.layers.{}",
    "model.language_model.layers.{}",
)
"""Where decoder layers lie in a checkpoint; in vision-language models it depends on who saved it. The first that is there."""


def _listed_kind(config: Config, index: int) -> str:
    """The kind that `layer_types` lists; without the list a window, where there is one, holds for all layers."""
    types = config.get("layer_types")
    return str(types[index]) if types else _windowed_kind(config, index)


def _windowed_kind(config: Config, index: int) -> str:
    """Families that know no `layer_types`: a window, where there is one, holds for all layers."""
    return "sliding_attention" if config.get("sliding_window") is not None else "full_attention"


@dataclass(frozen=True)
class Family:
    """Where a family keeps its attention projections, by names below the layer.

    What happens to q and k between projection and cache (RoPE on all, some or no channels, QK-norm, scaling) needs no
    mention: both are taken where attention is called. So are biases: `v_proj` has one where the checkpoint has one.

    `qkv_proj` is one matrix with the rows of q, k and v in this order, in place of three. A `gated` attention multiplies its
    output by a gate before W_O, so that W_O cannot undo a rotation; its q_proj holds the gate's rows too.
    """

    q_proj: str = "self_attn.q_proj"
    k_proj: str = "self_attn.k_proj"
    v_proj: str = "self_attn.v_proj"
    qkv_proj: str | None = None
    o_proj: str = "self_attn.o_proj"
    gated: bool = False
    layer_kind: Callable[[Config, int], str] = _listed_kind


FAMILIES: dict[str, Family] = {
    "cohere2": Family(),
    "gemma": Family(),
    "gemma2": Family(),
    "gemma3_text": Family(),
    "glm4": Family(),
    "glm4_moe": Family(),
    "gpt_oss": Family(),
    "granite": Family(),
    "llama": Family(),
    "mistral": Family(layer_kind=_windowed_kind),
    "mixtral": Family(layer_kind=_windowed_kind),
    "olmo2": Family(),
    "olmo3": Family(),
    "phi": Family(o_proj="self_attn.dense"),
    "phi3": Family(qkv_proj="self_attn.qkv_proj", layer_kind=_windowed_kind),
    "qwen2": Family(),
    "qwen2_5_vl_text": Family(),
    "qwen2_moe": Family(),
    "qwen3": Family(),
    "qwen3_moe": Family(layer_kind=_windowed_kind),
    "qwen3_next": Family(gated=True),
    "qwen3_vl_text": Family(),
    "seed_oss": Family(),
    "smollm3": Family(),
    "starcoder2": Family(layer_kind=_windowed_kind),
}
"""By the `model_type` of the language model."""

VISION_LANGUAGE = ("gemma3", "llava", "qwen2_5_vl", "qwen3_vl")
"""Models with a vision tower, whose language model (`text_config`) is one of `FAMILIES`; nothing else of them is touched."""

_MLA = "multi-head latent attention caches a compressed latent, not keys and values"
_ENCODER = "encoder-decoder models have a cross-attention cache"
_FUSED = "q, k and v are one fused matrix whose rows are interleaved, which this version does not split"

REFUSED: dict[str, str] = {
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "glm4_moe_lite": _MLA,
    "kimi_k2": _MLA,
    "minicpm3": _MLA,
    "t5": _ENCODER,
    "mt5": _ENCODER,
    "bart": _ENCODER,
    "whisper": _ENCODER,
    "gpt2": "q, k and v are one fused matrix that is stored transposed, which this version does not split",
    "gpt_neox": _FUSED,
    "falcon": _FUSED,
}


def supported() -> list[str]:
    """Every `model_type` that a checkpoint may have, in order."""
    return sorted([*(name for name in FAMILIES if not name.endswith("vl_text")), *VISION_LANGUAGE])
