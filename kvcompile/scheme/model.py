"""A KV codec as data: what happens to a key row and a value row, field by field. One TOML file is one `Scheme`."""

import re
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

Half = Literal["key", "value"]
LENIENT = "ignore unknown fields"
"""The validation context of a scheme that another version may have written, in a manifest."""


class Section(BaseModel):
    """A part of a scheme: immutable, and unknown fields are refused (unless validated as `LENIENT`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _forget_unknown(cls, document: Any, info: ValidationInfo) -> Any:
        if info.context == LENIENT and isinstance(document, dict):
            return {name: value for name, value in document.items() if name in cls.model_fields}
        return document


class Identity(Section):
    """No rotation."""

    kind: Literal["identity"] = "identity"


class Hadamard(Section):
    """The orthonormal Hadamard transform of the whole head (QuaRot)."""

    kind: Literal["hadamard"] = "hadamard"
    apply: Literal["online", "folded"] = "online"


class BlockHadamard(Section):
    """Hadamard transforms of contiguous blocks of channels (SAW-INT4, seed 003 section 3)."""

    kind: Literal["block_hadamard"] = "block_hadamard"
    block_size: int = Field(default=64, ge=2)
    apply: Literal["online", "folded"] = "online"


Target = Literal["query", "score_value", "score_weighted", "key", "value"]


class Spectral(Section):
    """The eigenbasis of a calibrated covariance, then Hadamard, then bit reversal (OSCAR, seed 000 equation 3).

    With ``order = "hadamard_first"`` a (block) Hadamard comes before the eigenbasis (Hessian, seed 003 equation 11).
    `block_size` makes the Hadamard block-diagonal.

    With ``balance = a > 0`` the matrix is no rotation any more: eigenvector i, of eigenvalue w_i (mean 1), is scaled by
    ``(w_i + balance_damping)^(-a/2)`` before the Hadamard, so that rows of an uneven spectrum get an evener one. What reads
    the rows takes the inverse: queries its transpose, attention outputs (or W_O) the inverse itself.
    """

    kind: Literal["spectral"] = "spectral"
    target: Target
    scope: Literal["layer", "kv_head"] = "kv_head"
    eigenbasis: bool = True
    hadamard: bool = True
    block_size: int | None = Field(default=None, ge=2)
    permutation: Literal["bit_reversal", "none"] = "bit_reversal"
    order: Literal["eigenbasis_first", "hadamard_first"] = "eigenbasis_first"
    balance: float = Field(default=0.0, ge=0, le=2)
    balance_damping: float = Field(default=0.1, gt=0)
    apply: Literal["online", "folded"] = "online"

    @model_validator(mode="after")
    def _balance_needs_a_basis(self) -> "Spectral":
        if self.balance and (not self.eigenbasis or self.order != "eigenbasis_first"):
            raise ValueError("balance scales eigenvectors; it needs eigenbasis true and order 'eigenbasis_first'")
        return self


class Random(Section):
    """A dense random orthogonal matrix, the same for every layer and head (TurboQuant)."""

    kind: Literal["random"] = "random"
    seed: int = Field(default=0, ge=0, lt=2**63)
    apply: Literal["online", "folded"] = "online"


class NoClip(Section):
    """Rows keep their range."""

    kind: Literal["none"] = "none"


class QuantileClip(Section):
    """Clamp a row to ``+-tau``, ``tau = sort(|row|)[int(ratio * head_dim)]`` over the whole head (seed 000 A.5)."""

    kind: Literal["quantile"] = "quantile"
    ratio: Annotated[float, Field(gt=0, le=1)] | Literal["calibrated"] = "calibrated"


class NoTokenScale(Section):
    """Rows keep their norm."""

    kind: Literal["none"] = "none"


class TokenScale(Section):
    """Rows are divided by a norm that is stored, and their logits multiplied by it (OScaR, seed 002 section 4.2).

    One norm per head, or one per token over all KV heads; `rsqrt` is 1 / sqrt(sum x^2 + eps), the others are of table 10.
    """

    kind: Literal["l2", "rsqrt", "max", "mean_abs"]
    scope: Literal["head", "token"] = "token"


class Quantizer(Section):
    """Min-max quantization in groups of channels of a token, or of tokens of a channel; metadata is stored in BF16.

    With `zero_point` none and `levels` lloyd_max a row is scaled by its root mean square and coded with the best levels
    for a Gaussian (TurboQuant). `damping` is what error feedback adds to the diagonal of its metric (mean diagonal 1), and
    `metric` which one it takes for keys: the queries' second moment, or that with every query counted by its attention.
    """

    bits: Literal[1, 2, 4] = 2
    axis: Literal["token", "channel"] = "token"
    group_size: Literal[16, 32, 64, 128, 256] = 128
    zero_point: Literal["float", "integer", "none"] = "float"
    levels: Literal["uniform", "lloyd_max"] = "uniform"
    metadata_dtype: Literal["bfloat16"] = "bfloat16"
    rounding: Literal["nearest", "error_feedback"] = "nearest"
    damping: float = Field(default=0.2, gt=0, le=100)
    metric: Literal["attention", "query"] = "attention"

    @model_validator(mode="after")
    def _levels_and_zero_point_agree(self) -> "Quantizer":
        if (self.zero_point == "none") != (self.levels == "lloyd_max"):
            raise ValueError(
                "zero_point 'none' and levels 'lloyd_max' belong together: symmetric levels need no zero point, uniform ones do"
            )
        if self.levels == "lloyd_max" and self.axis == "channel":
            raise ValueError("levels 'lloyd_max' scale a token's row by its own size; use axis 'token'")
        if self.levels == "lloyd_max" and self.rounding == "error_feedback":
            raise ValueError("rounding 'error_feedback' needs evenly spaced levels; use levels 'uniform'")
        return self


Rotation = Annotated[Identity | Hadamard | BlockHadamard | Spectral | Random, Field(discriminator="kind")]
Clip = Annotated[NoClip | QuantileClip, Field(discriminator="kind")]


class RowCodec(Section):
    """What is done to every key row, or to every value row, in this order.

    rotate; subtract the calibrated mean (`center`); divide by the token's norm; subtract the nearest of `centroids`
    calibrated centroids (0: none); clip; quantize.
    """

    rotation: Rotation = Identity()
    center: bool = False
    token_scale: NoTokenScale | TokenScale = Field(default=NoTokenScale(), discriminator="kind")
    centroids: int = Field(default=0, ge=0, le=32767)
    clip: Clip = NoClip()
    quantizer: Quantizer = Quantizer()

    @model_validator(mode="after")
    def _operators_fit(self) -> "RowCodec":
        if self.quantizer.axis == "channel" and isinstance(self.clip, QuantileClip):
            raise ValueError("clip.kind 'quantile' takes a token's own order statistic; with axis 'channel' use 'none'")
        if self.centroids and not isinstance(self.token_scale, NoTokenScale):
            raise ValueError("centroids are calibrated on unscaled rows; use token_scale.kind 'none'")
        return self


class Window(Section):
    """Tokens kept in BF16: the first `sink` and at least the last `recent`; history is demoted in blocks of `block`."""

    sink: int = Field(default=64, ge=0, le=4096)
    recent: int = Field(default=256, ge=0, le=65536)
    block: Literal[64, 128] = 64


class NoCorrection(Section):
    """Attention is taken as the quantized keys give it."""

    kind: Literal["none"] = "none"


class LinearCorrection(Section):
    """A trained linear-attention term for what quantization took from the keys (KVLinC, seed 004 section 3.2).

    `features` is the size of phi; training stops early when held-out loss has not fallen for `patience` evaluations. With
    form paper the term is equation 5 and knows key errors only; relative (`codec/correction.py`) also knows decoded keys.
    """

    kind: Literal["linear"] = "linear"
    form: Literal["paper", "relative"] = "relative"
    features: Literal[32, 64, 128, 256, 512] = 256
    steps: int = Field(default=200, ge=1)
    learning_rate: float = Field(default=0.01, gt=0)
    patience: int = Field(default=4, ge=1)


Correction = Annotated[NoCorrection | LinearCorrection, Field(discriminator="kind")]


class Calibration(Section):
    """How much text the statistics are taken from, and how much attention is kept to calibrate clips and adapters on.

    With `positions` spread, later sequences start at later positions, up to what the model takes: attention under RoPE does
    not depend on where a text starts, but keys and queries do, and a long context will hold all of them.
    """

    tokens: int = Field(default=8192, ge=1)
    sequence_length: int = Field(default=2048, ge=16)
    positions: Literal["start", "spread"] = "start"
    sample_sequences: int = Field(default=2, ge=1)
    sample_length: int = Field(default=1024, ge=16)
    sample_queries: int = Field(default=32, ge=1)


class LayerScheme(Section):
    """What a scheme does to one layer, its overrides applied."""

    key: RowCodec
    value: RowCodec
    window: Window = Window()
    correction: Correction = NoCorrection()

    @model_validator(mode="after")
    def _halves_fit(self) -> "LayerScheme":
        if getattr(self.key.rotation, "apply", "online") != "online":
            raise ValueError(
                "key.rotation.apply: keys cannot be folded, because RoPE (and QK-norm) stands between W_K and the cache; "
                "use 'online'"
            )
        for half, row in self.rows():
            quantizer = row.quantizer
            if quantizer.axis == "channel" and self.window.block % quantizer.group_size:
                raise ValueError(
                    f"{half}.quantizer.group_size {quantizer.group_size} along tokens does not divide window.block "
                    f"{self.window.block}, the tokens that are quantized together; use a divisor"
                )
        if isinstance(self.value.token_scale, TokenScale):
            raise ValueError(
                "value.token_scale: stored norms multiply logits, so they are for keys only; use kind 'none'"
            )
        if isinstance(self.correction, LinearCorrection) and self.key.centroids:
            raise ValueError("correction.kind 'linear' is trained on what min-max coding loses; use key.centroids 0")
        return self

    def rows(self) -> tuple[tuple[Half, RowCodec], ...]:
        """The two halves with their names."""
        return ("key", self.key), ("value", self.value)

    def folds_values(self) -> bool:
        """Whether the value rotation is to be folded into W_V and W_O."""
        return getattr(self.value.rotation, "apply", "online") == "folded"


PASSES = (
    "inventory", "calibrate", "rotations", "center", "centroids", "feedback", "clip", "correction", "fold", "verify", "emit",
)  # fmt: skip
"""What a conversion runs unless the scheme says otherwise; a pass that has nothing to do does nothing."""


class Scheme(LayerScheme):
    """A complete, validated scheme; `passes` is the ordered list that `kvcompile convert` runs.

    `layers` overrides fields for some layers: its keys are layer numbers and ranges such as ``"0-1,11"``, its values have
    the form of the scheme itself (key, value, window).
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    summary: str
    paper: str = ""
    passes: tuple[str, ...] = PASSES
    calibration: Calibration = Calibration()
    layers: dict[str, dict[str, Any]] = Field(default={}, max_length=256)

    @model_validator(mode="after")
    def _overrides_are_valid(self, info: ValidationInfo) -> "Scheme":
        if info.context == LENIENT:
            for place, override in list(self.layers.items()):
                self.layers[place] = self._known(place, override)
        for place, override in self.layers.items():
            for index in _layer_numbers(place):
                if unknown := set(override) - {"key", "value", "window"}:
                    raise ValueError(f'layers."{place}": only key, value and window can differ, not {min(unknown)}')
                try:
                    self.layer(index)
                except ValidationError as error:
                    first = error.errors()[0]
                    where = ".".join(str(part) for part in first["loc"])
                    message = first["msg"].removeprefix("Value error, ")
                    raise ValueError(f'layers."{place}": {where + ": " if where else ""}{message}') from error
        return self

    @cached_property
    def _by_layer(self) -> dict[int, LayerScheme]:
        return {}

    def layer(self, index: int) -> LayerScheme:
        """What the scheme does to layer `index`; later overrides win."""
        if index not in self._by_layer:
            self._by_layer[index] = LayerScheme.model_validate(self._merged(index))
        return self._by_layer[index]

    def _merged(self, index: int, last: str | None = None) -> dict[str, Any]:
        """The scheme of layer `index` with its overrides, those after `last` left out."""
        document = self.model_dump(include={"key", "value", "window", "correction"})
        for place, override in self.layers.items():
            if index in _layer_numbers(place):
                document = _merge(document, override)
            if place == last:
                break
        return document

    def _known(self, place: str, override: dict[str, Any]) -> dict[str, Any]:
        """What of an override a layer's scheme has fields for; one that is not valid stays as it is, to be refused."""
        try:
            merged = self._merged(min(_layer_numbers(place)), place)
            return _common(override, LayerScheme.model_validate(merged, context=LENIENT).model_dump())
        except ValidationError:
            return override

    def variants(self) -> Iterator[LayerScheme]:
        """Every different thing that is done to some layer; the scheme's own first."""
        yield LayerScheme.model_validate(self.model_dump(include={"key", "value", "window", "correction"}))
        for place in self.layers:
            for index in _layer_numbers(place):
                yield self.layer(index)

    def with_online_values(self) -> "Scheme":
        """This scheme for a model into whose weights the rotation of values cannot be folded."""
        document = self.model_dump()
        for layer in (document, *document["layers"].values()):
            rotation = layer.get("value", {}).get("rotation", {})
            if "apply" in rotation:
                rotation["apply"] = "online"
        return Scheme.model_validate(document)

    def overridden_layers(self) -> set[int]:
        """Numbers of all layers that some override names."""
        return {index for place in self.layers for index in _layer_numbers(place)}

    def calibrates(self) -> bool:
        """Whether some part of the scheme is taken from calibration text."""
        rows = [row for variant in self.variants() for _, row in variant.rows()]
        return (
            bool(self.targets())
            or any(row.center or row.centroids or getattr(row.clip, "ratio", 1.0) == "calibrated" for row in rows)
            or isinstance(self.correction, LinearCorrection)
        )

    def targets(self) -> frozenset[str]:
        """The covariances that the calibrate pass must collect."""
        rows = [row for variant in self.variants() for _, row in variant.rows()]
        rotations = [row.rotation for row in rows]
        found = {r.target for r in rotations if isinstance(r, Spectral) and r.eigenbasis}
        if any(variant.key.quantizer.rounding == "error_feedback" for variant in self.variants()):
            found.add("query")
        return frozenset(found)


