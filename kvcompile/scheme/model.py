"""A KV codec as data: what happens to a key row and a value row, field by field. One TOML file is one `Scheme`."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A part of a scheme: immutable, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


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


class Spectral(Section):
    """The eigenbasis of a calibrated covariance, then Hadamard, then bit reversal (OSCAR, seed 000 equation 3)."""

    kind: Literal["spectral"] = "spectral"
    target: Literal["query", "score_value", "key", "value"]
    scope: Literal["layer", "kv_head"] = "kv_head"
    eigenbasis: bool = True
    hadamard: bool = True
    permutation: Literal["bit_reversal", "none"] = "bit_reversal"
    apply: Literal["online", "folded"] = "online"


class NoClip(Section):
    """Rows keep their range."""

    kind: Literal["none"] = "none"


class QuantileClip(Section):
    """Clamp a row to ``+-tau``, ``tau = sort(|row|)[int(ratio * head_dim)]`` over the whole head (seed 000 A.5)."""

    kind: Literal["quantile"] = "quantile"
    ratio: Annotated[float, Field(gt=0, le=1)] | Literal["calibrated"] = "calibrated"


class Quantizer(Section):
    """Asymmetric min-max quantization of one row in groups of channels; scale and zero point are stored in BF16."""

    bits: Literal[2, 4] = 2
    axis: Literal["token"] = "token"
    group_size: Literal[16, 32, 64, 128, 256] = 128
    zero_point: Literal["float"] = "float"
    metadata_dtype: Literal["bfloat16"] = "bfloat16"
    rounding: Literal["nearest"] = "nearest"


Rotation = Annotated[Identity | Hadamard | BlockHadamard | Spectral, Field(discriminator="kind")]
Clip = Annotated[NoClip | QuantileClip, Field(discriminator="kind")]


class RowCodec(Section):
    """What is done to every key row, or to every value row."""

    rotation: Rotation = Identity()
    clip: Clip = NoClip()
    quantizer: Quantizer = Quantizer()


class Window(Section):
    """Tokens kept in BF16: the first `sink` and the last `recent`; history is demoted in whole pages."""

    sink: int = Field(default=64, ge=0, le=4096)
    recent: int = Field(default=256, ge=0, le=65536)


class Calibration(Section):
    """How much text the statistics are taken from, and how much attention is kept to calibrate clips on."""

    tokens: int = Field(default=8192, ge=1)
    sequence_length: int = Field(default=2048, ge=16)
    sample_sequences: int = Field(default=2, ge=1)
    sample_length: int = Field(default=1024, ge=16)


class Scheme(Section):
    """A complete, validated scheme; `passes` is the ordered list that `kvcompile convert` runs."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    summary: str
    paper: str = ""
    passes: tuple[str, ...] = ("inventory", "calibrate", "rotations", "clip", "fold", "verify", "emit")
    key: RowCodec
    value: RowCodec
    window: Window = Window()
    calibration: Calibration = Calibration()

    @model_validator(mode="after")
    def _keys_rotate_online(self) -> "Scheme":
        if getattr(self.key.rotation, "apply", "online") != "online":
            raise ValueError(
                "key.rotation.apply: keys cannot be folded, because RoPE (and QK-norm) stands between W_K and the cache; "
                "use 'online'"
            )
        return self

    def rows(self) -> tuple[tuple[Literal["key", "value"], RowCodec], ...]:
        """The two halves of the scheme with their names."""
        return ("key", self.key), ("value", self.value)

    def targets(self) -> frozenset[str]:
        """The covariances that the calibrate pass must collect."""
        rotations = [row.rotation for _, row in self.rows()]
        return frozenset(r.target for r in rotations if isinstance(r, Spectral) and r.eigenbasis)

    def folds_values(self) -> bool:
        """Whether the scheme asks for its value rotation to be folded into W_V and W_O."""
        return getattr(self.value.rotation, "apply", "online") == "folded"


def reset_section(defaults_of: dict[str, Any], kind: Any) -> dict[str, Any]:
    """The section that remains when its `kind` is replaced: fields of the old kind do not survive."""
    kept = {"apply"} if kind != "identity" else set()
    return {name: value for name, value in defaults_of.items() if name in kept} | {"kind": kind}
