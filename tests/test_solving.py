"""Transforms, statistics and solved rotations: against definitions, and as properties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompile.artifact import inverse_error
from kvcompile.calibration import Recorder, recording
from kvcompile.calibration.statistics import OBSERVER
from kvcompile.errors import SchemeError
from kvcompile.linalg import bit_reversal, eigenbasis, hadamard, is_hadamard_order
from kvcompile.models import AttentionLayer, load_model
from kvcompile.passes.clip import CANDIDATES, SLACK, search
from kvcompile.passes.rotations import solve_rotation
from kvcompile.scheme import bits_per_element, builtin_names, load_scheme, parse_scheme
from kvcompile.scheme.model import BlockHadamard, Hadamard, Identity, Spectral

ORDERS = [1, 2, 4, 12, 16, 20, 24, 28, 36, 40, 48, 64, 72, 80, 96, 112, 128, 144, 160, 192, 256]


@pytest.mark.parametrize("order", ORDERS)
def test_hadamard_matrices_are_orthonormal_with_equal_magnitudes(order):
    h = hadamard(order)
    assert torch.allclose(h @ h.T, torch.eye(order, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(h.abs(), torch.full_like(h, order**-0.5))


@pytest.mark.parametrize("order", [0, 3, 6, 10, 18, 50, 92])
def test_orders_without_a_construction_are_refused(order):
    assert not is_hadamard_order(order)
    with pytest.raises(ValueError, match="order"):
        hadamard(order)


@pytest.mark.parametrize("order", [2, 16, 128, 256])
def test_hadamard_commutes_with_bit_reversal(order):
    """H Pbr = Pbr H for powers of two, so the order of the factors does not matter."""
    h, place = hadamard(order), bit_reversal(order)
    assert torch.equal(h[:, place], h[place, :])
    assert torch.equal(place[place], torch.arange(order))


@pytest.mark.parametrize("order", ORDERS)
def test_bit_reversal_is_a_permutation(order):
    assert sorted(bit_reversal(order).tolist()) == list(range(order))


@given(st.integers(1, 3), st.sampled_from([8, 16, 32]), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_eigenbases_are_canonical(heads, dim, seed):
    x = torch.randn(heads, 3 * dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    c = x.mT @ x
    values, vectors = eigenbasis(c)
    assert torch.allclose(vectors @ torch.diag_embed(values) @ vectors.mT, c, atol=1e-8 * float(c.abs().max()))
    assert bool((values.diff(dim=-1) <= 1e-9).all()), "descending"
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    assert bool((largest > 0).all()), "the largest component is positive"


def layer(dim: int) -> AttentionLayer:
    return AttentionLayer(0, "full_attention", 6, 2, dim, "q", "k", "v", "o", None)


@pytest.mark.parametrize("dim", [16, 48, 64, 80, 96, 128])
@pytest.mark.parametrize(
    "rotation",
    [
        Hadamard(),
        BlockHadamard(block_size=16),
        Spectral(target="query"),
        Spectral(target="query", scope="layer"),
        Spectral(target="query", hadamard=False),
        Spectral(target="query", permutation="none"),
        Spectral(target="query", eigenbasis=False),
    ],
    ids=str,
)
def test_solved_rotations_are_orthogonal_and_per_head(dim, rotation):
    x = torch.randn(2, 4 * dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(dim))
    r = solve_rotation(rotation, layer(dim), x.mT @ x)
    assert r.shape == (2, dim, dim)
    assert inverse_error(r.float(), None) < 1e-5
    shared = getattr(rotation, "scope", "layer") == "layer" or not getattr(rotation, "eigenbasis", False)
    assert torch.equal(r[0], r[1]) == shared


def test_the_identity_has_no_matrix():
    assert solve_rotation(Identity(), layer(64), None) is None


def test_statistics_are_those_of_the_definitions(small_model):
    """C_Q and C_S of one forward pass equal Q^T Q and (S V)^T (S V), S materialised here, in float64."""
    model = load_model(small_model, OBSERVER)
    ids = torch.randint(2, 4000, (2, 50), generator=torch.Generator().manual_seed(0))
    seen = {}

    class Keeper(Recorder):
        def observe(self, index, q, k, v, out, scaling):
            seen.setdefault(index, []).append((q.double(), k.double(), v.double(), scaling))
            super().observe(index, q, k, v, out, scaling)

    recorder = Keeper({0: 2, 1: 2}, frozenset({"query", "score_value", "key", "value"}), 1, 32, 8, 8)
    with torch.inference_mode(), recording(recorder):
        for row in ids:
            model.base_model(row[None], use_cache=False)
    for index in (0, 1):
        sums = {"query": 0, "score_value": 0, "key": 0, "value": 0}
        for q, k, v, scaling in seen[index]:
            grouped = q.unflatten(1, (2, 3))
            causal = torch.full((50, 50), -torch.inf, dtype=torch.float64).triu(1)
            s = (grouped @ k[:, :, None].mT * scaling + causal).softmax(-1)
            out = s @ v[:, :, None]
            sums["query"] = sums["query"] + torch.einsum("bkgtd,bkgte->kde", grouped, grouped) / 3
            sums["score_value"] = sums["score_value"] + torch.einsum("bkgtd,bkgte->kde", out, out) / 3
            sums["key"] = sums["key"] + torch.einsum("bktd,bkte->kde", k, k)
            sums["value"] = sums["value"] + torch.einsum("bktd,bkte->kde", v, v)
        for target, total in sums.items():
            ours = recorder.layers[index].moments[target].mean()
            assert ours.dtype == torch.float64
            assert torch.allclose(ours, total / 100, rtol=1e-4, atol=1e-6 * float(total.abs().max())), target
        sample = recorder.layers[index].sample()
        assert sample.k_SKTD.shape == (1, 2, 32, 32)
        assert torch.equal(sample.k_SKTD[0, :, :8].double(), seen[index][0][1][0, :, :8])
        assert torch.equal(sample.k_SKTD[0, :, 8:].double(), seen[index][0][1][0, :, -24:])


@given(st.lists(st.floats(0.1, 1), min_size=len(CANDIDATES), max_size=len(CANDIDATES), unique=True))
@settings(max_examples=50, deadline=None)
def test_search_ends_near_a_minimum_with_the_mildest_clip(errors):
    table = dict(zip(CANDIDATES, errors, strict=True))
    ratio, error = search(table.__getitem__)
    place = CANDIDATES.index(ratio)
    assert error == table[ratio]
    minima = [
        e
        for i, e in enumerate(errors)
        if e <= min(errors[max(i - 1, 0)], errors[min(i + 1, len(errors) - 1)]) and i <= place
    ]
    assert any(error <= m * (1 + SLACK) for m in minima)
    assert place + 1 == len(CANDIDATES) or errors[place + 1] > min(minima)


def test_search_finds_the_minimum_of_a_valley():
    for place in range(len(CANDIDATES)):
        assert search(lambda r, c=CANDIDATES[place]: 1 + (r - c) ** 2 * 1e4)[0] == CANDIDATES[place]


# -- schemes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", builtin_names())
def test_builtin_schemes_are_valid_and_named_as_their_files(name):
    scheme = load_scheme(name)
    assert scheme.name == name
    assert parse_scheme(scheme.model_dump(), name) == scheme


def test_any_field_can_be_set():
    scheme = load_scheme(
        "oscar-int2",
        [
            "key.rotation.scope=layer",
            "value.clip.ratio=0.9",
            "window.recent=128",
            "key.quantizer.bits=4",
            "value.clip.kind=none",
        ],
    )
    assert scheme.key.rotation.scope == "layer"
    assert scheme.value.clip.kind == "none"
    assert scheme.window.recent == 128
    assert scheme.key.quantizer.bits == 4


def test_changing_a_kind_drops_the_fields_of_the_old_one():
    scheme = load_scheme("oscar-int2", ["value.rotation.kind=hadamard"])
    assert scheme.value.rotation == Hadamard(apply="folded")


def test_folding_keys_is_refused_with_the_reason():
    with pytest.raises(SchemeError, match="RoPE"):
        load_scheme("oscar-int2", ["key.rotation.apply=folded"])


@pytest.mark.parametrize(
    ("head_dim", "overrides", "tokens", "expected"),
    [
        (128, [], 131072, 2.25 + 320 / 131072 * 13.75),
        (64, [], 32768, 2.5 + 320 / 32768 * 13.5),
        (128, ["key.quantizer.group_size=32"], 131072, 2.625 + 320 / 131072 * 13.375),
        (128, ["window.sink=0", "window.recent=0"], 100, 2.25),
        (128, [], 100, 16.0),
    ],
)
def test_bits_per_element(head_dim, overrides, tokens, expected):
    assert bits_per_element(load_scheme("oscar-int2", overrides), head_dim, tokens) == pytest.approx(expected)
