"""The manifest `kvcompile.json`: everything a runtime or an exporter must know about a converted checkpoint.

A reader accepts any manifest of its own major schema version; fields it does not know are ignored there, and a newer
major version is refused. The JSON Schema is published beside this file (`manifest.schema.json`).
"""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvcompile.codec import PageFormat, RowFormat
from kvcompile.document import read_json
from kvcompile.errors import ArtifactError
from kvcompile.scheme import Scheme, group_size
from kvcompile.scheme.model import LENIENT, Half, Identity, LayerScheme, LinearCorrection, RowCodec, TokenScale

MANIFEST_NAME = "kvcompile.json"
SIDECAR_NAME = "kvcompile.safetensors"
SCHEMA_MAJOR, SCHEMA_MINOR = 1, 2


class Record(BaseModel):
    """A part of the manifest: immutable; unknown fields of a newer minor version are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


def _numbers(document: Any) -> Any:
    """A table without the entries that are no numbers: those of another version, and null, as JSON has NaN."""
    if not isinstance(document, dict):
        return document
    return {name: x for name, x in document.items() if isinstance(x, int | float) and not isinstance(x, bool)}


def _halves(document: Any) -> Any:
    return {k: x for k, x in document.items() if k in ("key", "value")} if isinstance(document, dict) else document


Numbers = Annotated[dict[str, float], BeforeValidator(_numbers)]
"""Numbers by name, of which any may be absent."""


class Producer(Record):
    """Versions of the software that wrote the artifact."""

    kvcompile: str
    torch: str
    transformers: str


class License(Record):
    """The licence fields of the source's model card, as far as it has them."""

    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None


class Source(Record):
    """The checkpoint that was converted; `path` is kept only where the artifact needs it (overlay).

    `license` is None where the source's model card says nothing.
    """

    name: str
    model_type: str
    architecture: str
    path: str | None = None
    license: License | None = None


class Weights(Record):
    """The weights that the sidecar belongs to.

    `mode` is fold (W_V and W_O are rotated, files lie beside the manifest) or overlay (the source's weights, unchanged).
    `files` and `projections` are sha256 digests: of whole files, and of every W_V, b_V and W_O of a compiled layer.
    """

    mode: Literal["fold", "overlay"]
    files: dict[str, str]
    projections: dict[str, str]


class Encoding(Record):
    """The byte-level rules, in words; `docs/manifest.md` has the full specification."""

    page_layout: str = (
        "T = page_tokens of the layer: key codes [T][D/n], value codes transposed [D/n][T], key meta, value meta, "
        "key norms bf16 [T], key centroids int16 [T], value centroids int16 [T]; meta are [N][T] by groups of channels, "
        "or with axis channel [T/group_size][D]"
    )
    packing: str = "n = 8/bits codes per byte; byte j = sum_i code[j + i*D/n] << (bits*i)"
    metadata: str = "int32 little endian: bf16 zero_point << 16 | bf16 scale; without zero point bf16 scale"
    dequantize: str = "x = ((code - zero_point) * scale + centroid) * norm; without zero point x = level[code] * scale"
    rounding: str = (
        "scale = bf16((hi - lo) / (2^bits - 1)); zero_point = bf16(0 - lo / scale); "
        "code = rint(clip(x / scale + zero_point, 0, 2^bits - 1)), ties to even"
    )
    error_feedback: str = (
        "channels in order; code of x_i - f_i * delta / 64 with f_i = sum_{j<i} e_j * 64 U_ji, "
        "e_j = clip(rint((x_hat_j - x_j) / delta), -511, 511), delta = 2^(floor(log2(largest scale of the row)) - 6)"
    )
    clip: str = "tau = sort(|row|)[min(int(ratio * D), D - 1)] over the whole rotated head; x = clip(x, -tau, tau)"
    constant_group: str = "a group whose scale is below 1e-30 has scale |lo| (1 if 0), zero_point -lo / scale, codes 0"
    window: str = (
        "the first `sink` and at least the last `recent` tokens stay bf16, rotated; history leaves in whole pages"
    )
    rotation: str = (
        "row vectors: x_rotated = x @ R - mean, R [num_key_value_heads, D, D] float32, then rounded to bf16; queries are "
        "multiplied by the transposed inverse of R (R itself where no inverse is named: R is orthogonal); "
        "the mean of values is added to the attention output"
    )


class RowRecord(Record):
    """What one layer does to its keys or its values; names are of sidecar tensors, None where a step is left out."""

    rotation: str | None
    apply: Literal["online", "folded"]
    clip_ratio: float = Field(gt=0, le=1)
    bits: int
    group_size: int
    axis: Literal["token", "channel"] = "token"
    zero_point: Literal["float", "integer", "none"] = "float"
    rounding: Literal["nearest", "error_feedback"] = "nearest"
    token_scale: Literal["none", "l2", "rsqrt", "max", "mean_abs"] = "none"
    norm_scope: Literal["head", "token"] = "head"
    num_centroids: int = 0
    inverse: str | None = None
    mean: str | None = None
    feedback: str | None = None
    centroids: str | None = None

    def row_format(self, head_dim: int) -> RowFormat:
        """How rows are coded."""
        return RowFormat(
            head_dim, self.bits, self.group_size, self.clip_ratio, self.axis, self.zero_point, self.rounding,
            self.token_scale, self.norm_scope, self.num_centroids,
        )  # fmt: skip

    def tensors(self) -> list[str]:
        """Names of the sidecar tensors that this half needs."""
        return [
            name for name in (self.rotation, self.inverse, self.mean, self.feedback, self.centroids) if name is not None
        ]


