"""Pass `verify`: before anything is written, show that the planned edits leave the model as it was."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from kvcompile.calibration import OBSERVER, read_corpus, tokenize_corpus
from kvcompile.checkpoint import edited_dtype
from kvcompile.models import decoder_of, load_model, load_tokenizer
from kvcompile.models.agreement import check_logits, check_projections, compare_logits, logits_of, projections
from kvcompile.passes.base import Context, PassResult
from kvcompile.passes.fold import fold_edits
from kvcompile.passes.ir import IR

VERIFY_TOKENS = 128


@dataclass(frozen=True)
class VerifyPass:
    """Two checks of the fold, as it will be stored.

    1. Per layer, random inputs through W_V and W_O give what they gave before (to the rounding of the stored dtype).
    2. Logits on 128 tokens of the bundled text, computed in float32: relative error at most 1e-4 for float32 checkpoints,
       KL at most 2e-4 nats for 16-bit ones. The model of the calibrate pass is used, with the edited weights put into it.
    """

    name: ClassVar[str] = "verify"
    version: ClassVar[int] = 1
    stored: ClassVar[bool] = False

    def requires(self, ir: IR) -> str | None:
        """An inventory."""
        return None if ir.inventory else "the inventory pass must come first"

    def run(self, ir: IR, context: Context) -> PassResult:
        """Check, and record the largest projection error, the relative logit error and the KL."""
        if not ir.folds:
            return PassResult(ir, modified=False)
        model = context.models.pop("source", None) or load_model(
            ir.checkpoint.path, OBSERVER, context.device, dequantize=True
        )
        corpus = read_corpus(None)
        ids = tokenize_corpus(corpus, load_tokenizer(ir.checkpoint.path), VERIFY_TOKENS, VERIFY_TOKENS)[0]
        ids = ids[: ir.layers().max_positions]
        before = logits_of(model, ids)
        worst = self._apply_and_probe(ir, context, model)
        found = compare_logits(before, logits_of(model, ids))
        dtypes = {edited_dtype(ir.checkpoint, fold.tensor) for fold in ir.folds}
        check_logits(found, dtypes, ir.checkpoint.path)
        summary = {"fold_projection_error": worst, "fold_logit_error": found.relative_error, "fold_kl": found.kl}
        return PassResult(replace(ir, summary={**ir.summary, **summary}), modified=True)

    def ensures(self, ir: IR) -> str | None:
        """The measured numbers are there."""
        return None if not ir.folds or "fold_kl" in ir.summary else "the fold was not measured"

    @staticmethod
    def _apply_and_probe(ir: IR, context: Context, model: PreTrainedModel) -> float:
        """Put the edited tensors into the model, probing each layer; the largest projection error."""
        edits, worst = fold_edits(ir), 0.0
        decoder: Any = decoder_of(model)
        folded = {fold.layer for fold in ir.folds}
        layers = [layer for layer in ir.layers().compiled if layer.index in folded]
        for layer in context.track(layers, "verify", "layer", lambda _: 1):
            source = projections(ir.checkpoint, layer)
            edited = {
                name: edits[name](tensor).to(edited_dtype(ir.checkpoint, name)) for name, tensor in source.items()
            }
            worst = max(worst, check_projections(layer, source, edited))
            with torch.no_grad():
                # Above the layer a checkpoint may name things otherwise than the model does.
                for name, tensor in edited.items():
                    decoder.layers[layer.index].get_parameter(name.removeprefix(f"{layer.prefix}.")).copy_(tensor)
        return worst
