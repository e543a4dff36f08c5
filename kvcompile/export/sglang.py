"""Target `sglang`: rotation files, environment and launch command for the OSCAR research fork of SGLang.

That engine rotates queries and keys by R_K, multiplies attention outputs by R_V^T always, and rotates values by R_V on write or,
with the absorb flag, in W_V at load. So weights whose values are folded already get R_V = identity and no absorption.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvcompile.artifact import Artifact, LayerRecord, Manifest, RowRecord
from kvcompile.errors import ExportError
from kvcompile.export.cost import measure_view
from kvcompile.export.target import Notes, Options
from kvcompile.export.weights import HandedOver, Side, handed_over
from kvcompile.scheme.model import Hadamard, Spectral

KEY_FILE, VALUE_FILE = "k_rotation.pt", "v_rotation.pt"
ENVIRONMENT, LAUNCH = "oscar.env", "launch.sh"
MULTIPLE = 8
"""What the windows of that engine are multiples of."""


class SglangTarget:
    """k_rotation.pt and v_rotation.pt (format_version 1 or 2), oscar.env and launch.sh; the weights are only referenced."""

    name: ClassVar[str] = "sglang"
    summary: ClassVar[str] = "Rotation files, environment and launch command for the OSCAR research fork of SGLang"

    def refuse(self, artifact: Artifact) -> str | None:
        """Only 2-bit min-max codes per token in orthogonal bases can be said, the same in every layer."""
        manifest = artifact.manifest
        if len(manifest.compiled) < len(manifest.layers) and any("sliding" in x.kind for x in manifest.layers):
            return "layers with a sliding window keep their own cache, and nothing says so there"
        for layer in manifest.compiled:
            if reason := _unsayable(layer, manifest.weights.mode == "overlay"):
                return f"layer {layer.index}: {reason}"
        if len({row.group_size for row in _rows(manifest)}) > 1:
            return "keys and values of all layers must have one group size there"
        windows = {manifest.scheme.layer(layer.index).window for layer in manifest.compiled}
        return "all layers must have the same windows there" if len(windows) > 1 else None

    def write(self, artifact: Artifact, folder: Path, options: Options) -> Notes:
        """Options: `source` (hand over these unfolded weights), `format_version`, `text` (measure what the view costs)."""
        manifest, weights = artifact.manifest, handed_over(artifact, options["source"])
        if any(x.value and x.value.inverse and weights.online(x.index) for x in manifest.compiled):
            raise ExportError(
                "value rotations of this artifact are balanced, not orthogonal, and cannot be applied online there; "
                "export the folded weights, without --source"
            )
        version = _write_rotations(artifact, folder / KEY_FILE, "key", options, {})
        _write_rotations(artifact, folder / VALUE_FILE, "value", options, weights.sides)
        dims = [layer.head_dim for layer in manifest.compiled]
        ratios = {half: closest_ratio(_ratios(manifest, half), dims) for half in ("key", "value")}
        window = manifest.scheme.layer(manifest.compiled[0].index).window
        there = window.model_copy(update={x: _rounded_up(getattr(window, x)) for x in ("sink", "recent")})
        # It cannot absorb a rotation into a bias, nor into codes; nor one of some layers alone.
        plain = all(name.endswith(".weight") for name in manifest.weights.projections)
        absorb = plain and "folded" not in weights.sides.values()
        group = manifest.compiled[0].key.group_size if manifest.compiled[0].key else 0
        environment = {
            "SGLANG_OSCAR_K_ROTATION_PATH": f"${{OSCAR_HERE:-.}}/{KEY_FILE}",
            "SGLANG_OSCAR_V_ROTATION_PATH": f"${{OSCAR_HERE:-.}}/{VALUE_FILE}",
            "SGLANG_OSCAR_K_CLIP_RATIO": repr(ratios["key"]),
            "SGLANG_OSCAR_V_CLIP_RATIO": repr(ratios["value"]),
            "SGLANG_OSCAR_ABSORB_V_ROTATION": str(int(absorb)),
            "SGLANG_ENABLE_MIXED_KV_WINDOWS": "1",
            "SGLANG_MIXED_KV_PREFIX_TOKENS": str(there.sink),
            "SGLANG_MIXED_KV_RECENT_TOKENS": str(there.recent),
        }
        path = weights.path.resolve()
        (folder / ENVIRONMENT).write_text("".join(f'{k}="{v}"\n' for k, v in environment.items()), "utf-8")
        (folder / LAUNCH).write_text(_launch(path, group), "utf-8")
        (folder / LAUNCH).chmod(0o755)
        approximated = _approximations(manifest, ratios, there != window)
        if approximated:
            cost = "not measured; export again with --option text=bundled (or a file)"
            if text := options.get("text"):
                seen = [_as_there(layer, ratios) if layer.key else layer for layer in manifest.layers]
                cost = str(measure_view(artifact, seen, there, text))
            approximated.append(f"cost of all this: {cost}")
        return Notes(
            carried=(
                f"key rotation: format_version {version}, applied online",
                _value_note(weights, absorb),
                f"codes: 2 bits, groups of {group} channels, scale and zero point in BF16",
                f"windows: {there.sink} prefix and {there.recent} recent tokens in BF16",
            ),
            approximated=tuple(approximated),
            lines=(
                f"`./{LAUNCH}` starts the server with `{ENVIRONMENT}` on {path}, or on the model given as its argument.",
                "",
                "The rotation files belong to these weights alone: with others, values are rotated twice or not at all. They",
                "have no `eigenvalues`, because an artifact does not keep those that a rotation was solved from.",
            ),
            weights=weights,
        )


def closest_ratio(ratios: Sequence[float], dims: Sequence[int]) -> float:
    """One ratio for all layers, given theirs and their head sizes: theirs where it is one, else in the middle of a channel.

    A ratio stands for the order statistic ``int(ratio * D)`` of a row. Where layers differ, the mean of those is taken.
    """
    if len(set(ratios)) == 1:
        return ratios[0]
    mean = sum(_channel(ratio, dim) / dim for ratio, dim in zip(ratios, dims, strict=True)) / len(dims)
    return (round(mean * dims[0]) + 0.5) / dims[0]


def _channel(ratio: float, dim: int) -> int:
    """The index of the order statistic, of `dim`, that a clip ratio stands for."""
    return min(int(ratio * dim), dim - 1)


def _rounded_up(tokens: int) -> int:
    return -(-tokens // MULTIPLE) * MULTIPLE


def _unsayable(layer: LayerRecord, overlay: bool) -> str | None:
    """Why a layer's format does not exist there."""
    checks: list[tuple[str, Callable[[RowRecord], bool], str]] = [
        ("bits", lambda row: row.bits != 2, "only 2-bit codes exist there"),
        ("axis", lambda row: row.axis != "token", "codes by channel do not exist there"),
        ("zero_point", lambda row: row.zero_point != "float", "only float zero points exist there"),
        ("token_scale", lambda row: row.token_scale != "none", "token norms do not exist there"),
        ("num_centroids", lambda row: row.num_centroids > 0, "centroids do not exist there"),
    ]
    for half, row in (("key", layer.key), ("value", layer.value)):
        assert row is not None
        for field, wrong, why in checks:
            if wrong(row):
                return f"{half} {field} is {getattr(row, field)}, and {why}"
        if row.inverse is not None and (half == "key" or overlay or row.apply == "online"):
            return f"{half} rotations are balanced, and that engine undoes a rotation by its transpose"
    return "a linear correction does not exist there" if layer.correction else None


