"""The converted directory: its manifest, its sidecar, and how they are read."""

from kvcompile.artifact.artifact import Artifact, open_artifact, orthogonality_error
from kvcompile.artifact.manifest import (
    MANIFEST_NAME,
    SIDECAR_NAME,
    CalibrationRecord,
    LayerRecord,
    Manifest,
    Producer,
    RowRecord,
    Sidecar,
    Source,
    Weights,
    manifest_schema,
    read_manifest,
)

__all__ = [
    "MANIFEST_NAME",
    "SIDECAR_NAME",
    "Artifact",
    "CalibrationRecord",
    "LayerRecord",
    "Manifest",
    "Producer",
    "RowRecord",
    "Sidecar",
    "Source",
    "Weights",
    "manifest_schema",
    "open_artifact",
    "orthogonality_error",
    "read_manifest",
]