class CorrectionRecord(Record):
    """Sidecar tensors of a layer's linear correction, float32.

    `query` ``[num_heads, D, F]``, `key` ``[num_key_value_heads, D, F]``, `scale` ``[num_heads]``, and in the relative form
    `decoded`, shaped like `key`; None is the paper's form.
    """

    query: str
    key: str
    scale: str
    decoded: str | None = None


def row_record(index: int, half: str, row: RowCodec, head_dim: int, clip_ratio: float, folded: bool) -> RowRecord:
    """What a scheme's half comes to in layer `index`, given the calibrated clip ratio."""

    def name(tensor: str, wanted: bool) -> str | None:
        return f"layers.{index}.{half}.{tensor}" if wanted else None

    quantizer, scale = row.quantizer, row.token_scale
    return RowRecord(
        rotation=name("rotation", not isinstance(row.rotation, Identity)),
        apply="folded" if folded else "online",
        clip_ratio=clip_ratio,
        bits=quantizer.bits,
        group_size=group_size(quantizer, head_dim),
        axis=quantizer.axis,
        zero_point=quantizer.zero_point,
        rounding=quantizer.rounding,
        token_scale=scale.kind,
        norm_scope=scale.scope if isinstance(scale, TokenScale) else "head",
        num_centroids=row.centroids,
        inverse=name("inverse", getattr(row.rotation, "balance", 0) > 0),
        mean=name("mean", row.center),
        feedback=name("feedback", quantizer.rounding == "error_feedback"),
        centroids=name("centroids", row.centroids > 0),
    )


def correction_record(index: int, scheme: LayerScheme) -> CorrectionRecord | None:
    """The tensors of a scheme's correction in layer `index`, if it has one."""
    if not isinstance(scheme.correction, LinearCorrection):
        return None
    place = f"layers.{index}.correction"
    relative = scheme.correction.form == "relative"
    return CorrectionRecord(
        query=f"{place}.query",
        key=f"{place}.key",
        scale=f"{place}.scale",
        decoded=f"{place}.decoded" if relative else None,
    )


class LayerRecord(Record):
    """One decoder layer; `key` and `value` are None where the layer keeps its own cache, and `reason` says why."""

    index: int
    kind: str
    reason: str
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    key: RowRecord | None
    value: RowRecord | None
    page_tokens: Literal[64, 128] = 64
    correction: CorrectionRecord | None = None
    metrics: Numbers = {}

    def page_format(self) -> PageFormat:
        """The byte format of this layer's pages; only for compiled layers."""
        assert self.key is not None and self.value is not None
        return PageFormat(self.key.row_format(self.head_dim), self.value.row_format(self.head_dim), self.page_tokens)


class Sidecar(Record):
    """The tensors beside the weights."""

    file: str = Field(default=SIDECAR_NAME, pattern=r"^[^/\\]+$")
    sha256: str
    shapes: dict[str, list[int]]


class CalibrationRecord(Record):
    """Where the statistics come from."""

    text: str
    text_sha256: str
    tokens: int
    sequence_length: int
    seed: int
    last_position: int = 0


class RotationImport(Record):
    """A file that the rotations of one half were read from instead of being solved."""

    file: str
    sha256: str
    format_version: int
    objective: str
    source_grouping: str


class Manifest(Record):
    """The whole of `kvcompile.json`."""

    schema_version: str = f"{SCHEMA_MAJOR}.{SCHEMA_MINOR}"
    producer: Producer
    source: Source
    weights: Weights
    scheme: Scheme
    encoding: Encoding = Encoding()
    layers: list[LayerRecord]
    sidecar: Sidecar
    calibration: CalibrationRecord | None
    imported_rotations: Annotated[dict[Half, RotationImport] | None, BeforeValidator(_halves)] = None
    bits_per_element: Numbers
    metrics: Numbers

    @property
    def compiled(self) -> list[LayerRecord]:
        """The layers whose cache is packed."""
        return [layer for layer in self.layers if layer.key is not None]

    def to_json(self) -> str:
        """The text of `kvcompile.json`; equal manifests give equal bytes."""
        return self.model_dump_json(indent=1) + "\n"


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a converted directory; raises ArtifactError when there is none, or none this version can read."""
    path = directory / MANIFEST_NAME
    try:
        document = read_json(path)
        version = document["schema_version"]
        major = _major(version)
    except FileNotFoundError as error:
        raise ArtifactError(f"{directory} is no converted checkpoint: {MANIFEST_NAME} is missing") from error
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} is not a readable manifest; convert the model again") from error
    if major > SCHEMA_MAJOR:
        raise ArtifactError(
            f"{path} has schema version {version}, but this kvcompile reads up to {SCHEMA_MAJOR}.x; upgrade kvcompile"
        )
    try:
        return Manifest.model_validate(document, context=LENIENT)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ArtifactError(f"{path} is not a valid manifest: {where}: {first['msg']}") from error


def _major(version: Any) -> int:
    """The major number of a schema version; raises ValueError for what is no ``major.minor``."""
    if not isinstance(version, str) or not re.fullmatch("[0-9]+[.][0-9]+", version):
        raise ValueError(f"{version!r} is no schema version")
    return int(version.split(".")[0])


def manifest_schema() -> dict[str, object]:
    """The JSON Schema of the manifest, as published in the package."""
    return {"$id": f"https://kvcompile.dev/schema/manifest-{SCHEMA_MAJOR}.json", **Manifest.model_json_schema()}


if __name__ == "__main__":
    print(json.dumps(manifest_schema(), indent=1))
