"""Small checkpoints with pre-quantized weights, as the tools that make them save them, and their plain twins.

A twin holds as float32 what the codes of the other stand for: an oracle that owes nothing to kvcompile.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.families import save_family

QUANTIZED = re.compile(r"(?<!visual)\.layers\.\d+\..*(proj|dense)\.weight$")
"""The linear layers of decoders, which all of these formats quantize."""
BLOCK = 32
"""Real checkpoints have blocks of 128; the models here are smaller."""
SCHEMES: dict[str, dict[str, Any]] = {
    "channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [BLOCK, BLOCK]},
    "int8": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "int4": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
}
"""Weights in compressed-tensors, by a short name."""


def save_fp8(
    path: Path, family: str = "qwen3", dtype: torch.dtype = torch.bfloat16, shards: str = "10GB", **config: object
) -> Path:
    """As DeepSeek and Qwen publish FP8: e4m3 codes in blocks beside `weight_scale_inv`; `config` is more of its config."""
    save_family(family, path, dtype, shards)

    def codes(name: str, w_NM: Tensor) -> dict[str, Tensor]:
        rows, columns = (-(-size // BLOCK) for size in w_NM.shape)
        scale_RC = torch.empty(rows, columns)
        spread_NM = torch.empty(w_NM.shape)
        for r in range(rows):
            for c in range(columns):
                block = (slice(r * BLOCK, (r + 1) * BLOCK), slice(c * BLOCK, (c + 1) * BLOCK))
                scale_RC[r, c] = spread_NM[block] = w_NM[block].float().abs().max() / 448
        return {name: (w_NM.float() / spread_NM).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale_RC}

    _rewrite(path, codes)
    settings = {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    _configure(path, {"quant_method": "fp8", **settings, **config})
    return path


def save_compressed(
    path: Path, scheme: str, dtype: torch.dtype = torch.bfloat16, shards: str = "10GB", activations: bool = False
) -> Path:
    """As llm-compressor saves it, by the library of compressed-tensors: one of `SCHEMES`, weights rounded to nearest."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from transformers import AutoModelForCausalLM

    save_family("qwen3", path, dtype)
    model = AutoModelForCausalLM.from_pretrained(path)
    group: dict[str, Any] = {"targets": ["Linear"], "weights": {**SCHEMES[scheme], "symmetric": True}}
    if activations:
        kind = SCHEMES[scheme]["type"]
        group["input_activations"] = {
            "num_bits": 8,
            "type": kind,
            "strategy": "token",
            "dynamic": True,
            "symmetric": True,
        }
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"]))
    for module in model.modules():
        if (scale := getattr(module, "weight_scale", None)) is not None:
            rows, columns = scale.shape if scale.ndim == 2 else (1, 1)
            blocks = module.weight.data.float().reshape(rows, -1, columns, module.weight.shape[1] // columns)
            largest = {"int8": 127, "int4": 7}.get(scheme, 448)
            scale.data.copy_((blocks.abs().amax((1, 3)) / largest).reshape(scale.shape))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    (path / "model.safetensors").unlink()
    model.save_pretrained(path, max_shard_size=shards)
    compressor.update_config(path)
    return path


def save_packed(path: Path, method: str) -> Path:
    """The names, shapes and dtypes of GPTQ, AWQ and bitsandbytes; their libraries are not at hand, so codes are zeros."""
    save_family("qwen3", path, torch.float16)
    settings: dict[str, Any] = {"gptq": {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}}.get(method, {})
    settings |= {"awq": {"bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}}.get(method, {})
    settings |= {"bitsandbytes": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}.get(method, {})

    def codes(name: str, w_NM: Tensor) -> dict[str, Tensor]:
        (rows, columns), module = w_NM.shape, name.removesuffix(".weight")
        if method == "bitsandbytes":
            state = "bitsandbytes__nf4"
            return {
                name: torch.zeros(rows * columns // 2, 1, dtype=torch.uint8),
                f"{name}.absmax": torch.ones(rows * columns // 64),
                f"{name}.quant_state.{state}": torch.zeros(8, dtype=torch.uint8),
            }
        shape = (columns // 8, rows) if method == "gptq" else (columns, rows // 8)
        return {
            f"{module}.qweight": torch.zeros(shape, dtype=torch.int32),
            f"{module}.qzeros": torch.zeros(columns // 32, rows // 8, dtype=torch.int32),
            f"{module}.scales": torch.ones(columns // 32, rows, dtype=torch.float16),
        }

    _rewrite(path, codes)
    _configure(path, {"quant_method": method, **settings})
    return path


def save_mxfp4(path: Path) -> Path:
    """As gpt-oss is published: experts in blocks of 32 FP4 codes with power-of-two scales, attention in bfloat16."""
    save_family("gpt_oss", path, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(118, 122, shape, dtype=torch.uint8, generator=generator)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    spared = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    _configure(path, {"quant_method": "mxfp4", "modules_to_not_convert": spared})
    return path


def save_twin(source: Path, path: Path) -> Path:
    """The checkpoint at `source` (codes with scales) as plain float32."""
    shutil.copytree(source, path)
    stored = {name: tensor for shard in path.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    for shard in path.glob("*.safetensors"):
        tensors = {}
        for name, tensor in load_file(shard).items():
            scale = next((stored[x] for x in (f"{name}_scale", f"{name}_scale_inv") if x in stored), None)
            if scale is not None:
                rows, columns = scale.shape if scale.ndim == 2 else (1, 1)
                repeats = torch.ones(-(-tensor.shape[0] // rows), -(-tensor.shape[1] // columns))
                tensors[name] = tensor.float() * torch.kron(scale.float().reshape(rows, columns), repeats)
            elif "_scale" not in name:
                tensors[name] = tensor.float()
        save_file(tensors, shard, metadata={"format": "pt"})
    _configure(path, None, dtype="float32")
    index = path / "model.safetensors.index.json"
    if index.exists():
        document = json.loads(index.read_text())
        document["weight_map"] = {name: file for name, file in document["weight_map"].items() if "_scale" not in name}
        index.write_text(json.dumps(document))
    return path


def _rewrite(path: Path, codes: Any) -> None:
    """Replace every quantized weight by what `codes` makes of it; where there is an index, scales lie in a shard of their own."""
    weight_map: dict[str, str] = {}
    scales: dict[str, Tensor] = {}
    index = path / "model.safetensors.index.json"
    for shard in sorted(path.glob("*.safetensors")):
        tensors: dict[str, Tensor] = {}
        for name, tensor in load_file(shard).items():
            tensors |= codes(name, tensor) if QUANTIZED.search(name) else {name: tensor}
        if index.exists():
            scales |= {name: tensors.pop(name) for name in list(tensors) if "_scale" in name}
        save_file(tensors, shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard.name)
    if index.exists():
        save_file(scales, path / "scales.safetensors", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(scales, "scales.safetensors")
        index.write_text(json.dumps({"metadata": {"total_size": 0, "kept": "yes"}, "weight_map": weight_map}))


def _configure(path: Path, quantization: dict[str, Any] | None, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    config.pop("quantization_config", None)
    if quantization is not None:
        config["quantization_config"] = quantization
    (path / "config.json").write_text(json.dumps(config))