def _rows(manifest: Manifest) -> list[RowRecord]:
    return [row for layer in manifest.compiled for row in (layer.key, layer.value) if row is not None]


def _ratios(manifest: Manifest, half: str) -> list[float]:
    return [getattr(layer, half).clip_ratio for layer in manifest.compiled]


def _write_rotations(artifact: Artifact, path: Path, half: str, options: Options, sides: Mapping[int, Side]) -> int:
    """Write one file; the format_version it has: 1 where the heads of every layer share one matrix, unless told otherwise.

    Layers that have their rotation in the weights already, by `sides`, get the identity.
    """
    matrices: dict[int, Tensor] = {}
    folded = [sides.get(layer.index) == "folded" for layer in artifact.manifest.compiled]
    for layer, identity in zip(artifact.manifest.compiled, folded, strict=True):
        r_KDD = artifact.tensor(getattr(layer, half).rotation)
        if r_KDD is None or identity:
            r_KDD = torch.eye(layer.head_dim).expand(layer.num_key_value_heads, -1, -1)
        matrices[layer.index] = r_KDD.float()
    shared = all(bool((r_KDD == r_KDD[:1]).all()) for r_KDD in matrices.values())
    wanted = options.get("format_version")
    if wanted is not None and str(wanted) not in ("1", "2"):
        raise ExportError(f"option format_version is 1 or 2, not {wanted!r}")
    version = int(wanted or (1 if shared else 2))
    if version == 1 and not shared:
        raise ExportError(
            f"{half} rotations differ from head to head, which format_version 1 cannot say; use format_version 2, or "
            f"convert with --set {half}.rotation.scope=layer"
        )
    document: dict[str, Any] = {
        "format_version": version,
        "objective": "identity" if sides and "online" not in sides.values() else _objective(artifact.manifest, half),
        "source_grouping": "layer" if version == 1 else "per_kv_head",
        "layers": {
            i: {"layer_id": i, "rotation": (r_KDD[0] if version == 1 else r_KDD).contiguous().clone()}
            for i, r_KDD in matrices.items()
        },
    }
    torch.save(document, path)
    return version


