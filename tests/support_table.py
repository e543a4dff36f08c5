"""The table of supported models, made from what is tested: ``python -m tests.support_table > docs/models.md``."""

from collections.abc import Iterable

from kvcompile.models.families import REFUSED
from tests.families import CASES, Case

HEAD = """# Supported models

This page is made by `python -m tests.support_table > docs/models.md` from the declarations in `tests/families.py` and
`kvcompile/models/families.py`; a test checks that it is current.

A model is supported when its `model_type` is in this table. Each line stands for a small model with random weights that
`tests/test_families.py` builds from its transformers config class, saves (in one file or in shards), and converts with the
default scheme:

- **fold**: `W_V` and `W_O` with the rotation folded in give the source's float32 logits, to a relative error of 1e-4; every other
  tensor is the same byte for byte. `online` means that it cannot be folded, and is applied when the cache is written and read.
- **calibrate**: statistics and attention samples of every packed layer are taken from the model's own attention.
- **generate**: the packed cache gives the logits of transformers' eager attention as long as its windows hold all tokens (a first
  prefill to 1e-4, then to the rounding of BF16 windows), and those of the codec when pages are written.
- **overlay**: the same without weights of our own (`--weights overlay`), with the rotation online.

"""
FOOT = """
Layers with a sliding window keep the cache that transformers gives them, which the window bounds already. Layers with linear
attention keep their state. A model none of whose layers has full attention is refused, because nothing would be packed.
`kvcompile inspect` shows what holds for each layer of a checkpoint before any work is done.

In vision-language models only the language model is converted: the tower and the projector are the same byte for byte, and
calibration reads text. Prompts with images run through the packed cache where attention is causal (tested with LLaVA); a prompt
whose images attend in both directions (Gemma 3) is refused.

Soft-capped logits are attended by the codec, in plain torch: no kernel caps logits. Attention sinks cost a kernel nothing: they
are applied to its output by the log of the softmax denominator. The linear correction of `kvlinc-*` is refused with both.

## Weight formats

Only `W_V` and `W_O` of packed layers are ever edited, so what they are stored as decides, not what config.json says of the
rest. `kvcompile inspect` names the format and what becomes of it, before any work. `tests/test_quantized.py` converts and runs:

| weights | `W_V` and `W_O` | what happens |
|---|---|---|
| float32, float16, bfloat16 | the same | folded as they are |
| MXFP4 experts (gpt-oss), and every other method that spares attention | float matrices | folded as they are |
| FP8 (`quant_method` `fp8`): blocks with `weight_scale_inv`, or one scale | codes with scales | folded, stored as floats |
| compressed-tensors with 8-bit codes (`float-`, `int-` or `naive-quantized`) | codes with scales | folded, stored as floats |
| compressed-tensors `pack-quantized` (int4), GPTQ, AWQ, bitsandbytes, anything else | packed | overlay, values rotated online |

**Folded, stored as floats.** Codes are decoded exactly, folded in float64, and stored in the dtype of the model (`dtype` in
config.json, usually bfloat16), because quantizing them once more would cost what the codes cost already. The scales of these
layers go, and the config lists the layers as not quantized (`modules_to_not_convert`, `ignore`); every other tensor is the same
byte for byte. transformers loads the result by itself. Engines that fuse q, k and v want them in one format: vLLM refuses such a
list ("Detected some but not all shards ... are quantized"). For them take an overlay, or convert the unquantized checkpoint.

**Overlay.** Nothing is written but manifest and sidecar, as with `--weights overlay`. A scheme that weighs errors by `W_O` has it
from the loaded model during calibration. Where the method's library is missing, or does not run on the device, a scheme that
needs a forward pass is refused in one sentence before any work. GPTQ, AWQ and bitsandbytes were only tested as far as that:
their libraries were not at hand. A `kv_cache_scheme` is refused, because it would quantize the cache a second time.

**Forward passes.** Calibration and verification dequantize FP8, MXFP4 and compressed-tensors at load; the runtime runs what
transformers runs, quantized activations included. FP8 runs as FP8 on a GPU with the package `kernels`, and dequantized
everywhere else. Needed are `accelerate` for FP8 and MXFP4, and `compressed-tensors`: `pip install 'kvcompile[quantized]'`.
Exports that write a `quantization_config` of their own (`transformers`, `compressed-tensors`) refuse pre-quantized weights.

## Refused by name

| model_type | why |
|---|---|
"""
END = "| any other | there is no description of its attention |\n"


def table(cases: Iterable[tuple[str, Case]]) -> str:
    """The table of what is tested, as Markdown."""
    lines = [
        "| model_type | models | what is special | fold | calibrate | generate | overlay |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, case in cases:
        fold = "yes" if case.folds else "online"
        lines.append(f"| `{name}` | {case.title} | {case.notes} | {fold} | yes | yes | yes |")
    return "\n".join(lines) + "\n"


def document() -> str:
    """The whole page."""
    refused = "".join(f"| `{name}` | {reason} |\n" for name, reason in REFUSED.items())
    return HEAD + table(CASES.items()) + FOOT + refused + END


if __name__ == "__main__":
    print(document(), end="")
