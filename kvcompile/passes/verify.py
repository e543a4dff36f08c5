"""Pass `verify`: before anything is written, show that the planned edits leave the model as it was."""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from kvcompile.calibration import OBSERVER, read_corpus, tokenize_corpus
from kvcompile.checkpoint import edited_dtype
from kvcompile.models import load_tokenizer
from kvcompile.models.agreement import check_logits, check_projections, compare_logits, logits_of, projections
from kvcompile.models.forwards import Forward
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
        source = context.models.pop("source", None) or context.placement.open_model(
            ir.checkpoint, ir.layers(), OBSERVER
        )
        corpus = read_corpus(None)
        ids = tokenize_corpus(corpus, load_tokenizer(ir.checkpoint.path), VERIFY_TOKENS, VERIFY_TOKENS)[0]
        ids = ids[: ir.layers().max_positions]
        edits, errors = _Edits(ir), []

        def entering(forward: int, layer: int, module: nn.Module) -> None:
            if forward == 1:
                errors.append(edits.apply(layer, module))

        forward = Forward(partial(logits_of, source.model, ids), len(ids))
        before, after = source.run([forward, forward], "verify", context.track, entering)
        found = compare_logits(before, after)
        dtypes = {edited_dtype(ir.checkpoint, fold.tensor) for fold in ir.folds}
        check_logits(found, dtypes, ir.checkpoint.path)
        summary = {"fold_projection_error": max(errors), "fold_logit_error": found.relative_error, "fold_kl": found.kl}
        return PassResult(replace(ir, summary={**ir.summary, **summary}), modified=True)

    def ensures(self, ir: IR) -> str | None:
        """The measured numbers are there."""
        return None if not ir.folds or "fold_kl" in ir.summary else "the fold was not measured"


class _Edits:
    """The planned edits of weights, layer by layer."""

    def __init__(self, ir: IR):
        self._ir, self._edits = ir, fold_edits(ir)
        folded = {fold.layer for fold in ir.folds}
        self._layers = {layer.index: layer for layer in ir.layers().compiled if layer.index in folded}

    def apply(self, index: int, module: nn.Module) -> float:
        """Put the edited tensors into the module of a layer, probing them; the error of its projections."""
        if index not in self._layers:
            return 0.0
        layer = self._layers[index]
        source = projections(self._ir.checkpoint, layer)
        edited = {
            name: self._edits[name](tensor).to(edited_dtype(self._ir.checkpoint, name))
            for name, tensor in source.items()
        }
        error = check_projections(layer, source, edited)
        with torch.no_grad():
            # Above the layer a checkpoint may name things otherwise than the model does.
            for name, tensor in edited.items():
                module.get_parameter(name.removeprefix(f"{layer.prefix}.")).copy_(tensor)
        return error