_LAST_LAYER = 999


@lru_cache(maxsize=1024)
def _layer_numbers(place: str) -> frozenset[int]:
    """The layers that a key of `Scheme.layers` names; raises ValueError for one that is no list of numbers and ranges."""
    numbers: set[int] = set()
    for part in place.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]) or int(match[2] or match[1]) > _LAST_LAYER:
            raise ValueError(
                f'layers."{place}": write layer numbers and ranges up to {_LAST_LAYER}, for example layers."0-1,11"'
            )
        numbers |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(numbers)


def _merge(document: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """`document` with the fields of `override`; a section whose kind changes keeps nothing of the old kind."""
    merged = dict(document)
    for name, value in override.items():
        old = merged.get(name)
        if not isinstance(value, dict) or not isinstance(old, dict):
            merged[name] = value
        elif value.get("kind", old.get("kind")) != old.get("kind"):
            merged[name] = {**reset_section(old, value["kind"]), **value}
        else:
            merged[name] = _merge(old, value)
    return merged


def _common(document: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """`document` without the fields that `known` does not have, at any depth."""
    return {
        name: _common(value, known[name]) if isinstance(value, dict) and isinstance(known[name], dict) else value
        for name, value in document.items()
        if name in known
    }


def reset_section(defaults_of: dict[str, Any], kind: Any) -> dict[str, Any]:
    """The section that remains when its `kind` is replaced: fields of the old kind do not survive."""
    kept = {"apply"} if kind != "identity" else set()
    return {name: value for name, value in defaults_of.items() if name in kept} | {"kind": kind}
