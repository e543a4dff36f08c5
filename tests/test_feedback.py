"""Error-feedback rounding: the documented integer arithmetic, done naively, and what it is for."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompile.codec import RowFormat, RowTables, dequantize_rows, feedback_codes, feedback_factor, quantize_rows
from kvcompile.codec.feedback import ERROR_LIMIT, FACTOR_LIMIT, FACTOR_STEP
from kvcompile.codec.quantizer import _grid
from kvcompile.kernels import cpu_encode

HEADS, TOKENS = 2, 32
CODERS = [feedback_codes, cpu_encode.feedback_codes]  # the latter is the former where there is no C compiler


def metric(dim: int, seed: int, heads: int = HEADS, decay: float = 1.5) -> torch.Tensor:
    """Second moments ``[K, D, D]`` of rows whose channels are strongly correlated."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(heads, dim, dim, dtype=torch.float64, generator=generator)).Q
    spectrum = torch.arange(1, dim + 1, dtype=torch.float64) ** -decay
    return (basis * spectrum) @ basis.mT


def random_rows(dim: int, seed: int, tokens: int = TOKENS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(HEADS, tokens, dim, generator=generator) * torch.linspace(0.2, 3, dim) + 0.5
    return x.bfloat16().float()


def sequential_codes(x: torch.Tensor, fmt: RowFormat, factor: torch.Tensor) -> torch.Tensor:
    """The manifest's words as loops over rows and channels; sums of integers in Python, the rest in single float32 steps."""
    _, scale, zero = _grid(x, fmt)
    levels = 2**fmt.bits - 1
    codes = torch.empty(x.shape, dtype=torch.uint8)
    for head in range(x.shape[0]):
        steps = [[int(v) for v in row] for row in (factor[head] * 64).tolist()]
        for t in range(x.shape[1]):
            by_token = fmt.axis == "token"
            places = [
                (head, t, c // fmt.group_size) if by_token else (head, t // fmt.group_size, c)
                for c in range(x.shape[2])
            ]
            delta = 2.0 ** (math.floor(math.log2(max(float(scale[p]) for p in places))) - 6)
            errors: list[int] = []
            for i, place in enumerate(places):
                fed = torch.tensor(float(sum(e * steps[j][i] for j, e in enumerate(errors))))
                s, z, exact = scale[place], zero[place], x[head, t, i]
                code = round(min(max(float((exact - fed * (delta / 64)) / s + z), 0.0), float(levels)))
                left = float((((code - z) * s) - exact) / delta)
                errors.append(max(-ERROR_LIMIT, min(ERROR_LIMIT, round(left))))
                codes[head, t, i] = code
    return codes


@st.composite
def fed_formats(draw):
    axis = draw(st.sampled_from(["token", "channel"]))
    dim = draw(st.sampled_from([8, 24, 40, 64]))
    groups = [dim, dim // 2] if axis == "token" else [16, 32]
    return RowFormat(
        dim, draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from(groups)), axis=axis,
        zero_point=draw(st.sampled_from(["float", "integer"])), rounding="error_feedback",
    )  # fmt: skip


@given(fed_formats(), st.integers(0, 10_000), st.sampled_from([0.05, 0.2, 1.0]), st.integers(-20, 20))
@settings(max_examples=25, deadline=None)
def test_blocked_codes_are_those_of_the_sequential_definition(fmt, seed, damping, exponent):
    """Every coder, any width (also no multiple of the block), any magnitude: the same codes, channel by channel."""
    x = random_rows(fmt.head_dim, seed) * 2.0**exponent
    factor = feedback_factor(metric(fmt.head_dim, seed), damping)
    expected = sequential_codes(x, fmt, factor)
    for coder in CODERS:
        assert torch.equal(quantize_rows(x, fmt, RowTables(factor), coder).codes, expected), coder.__module__


@pytest.mark.parametrize("coder", CODERS, ids=["codec", "cpu"])
@pytest.mark.parametrize("bits", [2, 4])
def test_sums_are_exact_at_their_largest(bits, coder):
    """256 channels, factors and (at 4 bits) errors at their limits: what is fed forward still is a sum below 2^24."""
    fmt = RowFormat(256, bits, 256, rounding="error_feedback")
    signs = torch.randn(1, 256, 256, generator=torch.Generator().manual_seed(0)).sign()
    factor = (signs * FACTOR_LIMIT * FACTOR_STEP).triu(1)
    x = random_rows(256, 1, tokens=3)[:1]
    assert torch.equal(quantize_rows(x, fmt, RowTables(factor), coder).codes, sequential_codes(x, fmt, factor))


@pytest.mark.parametrize("coder", CODERS, ids=["codec", "cpu"])
@given(fed_formats(), st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_without_a_factor_it_is_nearest_rounding(coder, fmt, seed):
    x = random_rows(fmt.head_dim, seed)
    zeros = torch.zeros(HEADS, fmt.head_dim, fmt.head_dim)
    nearest = RowFormat(**{**vars(fmt), "rounding": "nearest"})
    ours, theirs = quantize_rows(x, fmt, RowTables(zeros), coder), quantize_rows(x, nearest)
    assert torch.equal(ours.codes, theirs.codes)
    assert torch.equal(ours.scale, theirs.scale)
    assert torch.equal(ours.zero, theirs.zero)


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("dim", [24, 64, 128])
def test_the_metric_error_falls(dim, bits, axis):
    """Under a correlated metric; the plain squared error rises, or nothing would have been traded."""
    m = metric(dim, dim)
    fed = RowFormat(dim, bits, dim if axis == "token" else 16, axis=axis, rounding="error_feedback")
    nearest = RowFormat(**{**vars(fed), "rounding": "nearest"})
    x = random_rows(dim, bits, tokens=128)

    def errors(fmt, tables):
        e = (dequantize_rows(quantize_rows(x, fmt, tables), fmt, tables) - x).double()
        return float(((e @ m) * e).sum()), float(e.square().sum())

    with_feedback = errors(fed, RowTables(feedback_factor(m, 0.1)))
    without = errors(nearest, RowTables())
    assert with_feedback[0] < 0.8 * without[0]
    assert with_feedback[1] > without[1]


def test_feedback_keeps_heads_apart():
    """Each KV head is rounded under its own metric."""
    fmt = RowFormat(32, 2, 32, rounding="error_feedback")
    factor = feedback_factor(metric(32, 1), 0.1)
    x = random_rows(32, 2)
    codes = quantize_rows(x, fmt, RowTables(factor)).codes
    assert torch.equal(codes[1:], quantize_rows(x[1:], fmt, RowTables(factor[1:])).codes)
    assert not torch.equal(codes, quantize_rows(x, fmt, RowTables(factor.flip(0))).codes)


# -- the factor --------------------------------------------------------------------------------------------------------


@given(st.sampled_from([4, 24, 64]), st.integers(0, 1000), st.sampled_from([0.05, 0.2, 2.0]), st.floats(1e-9, 1e9))
@settings(max_examples=30, deadline=None)
def test_factors_are_strictly_upper_in_steps_and_know_no_unit(dim, seed, damping, unit):
    m = metric(dim, seed)
    factor = feedback_factor(m, damping)
    assert factor.dtype == torch.float32
    assert torch.equal(factor, factor.triu(1))
    assert torch.equal(factor * 64, (factor * 64).round())
    assert float(factor.abs().max()) <= FACTOR_LIMIT * FACTOR_STEP < 2
    rescaled = feedback_factor(m * unit, damping)
    assert float((factor - rescaled).abs().max()) <= FACTOR_STEP, "at most a tie falls otherwise"


@pytest.mark.parametrize("dim", [8, 24, 64])
def test_factors_reconstruct_a_well_conditioned_metric(dim):
    """M + damping = (I + U) D (I + U)^T with a diagonal D, to what steps of 1/64 allow."""
    m, damping = metric(dim, 5, decay=0.5), 0.2
    damped = m / m.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] + damping * torch.eye(dim, dtype=torch.float64)
    a = torch.eye(dim, dtype=torch.float64) + feedback_factor(m, damping).double()
    d = torch.linalg.solve(a, torch.linalg.solve(a, damped).mT)
    diagonal = d.diagonal(dim1=-2, dim2=-1)
    assert bool((diagonal > 0).all())
    assert torch.allclose(a @ torch.diag_embed(diagonal) @ a.mT, damped, atol=0.03 * dim**0.5)
    off = d - torch.diag_embed(diagonal)
    assert float(off.abs().max()) < 4 * FACTOR_STEP * float(diagonal.max())


def test_a_diagonal_metric_has_no_feedback():
    m = torch.diag_embed(torch.linspace(0.1, 5, 16, dtype=torch.float64)).expand(2, -1, -1)
    assert torch.equal(feedback_factor(m, 0.2), torch.zeros(2, 16, 16))


def test_more_damping_is_less_feedback():
    m = metric(48, 3)
    sizes = [float(feedback_factor(m, damping).abs().sum()) for damping in (0.01, 0.1, 1.0, 10.0, 100.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 0.05 * sizes[0]
