"""One small model of every supported family: what `tests/test_families.py` converts, and `docs/models.md` lists."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from kvcompile.models.families import VISION_LANGUAGE
from tests.conftest import EXAMPLE

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
SIDES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
QWEN_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
TOWER = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A family by its `model_type`: how its small config differs from SIZES, what is special, which layers are packed.

    `vision` is the config of the tower around a language model of type `text`. `folds` is False where values are rotated
    online instead.
    """

    title: str
    notes: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    packed: tuple[int, ...] = (0, 1)
    folds: bool = True
    text: str | None = None
    vision: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "llama": Case("Llama", "biases on all projections in this test", {"attention_bias": True}),
    "mistral": Case("Mistral", "", {"head_dim": 32, "sliding_window": None}),
    "qwen2": Case("Qwen2, Qwen2.5", "biases; tied embeddings", {"tie_word_embeddings": True}),
    "qwen3": Case("Qwen3", "QK-norm", {"head_dim": 32}),
    "olmo2": Case("OLMo 2", "QK-norm over all heads"),
    "olmo3": Case("OLMo 3", "QK-norm over all heads; sliding layers", SIDES, (1,)),
    "phi": Case("Phi-1, Phi-2", "biases; partial rotary; W_O is `dense`", {"partial_rotary_factor": 0.5}),
    "phi3": Case("Phi-3, Phi-4", "q, k and v in one matrix", {"sliding_window": None}),
    "glm4": Case("GLM-4", "biases; partial rotary", {"attention_bias": True, "head_dim": 16}),
    "granite": Case("Granite 3", "scaled attention", {"attention_multiplier": 0.4, "tie_word_embeddings": True}),
    "seed_oss": Case("Seed-OSS", "biases", {"head_dim": 16}),
    "cohere2": Case("Command R7B, Command A", "layers without RoPE; sliding layers", SIDES, (1,)),
    "smollm3": Case("SmolLM3", "a layer without RoPE", {"no_rope_layers": [1, 0]}),
    "gemma": Case("Gemma", "multi-query", {"head_dim": 32, "num_key_value_heads": 1}),
    "gemma2": Case(
        "Gemma 2", "soft-capped logits; query scaling; sliding layers",
        {**SIDES, "head_dim": 32, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0}, (1,),
    ),
    "gemma3_text": Case(
        "Gemma 3 1B", "head of 256 channels; QK-norm; query scaling; sliding layers",
        {**SIDES, "head_dim": 256, "query_pre_attn_scalar": 256, "num_key_value_heads": 1}, (1,),
    ),
    "gpt_oss": Case(
        "gpt-oss (BF16 weights)", "attention sinks; biases; sliding layers; experts",
        {**SIDES, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}, (1,),
    ),
    "starcoder2": Case("StarCoder2", "biases; multi-head", {"num_key_value_heads": 4, "sliding_window": None}),
    "mixtral": Case("Mixtral", "experts", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": Case(
        "Qwen1.5-MoE, Qwen2-57B-A14B", "biases; experts",
        {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    ),
    "qwen3_moe": Case("Qwen3 MoE", "QK-norm; experts", {**EXPERTS, "head_dim": 16, "num_experts": 4}),
    "glm4_moe": Case(
        "GLM-4.5 to 4.7", "biases; QK-norm; partial rotary; experts",
        {**EXPERTS, "head_dim": 16, "n_routed_experts": 4, "use_qk_norm": True, "attention_bias": True,
         "first_k_dense_replace": 1},
    ),
    "qwen3_next": Case(
        "Qwen3-Next", "linear-attention layers; gated output, so values are rotated online; experts",
        {**EXPERTS, "head_dim": 16, "num_experts": 4, "shared_expert_intermediate_size": 32,
         "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
         "linear_key_head_dim": 16, "linear_value_head_dim": 16},
        (1,), folds=False,
    ),
    "llava": Case(
        "LLaVA", "vision tower; language model Llama (or Mistral, Qwen2, ...)", text="llama",
        vision={**TOWER, "model_type": "clip_vision_model"},
    ),
    "gemma3": Case(
        "Gemma 3 4B and larger", "vision tower; sliding layers", {**SIDES, "head_dim": 32, "query_pre_attn_scalar": 32},
        (1,), text="gemma3_text", vision={**TOWER, "model_type": "siglip_vision_model"},
    ),
    "qwen2_5_vl": Case(
        "Qwen2.5-VL", "vision tower; biases", {"rope_parameters": MROPE}, text="qwen2_5_vl_text",
        vision={**QWEN_TOWER, "fullatt_block_indexes": [0]},
    ),
    "qwen3_vl": Case(
        "Qwen3-VL", "vision tower; QK-norm", {"rope_parameters": {**MROPE, "mrope_interleaved": True}, "head_dim": 16},
        text="qwen3_vl_text", vision={**QWEN_TOWER, "deepstack_visual_indexes": [0]},
    ),
}  # fmt: skip


def small_config(model_type: str) -> Any:
    """The transformers config of a case."""
    case = CASES[model_type]
    sizes = {**SIZES, **case.config}
    if case.text is None:
        return AutoConfig.for_model(model_type, **sizes)
    extra = {"gemma3": {"mm_tokens_per_image": 4}, "llava": {"image_token_index": 7}}.get(model_type, {})
    text = {**sizes, "model_type": case.text}
    return AutoConfig.for_model(model_type, text_config=text, vision_config=dict(case.vision), **extra)


def save_family(model_type: str, path: Path, dtype: torch.dtype = torch.float32, shards: str = "10GB") -> Path:
    """A model of the case with random weights, saved as transformers saves it, with the example's tokenizer.

    Attention is scaled so that it is far from uniform and makes a large part of the result: what bends it shows.
    """
    torch.manual_seed(0)
    auto: Any = AutoModelForImageTextToText if model_type in VISION_LANGUAGE else AutoModelForCausalLM
    model = auto.from_config(small_config(model_type))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * (0.5 if name.endswith("bias") else 0.1))
            if "attn." in name and name.endswith(("proj.weight", "dense.weight")):
                parameter.mul_(6)
            if name.endswith("sinks"):
                parameter.add_(5)
    model.to(dtype).save_pretrained(path, max_shard_size=shards)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((EXAMPLE / name).read_bytes())
    return path