def _objective(manifest: Manifest, half: str) -> str:
    """What the fork calls this kind of rotation, or the scheme's name."""
    imported = (manifest.imported_rotations or {}).get("key" if half == "key" else "value")
    if imported is not None:
        return imported.objective
    rotation = getattr(manifest.scheme, half).rotation
    match rotation:
        case Hadamard():
            return "hadamard"
        case Spectral(target="query", hadamard=True, permutation="bit_reversal", block_size=None):
            return "qqt_r_h_pbr"
        case Spectral(target="score_value", hadamard=True, permutation="bit_reversal", block_size=None):
            return "sst_r_h_pbr"
        case _:
            return str(rotation.kind)


def _as_there(layer: LayerRecord, ratios: dict[str, float]) -> LayerRecord:
    """The layer as that engine will code it: one ratio, nearest rounding, nothing subtracted."""
    update = {
        half: getattr(layer, half).model_copy(
            update={"clip_ratio": ratios[half], "rounding": "nearest", "feedback": None, "mean": None}
        )
        for half in ("key", "value")
    }
    return layer.model_copy(update=update)


def _approximations(manifest: Manifest, ratios: dict[str, float], windows: bool) -> list[str]:
    found = []
    for half, ratio in ratios.items():
        used = sorted(set(_ratios(manifest, half)))
        if any(
            _channel(getattr(x, half).clip_ratio, x.head_dim) != _channel(ratio, x.head_dim) for x in manifest.compiled
        ):
            found.append(f"{half} clip per layer: one ratio {ratio:.4g} instead of {used[0]:.4g} to {used[-1]:.4g}")
    if any(row.feedback for row in _rows(manifest)):
        found.append("error feedback: codes are rounded to nearest")
    if any(row.mean for row in _rows(manifest)):
        found.append("centring: nothing is subtracted before coding")
    if windows:
        found.append(f"windows: rounded up to multiples of {MULTIPLE}")
    return found


def _value_note(weights: HandedOver, absorb: bool) -> str:
    how = "W_V is folded at load (ABSORB 1)" if absorb else "values are rotated on write (ABSORB 0)"
    words: dict[Side, str] = {
        "folded": "folded into the weights; R_V is the identity there and ABSORB 0, so nothing is rotated twice",
        "online": f"true R_V for unfolded weights; {how}",
        "none": "there is none, R_V is the identity",
    }
    return f"value rotation: {weights.describe(words)}"


def _launch(weights: Path, group: int) -> str:
    return f"""#!/usr/bin/env bash
# The OSCAR research fork of SGLang on the weights that the rotation files beside this script belong to.
set -euo pipefail
export OSCAR_HERE="$(cd "$(dirname "$0")" && pwd)"
set -a
. "$OSCAR_HERE/{ENVIRONMENT}"
set +a
WEIGHTS={shlex.quote(str(weights))}
exec python -m sglang.launch_server --model-path "${{1:-$WEIGHTS}}" \\
  --kv-cache-dtype int2 --kv-cache-quant-group-size {group} "${{@:2}}"
"""
