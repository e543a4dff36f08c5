"""The converted directory: its manifest, its sidecar, and how they are read."""

from kvcompile.artifact.artifact import Artifact, inverse_error, open_artifact
from kvcompile.artifact.manifest import (
    MANIFEST_NAME,
    SIDECAR_NAME,
    CalibrationRecord,
    CorrectionRecord,
    LayerRecord,
    Manifest,
    Producer,
    RotationImport,
    RowRecord,
    Sidecar,
    Source,
    Weights,
    correction_record,
    manifest_schema,
    read_manifest,
    row_record,
)

__all__ = [
    "MANIFEST_NAME",
    "SIDECAR_NAME",
    "Artifact",
    "CalibrationRecord",
    "CorrectionRecord",
    "LayerRecord",
    "Manifest",
    "Producer",
    "RotationImport",
    "RowRecord",
    "Sidecar",
    "Source",
    "Weights",
    "correction_record",
    "inverse_error",
    "manifest_schema",
    "open_artifact",
    "read_manifest",
    "row_record",
]
