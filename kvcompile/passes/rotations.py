"""Pass `rotations`: solve the rotation of keys and of values for every layer and KV head."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvcompile.linalg import bit_reversal, eigenbasis, hadamard, random_orthogonal
from kvcompile.models import AttentionLayer
from kvcompile.passes.base import Context, PassResult
from kvcompile.passes.ir import IR
from kvcompile.scheme.model import BlockHadamard, Hadamard, Identity, Random, Rotation, Spectral

TOP = 8
"""Eigenvalues counted in the spectrum concentration (seed 000 A.4 quotes the top eight)."""


@dataclass(frozen=True)
class RotationsPass:
    """Builds ``R [K, D, D]`` float32; what the eigenbasis is taken of is the scheme's choice.

    0. Rows are stored as ``x R``. Where R is not orthogonal (`balance`), its inverse is emitted too, as ``.inverse``.
    1. Spectral: ``R = U H Pbr`` (seed 000 equation 3), or with order hadamard_first ``R = H U`` (seed 003 equation 11); scope
       `layer` averages the covariance over KV heads first.
    2. Hadamard, block-diagonal Hadamard and random rotations need no statistics; the identity emits no tensor.
    3. Matrices that the user imported are taken as they are, whatever the scheme would solve.
    4. The sidecar always holds one matrix per KV head, whatever the scope.
    """

    name: ClassVar[str] = "rotations"
    version: ClassVar[int] = 3
    stored: ClassVar[bool] = True

    def requires(self, ir: IR) -> str | None:
        """Covariances for every spectral rotation."""
        if ir.inventory is None:
            return "the inventory pass must come first"
        for layer in ir.inventory.compiled:
            for half, row in ir.scheme.layer(layer.index).rows():
                rotation = row.rotation
                if not isinstance(rotation, Spectral) or not rotation.eigenbasis:
                    continue
                if f"layers.{layer.index}.{rotation.target}" not in ir.statistics:
                    return f"{half}.rotation is spectral, so the calibrate pass must come first"
        return None

    def run(self, ir: IR, context: Context) -> PassResult:
        """Solve layer by layer; the metric is the share of the eight largest eigenvalues in the trace."""
        tensors, metrics = dict(ir.tensors), {}
        for layer in context.track(ir.layers().compiled, "rotations", "layer", lambda _: 1):
            found: dict[str, float] = {}
            for half, row in ir.scheme.layer(layer.index).rows():
                target = getattr(row.rotation, "target", None)
                covariance = ir.statistics.get(f"layers.{layer.index}.{target}")
                if row.center and target == half and covariance is not None:
                    mean_KD = ir.statistics[f"layers.{layer.index}.{half}_mean"]
                    covariance = covariance - mean_KD[:, :, None] * mean_KD[:, None, :]
                if ir.imported is None:
                    rotation = solve_rotation(row.rotation, layer, covariance)
                else:
                    rotation = ir.imported.rotation(half, layer)
                if rotation is not None:
                    tensors[f"layers.{layer.index}.{half}.rotation"] = rotation.float().contiguous()
                if rotation is not None and isinstance(row.rotation, Spectral) and row.rotation.balance:
                    inverse = torch.linalg.inv(rotation).float().contiguous()
                    tensors[f"layers.{layer.index}.{half}.inverse"] = inverse
                if covariance is not None:
                    found[f"{half}_spectrum_top{TOP}"] = spectrum_concentration(covariance)
            metrics[layer.index] = found
        return PassResult(replace(ir, tensors=tensors, metrics=ir.with_metrics(metrics)), modified=True)

    def ensures(self, ir: IR) -> str | None:
        """A rotation for every half that is not the identity, in every compiled layer."""
        for layer in ir.layers().compiled:
            for half, row in ir.scheme.layer(layer.index).rows():
                emitted = f"layers.{layer.index}.{half}.rotation" in ir.tensors
                if emitted == isinstance(row.rotation, Identity):
                    return f"layer {layer.index} has {'an unexpected' if emitted else 'no'} {half} rotation"
                inverted = f"layers.{layer.index}.{half}.inverse" in ir.tensors
                if inverted != bool(getattr(row.rotation, "balance", 0)):
                    return f"layer {layer.index} has {'an unexpected' if inverted else 'no'} inverse of its {half} rotation"
        return None


def solve_rotation(rotation: Rotation, layer: AttentionLayer, c_KDD: Tensor | None) -> Tensor | None:
    """The matrices ``[K, D, D]`` (float64) of one half of a layer, orthogonal unless balanced; None for the identity."""
    num_kv, dim = layer.num_key_value_heads, layer.head_dim
    match rotation:
        case Identity():
            return None
        case Hadamard():
            return hadamard(dim).expand(num_kv, dim, dim)
        case BlockHadamard(block_size=block):
            return _block_hadamard(dim, block).expand(num_kv, dim, dim)
        case Random(seed=seed):
            return random_orthogonal(dim, seed).expand(num_kv, dim, dim)
        case Spectral():
            basis_KDD = torch.eye(dim, dtype=torch.float64).expand(num_kv, dim, dim)
            if rotation.eigenbasis:
                assert c_KDD is not None
                values_KD, basis_KDD = eigenbasis(_scoped(c_KDD, rotation.scope))
                if rotation.balance:
                    basis_KDD = basis_KDD * _balance(values_KD, rotation.balance, rotation.balance_damping)[:, None, :]
                basis_KDD = basis_KDD.expand(num_kv, dim, dim)
            mixing = torch.eye(dim, dtype=torch.float64)
            if rotation.hadamard:
                mixing = _block_hadamard(dim, rotation.block_size or dim)
            r_KDD = basis_KDD @ mixing if rotation.order == "eigenbasis_first" else mixing @ basis_KDD
            return r_KDD[..., bit_reversal(dim)] if rotation.permutation == "bit_reversal" else r_KDD


def _balance(values_KD: Tensor, power: float, damping: float) -> Tensor:
    """Scales of eigenvectors: the inverse root of the damped spectrum to `power`; 1 wherever the spectrum is flat."""
    relative_KD = values_KD.clamp_min(0) / values_KD.clamp_min(0).mean(-1, keepdim=True).clamp_min(1e-300)
    return ((relative_KD + damping) / (1 + damping)) ** (-power / 2)


def _block_hadamard(dim: int, block: int) -> Tensor:
    """Hadamard matrices of at most the whole head along the diagonal."""
    block = min(block, dim)
    return torch.kron(torch.eye(dim // block, dtype=torch.float64), hadamard(block))


def spectrum_concentration(c_KDD: Tensor) -> float:
    """Mean over KV heads of the share of the trace in the eight largest eigenvalues."""
    values = torch.linalg.eigvalsh(c_KDD).clamp_min(0)
    return float((values[:, -TOP:].sum(-1) / values.sum(-1).clamp_min(1e-300)).mean())


def _scoped(c_KDD: Tensor, scope: str) -> Tensor:
    return c_KDD.mean(dim=0, keepdim=True) if scope == "layer" else c_KDD
