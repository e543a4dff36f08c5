"""Pass `emit`: write weights, sidecar, manifest and reports into the staging directory."""

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import torch
import transformers
from safetensors.torch import save_file

from kvcompile.artifact import (
    MANIFEST_NAME,
    SIDECAR_NAME,
    LayerRecord,
    License,
    Manifest,
    Producer,
    RowRecord,
    Sidecar,
    Source,
    Weights,
    correction_record,
    row_record,
)
from kvcompile.artifact.report import model_card, report_html
from kvcompile.checkpoint import dropped_tensors, file_digest, tensor_bytes, write_companions, write_patched
from kvcompile.models import AttentionLayer
from kvcompile.passes.base import Context, PassResult
from kvcompile.passes.center import CenterPass
from kvcompile.passes.centroids import CentroidsPass
from kvcompile.passes.clip import ClipPass
from kvcompile.passes.correction import CorrectionPass
from kvcompile.passes.feedback import FeedbackPass
from kvcompile.passes.fold import fold_edits
from kvcompile.passes.ir import IR
from kvcompile.passes.rotations import RotationsPass
from kvcompile.scheme import RowCodec, bits_per_element
from kvcompile.version import __version__

CONTEXTS = {"4k": 4096, "32k": 32768, "128k": 131072}
"""Context lengths at which bits per element are stated."""


@dataclass(frozen=True)
class EmitPass:
    """Writes the artifact into `context.staging`; whoever runs the pipeline renames that directory at the end.

    1. Fold: shards are copied and patched, companions copied. Overlay: only sidecar and manifest.
    2. No time, host name or output path goes in: two runs with the same inputs give the same bytes.
    3. The manifest is written last.
    """

    name: ClassVar[str] = "emit"
    version: ClassVar[int] = 1
    stored: ClassVar[bool] = False

    def requires(self, ir: IR) -> str | None:
        """What the passes before it ensure, so that no tensor of the scheme is missing."""
        if ir.inventory is None:
            return "the inventory pass must come first"
        for needed in (RotationsPass(), CenterPass(), CentroidsPass(), FeedbackPass(), ClipPass(), CorrectionPass()):
            if needed.ensures(ir):
                return f"the {needed.name} pass must come first"
        return None

    def run(self, ir: IR, context: Context) -> PassResult:
        """Write everything."""
        out = context.staging
        files, projections = self._write_weights(ir, context)
        save_file({name: ir.tensors[name] for name in sorted(ir.tensors)}, out / SIDECAR_NAME)
        (out / SIDECAR_NAME).chmod(0o644)
        mean_bits = {
            label: sum(bits_per_element(ir.scheme.layer(x.index), x.head_dim, tokens) for x in ir.layers().compiled)
            / len(ir.layers().compiled)
            for label, tokens in CONTEXTS.items()
        }
        manifest = Manifest(
            producer=Producer(kvcompile=__version__, torch=torch.__version__, transformers=transformers.__version__),
            source=Source(
                name=ir.checkpoint.path.resolve().name,
                model_type=ir.layers().model_type,
                architecture=ir.layers().architecture,
                license=License(**fields) if (fields := ir.checkpoint.license()) else None,
                path=str(ir.checkpoint.path.resolve()) if ir.weights == "overlay" else None,
            ),
            weights=Weights(mode=ir.weights, files=files, projections=projections),
            scheme=ir.scheme,
            layers=[_layer_record(ir, layer) for layer in ir.layers().layers],
            sidecar=Sidecar(
                sha256=file_digest(out / SIDECAR_NAME),
                shapes={name: list(tensor.shape) for name, tensor in sorted(ir.tensors.items())},
            ),
            calibration=ir.calibration,
            imported_rotations=dict(ir.imported.records) if ir.imported else None,
            bits_per_element=mean_bits,
            metrics=dict(ir.summary),
        )
        (out / "README.md").write_text(model_card(manifest), "utf-8")
        (out / "report.html").write_text(report_html(manifest), "utf-8")
        (out / MANIFEST_NAME).write_text(manifest.to_json(), "utf-8")
        return PassResult(ir, modified=False)

    def ensures(self, ir: IR) -> str | None:
        """Nothing about the IR: the files are checked by `kvcompile verify`."""
        return None

    @staticmethod
    def _write_weights(ir: IR, context: Context) -> tuple[dict[str, str], dict[str, str]]:
        """Write (or for an overlay only read) the weights; digests of files and of projections."""
        source, out = ir.checkpoint, context.staging
        digests: dict[str, str] = {}
        files: dict[str, str] = {}
        edits = fold_edits(ir)
        for shard in context.track(source.shards, "emit", "B", lambda s: s.stat().st_size):
            if ir.weights == "fold":
                digests |= write_patched(source, out, edits, [shard])
            files[shard.name] = file_digest(out / shard.name if ir.weights == "fold" else shard)
        if ir.weights == "fold":
            write_companions(source, out, edits)
        dropped = dropped_tensors(source, edits)
        for layer in ir.layers().compiled:
            for name in layer.stored:
                if name not in digests and name not in dropped:
                    digests[name] = hashlib.sha256(tensor_bytes(source.load(name))).hexdigest()
        return files, dict(sorted(digests.items()))


def _layer_record(ir: IR, layer: AttentionLayer) -> LayerRecord:
    scheme = ir.scheme.layer(layer.index)
    folded = layer.index in {fold.layer for fold in ir.folds}
    return LayerRecord(
        index=layer.index,
        kind=layer.kind,
        reason=layer.reason,
        num_heads=layer.num_heads,
        num_key_value_heads=layer.num_key_value_heads,
        head_dim=layer.head_dim,
        key=_row_record(ir, layer, "key", scheme.key, folded=False) if layer.compiled else None,
        value=_row_record(ir, layer, "value", scheme.value, folded) if layer.compiled else None,
        page_tokens=scheme.window.block,
        correction=correction_record(layer.index, scheme) if layer.compiled else None,
        metrics={name: round(value, 6) for name, value in ir.metrics.get(layer.index, {}).items()},
    )


def _row_record(ir: IR, layer: AttentionLayer, half: str, row: RowCodec, folded: bool) -> RowRecord:
    ratio = float(ir.tensors[f"layers.{layer.index}.{half}.clip_ratio"])
    return row_record(layer.index, half, row, layer.head_dim, ratio, folded)
