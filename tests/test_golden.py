"""Numbers printed in the OSCAR paper (seed 000), reproduced: App. A.4's worked example, tables 1 and 2, Lemma 1, Theorem 1.

`data/oscar_worked_example.json` quotes the paper's printed rows (CC BY 4.0, arXiv:2605.17757): one key token of layer 10 of
Qwen3-4B-Thinking, 128 channels, rounded to two decimals by its authors.
"""

import json
from pathlib import Path

import pytest
import torch

from kvcompile.codec import RowFormat, dequantize_rows, quantize_rows
from kvcompile.linalg import bit_reversal, eigenbasis, hadamard
from kvcompile.scheme import bits_per_element, load_scheme

PRINTED = json.loads((Path(__file__).parent / "data" / "oscar_worked_example.json").read_text())
ROUNDING = 0.5e-2 * 128**0.5  # two decimals in 128 channels, added up by a transform


def row(name: str) -> torch.Tensor:
    return torch.tensor(PRINTED[name]["row"], dtype=torch.float64)


def covariance(seed: int, dim: int = 64) -> torch.Tensor:
    """A positive definite matrix with a steep spectrum."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64, generator=generator)).Q
    return basis @ torch.diag(torch.logspace(2, -2, dim, dtype=torch.float64)) @ basis.T


@pytest.mark.parametrize(("before", "after"), [("key", "KH"), ("KU", "KUH")])
def test_hadamard_rows_of_the_worked_example(before, after):
    assert torch.allclose(row(before) @ hadamard(128), row(after), atol=ROUNDING)


def test_permuted_row_of_the_worked_example():
    """K U H Pbr is K U H with its columns in bit-reversed order, number for number."""
    assert torch.equal(row("KUH")[bit_reversal(128)], row("KUHP"))


def test_bit_reversal_places_the_top_eigenvectors_as_printed():
    place = bit_reversal(128)  # an involution, so it also says where column k goes
    assert [int(place[k]) for k in range(8)] == [0, 64, 32, 96, 16, 80, 48, 112]


@pytest.mark.parametrize("name", ["key", "KU", "KH", "KUH", "KUHP"])
def test_group_ranges_of_the_worked_example(name):
    groups = row(name).view(2, 64)
    ranges = groups.amax(1) - groups.amin(1)
    assert ranges.tolist() == pytest.approx(PRINTED[name]["group_ranges"], abs=0.011)


@pytest.mark.parametrize("name", ["key", "KH", "KUHP"])
def test_group_scales_follow_the_printed_ranges(name):
    """Equation of A.5: s = (max - min) / 3 per group, as the codec stores it."""
    fmt = RowFormat(head_dim=128, bits=2, group_size=64)
    _, scale, _ = quantize_rows(row(name), fmt)
    expected = torch.tensor(PRINTED[name]["group_ranges"]) / 3
    assert torch.allclose(scale.float(), expected, rtol=2**-8)


def test_bits_per_element_of_tables_1_and_2():
    scheme = load_scheme("oscar-int2")
    assert f"{bits_per_element(scheme, 128, 128 * 1024):.2f}" == "2.28"
    assert f"{bits_per_element(scheme, 128, 32 * 1024):.2f}" == "2.38"


def test_lemma_1_the_diagonal_is_constant():
    for dim in (16, 64, 96, 128):
        c = covariance(1, dim)
        rotation = eigenbasis(c[None])[1][0] @ hadamard(dim)
        diagonal = (rotation.T @ c @ rotation).diagonal()
        assert torch.allclose(diagonal, c.trace().expand(dim) / dim, rtol=1e-9)


def test_theorem_1_the_eigenbasis_minimises_the_surrogate():
    """tr(R^T C R E) with a diagonal E in ascending order: smallest at R = U among 500 random rotations."""
    c = covariance(2)
    residual = torch.linspace(0.1, 3.0, 64, dtype=torch.float64)

    def surrogate(rotation):
        return float(((rotation.T @ c @ rotation).diagonal() * residual).sum())

    best = surrogate(eigenbasis(c[None])[1][0])
    generator = torch.Generator().manual_seed(0)
    others = []
    for _ in range(500):
        others.append(surrogate(torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64, generator=generator)).Q))
    assert best < min(others)
    values = eigenbasis(c[None])[0][0]
    assert best == pytest.approx(float((values * residual).sum()))


def test_equation_1_the_logit_error_is_the_weighted_residual():
    """||Q K^T - Q K^^T||^2 = tr((K - K^) Q^T Q (K - K^)^T), with the codec's own errors."""
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(40, 128, dtype=torch.float64, generator=generator) for _ in range(2))
    error = k - dequantize_rows(*quantize_rows(k, RowFormat(128, 2, 128, 0.96))).double()
    assert float((q @ error.T).square().sum()) == pytest.approx(float(((error @ (q.T @ q)) * error).sum()))
