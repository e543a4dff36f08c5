"""Every format that a scheme can ask for: what its rows and pages promise, over all axes, bits, zero points and norms."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompile.codec import (
    PageFormat,
    PageTables,
    RowFormat,
    RowTables,
    decode_pages,
    dequantize_rows,
    encode_pages,
    quantize_rows,
    token_norms,
)
from kvcompile.codec.quantizer import LLOYD_MAX_LEVELS, nearest_centroids
from kvcompile.scheme import parse_scheme
from kvcompile.scheme.bits import history_bits
from tests.layers import random_tables

HEADS, TOKENS = 3, 64


@st.composite
def row_formats(draw, half="key", norms=True):
    dim = draw(st.sampled_from([16, 24, 40, 64, 80, 128]))
    bits = draw(st.sampled_from([1, 2, 4]))
    axis = draw(st.sampled_from(["token", "channel"]))
    groups = [g for g in (16, 32, 64) if dim % g == 0] or [dim]
    zero = draw(st.sampled_from(["float", "integer", "none"] if axis == "token" else ["float", "integer"]))
    scale = draw(st.sampled_from(["none", "l2", "rsqrt", "max", "mean_abs"])) if norms and half == "key" else "none"
    return RowFormat(
        dim,
        bits,
        draw(st.sampled_from(groups if axis == "token" else [16, 32, 64])),
        clip_ratio=draw(st.sampled_from([0.9, 1.0])) if axis == "token" else 1.0,
        axis=axis,
        zero_point=zero,
        rounding=draw(st.sampled_from(["nearest", "nearest", "error_feedback"])) if zero != "none" else "nearest",
        token_scale=scale,
        norm_scope=draw(st.sampled_from(["head", "token"])),
        centroids=draw(st.sampled_from([0, 0, 5])) if scale == "none" else 0,
    )


def random_rows(dim: int, seed: int, scale: float = 1.0, tokens: int = TOKENS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(HEADS, tokens, dim, generator=generator) * torch.linspace(0.2, 3, dim) + 0.5
    return (x * scale).bfloat16()


def nearest_codes(x: torch.Tensor, fmt: RowFormat) -> torch.Tensor:
    """Codes in single float32 steps, one element after another."""
    codes = torch.empty(x.shape, dtype=torch.uint8)
    scales, zeros = {}, {}
    for head in range(x.shape[0]):
        for t in range(x.shape[1]):
            for c in range(x.shape[2]):
                if fmt.axis == "token":
                    first = c // fmt.group_size * fmt.group_size
                    group, place = x[head, t, first : first + fmt.group_size], (head, t, c // fmt.group_size)
                else:
                    first = t // fmt.group_size * fmt.group_size
                    group, place = x[head, first : first + fmt.group_size, c], (head, t // fmt.group_size, c)
                if place not in scales:
                    low, high = group.min(), group.max()
                    scales[place] = ((high - low) / (2**fmt.bits - 1)).bfloat16().float()
                    zero = 0 - low / scales[place]
                    zeros[place] = (zero.round() if fmt.zero_point == "integer" else zero).bfloat16().float()
                y = (x[head, t, c] / scales[place] + zeros[place]).clamp(0, 2**fmt.bits - 1)
                codes[head, t, c] = round(float(y))  # ties to even, as the codec
    return codes


@given(row_formats(), st.integers(0, 10_000), st.sampled_from([1e-6, 1.0, 1e5]))
@settings(max_examples=120, deadline=None)
def test_what_decodes_is_near_what_was_stored(fmt, seed, scale):
    """Finite, of the right shapes, and no worse than a grid of this many levels over the row's whole range."""
    x, tables = random_rows(fmt.head_dim, seed, scale), random_tables(PageFormat(fmt, fmt), HEADS, seed).key
    rows = quantize_rows(x, fmt, tables)
    assert rows.codes.shape == x.shape
    assert rows.codes.dtype == torch.uint8
    assert int(rows.codes.max()) < 2**fmt.bits
    grid = (HEADS, TOKENS, fmt.num_groups) if fmt.axis == "token" else (HEADS, TOKENS // fmt.group_size, fmt.head_dim)
    assert rows.scale.shape == grid
    assert (rows.zero is None) == (fmt.zero_point == "none")
    assert (rows.norm is None) == (fmt.token_scale == "none")
    assert (rows.centroid is None) == (fmt.centroids == 0)
    decoded = dequantize_rows(rows, fmt, tables)
    assert decoded.isfinite().all()
    if fmt.rounding == "nearest" and not fmt.centroids:
        bound = float(x.float().abs().max()) * (2.0 if fmt.zero_point == "none" or fmt.bits == 1 else 1.3)
        assert float((decoded - x.float()).abs().max()) <= bound


@given(row_formats(), st.integers(0, 10_000))
@settings(max_examples=80, deadline=None)
def test_pages_hold_exactly_what_rows_decode_to(fmt, seed):
    """Encoding into a page and reading it back loses nothing: the page's decoder gives what the rows' decoder gives."""
    value = RowFormat(fmt.head_dim, 4, 8 if fmt.head_dim % 16 else 16, 0.95)
    page = PageFormat(fmt, value)
    tables = random_tables(page, HEADS, seed)
    k, v = random_rows(fmt.head_dim, seed), random_rows(fmt.head_dim, seed + 1)
    encoded = encode_pages(k, v, page, tables)
    assert encoded.shape == (HEADS, page.page_bytes)
    for half, rows, row_format, table in zip(
        decode_pages(encoded, page, tables), (k, v), (fmt, value), (tables.key, tables.value), strict=True
    ):
        assert torch.equal(half, dequantize_rows(quantize_rows(rows, row_format, table), row_format, table))


@given(row_formats(norms=False), row_formats(half="value"), st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_leading_dimensions_do_not_matter(key, value, seed):
    """A batch of pages is the pages one by one."""
    same = {"head_dim": key.head_dim, "group_size": key.group_size, "axis": key.axis}
    value = RowFormat(**{**vars(value), **same, "clip_ratio": 1.0, "zero_point": "float"})
    page = PageFormat(key, value)
    tables = random_tables(page, HEADS, seed)
    k, v = (torch.stack([random_rows(key.head_dim, seed + i) for i in half]) for half in ((0, 1), (2, 3)))
    together = encode_pages(k, v, page, tables)
    for i in range(2):
        assert torch.equal(together[i], encode_pages(k[i], v[i], page, tables))


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("zero_point", ["float", "integer"])
def test_codes_are_those_of_naive_loops(bits, axis, zero_point):
    fmt = RowFormat(24, bits, 8 if axis == "token" else 16, axis=axis, zero_point=zero_point)
    x = random_rows(24, bits, tokens=32).float()
    assert torch.equal(quantize_rows(x, fmt).codes, nearest_codes(x, fmt))


@given(row_formats(norms=False), st.integers(0, 10_000))
@settings(max_examples=80, deadline=None)
def test_a_float_zero_point_makes_encoding_idempotent(fmt, seed):
    """Promised for nearest rounding without clip, norm and centroids: decoded rows have the codes they came from."""
    fmt = RowFormat(fmt.head_dim, fmt.bits, fmt.group_size, axis=fmt.axis)
    rows = quantize_rows(random_rows(fmt.head_dim, seed), fmt)
    again = quantize_rows(dequantize_rows(rows, fmt), fmt)
    assert torch.equal(rows.codes, again.codes)


# -- sizes -------------------------------------------------------------------------------------------------------------


@given(row_formats(), row_formats(half="value"), st.sampled_from([64, 128]))
@settings(max_examples=100, deadline=None)
def test_pages_are_as_large_as_the_formula_says(key, value, tokens):
    """Section sizes add up without a hole, and their bits per element are the mean of the halves' `history_bits`."""
    value = RowFormat(**{**vars(value), "head_dim": key.head_dim, "group_size": key.group_size, "axis": key.axis})
    page = PageFormat(key, value, tokens)
    end = 0
    for offset, size in page.sections.values():
        assert offset == end
        end += size
    assert page.page_bytes == end

    def bits(row: RowFormat) -> float:
        metadata = 16 if row.zero_point == "none" else 32
        per_token = 16 * ((row.token_scale != "none") + (row.centroids > 0))
        return row.bits + metadata / row.group_size + per_token / row.head_dim

    assert page.bits_per_element == pytest.approx((bits(key) + bits(value)) / 2)


def test_the_scheme_counts_what_the_page_takes():
    """`scheme.bits` (from the scheme) and `PageFormat` (from the bytes) agree for every field that costs anything."""
    from kvcompile.artifact import row_record

    plain = {"name": "x", "summary": "x", "value": {}}
    rows = [
        {"quantizer": {"bits": 1, "group_size": 32}},
        {"quantizer": {"axis": "channel", "group_size": 32, "zero_point": "integer"}, "token_scale": {"kind": "l2"}},
        {"quantizer": {"zero_point": "none", "levels": "lloyd_max", "bits": 4}},
        {"centroids": 4, "quantizer": {"rounding": "error_feedback"}},
    ]
    for head_dim in (64, 80, 128):
        for document in rows:
            group = 16 if head_dim % 32 else document["quantizer"].get("group_size", 32)
            document = {**document, "quantizer": {**document["quantizer"], "group_size": group}}
            row = parse_scheme({**plain, "key": document}, "test").key
            fmt = row_record(0, "key", row, head_dim, 1.0, False).row_format(head_dim)
            value = RowFormat(head_dim, 2, 16)
            page = PageFormat(fmt, value)
            assert page.bits_per_element == pytest.approx((history_bits(row, head_dim) + 2 + 32 / 16) / 2)


# -- zero points and levels --------------------------------------------------------------------------------------------


@given(st.sampled_from([1, 2, 4]), st.sampled_from(["token", "channel"]), st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_integer_zero_points_are_integers_of_one_sign_bit(bits, axis, seed):
    x = random_rows(32, seed) * 2.0 ** (seed % 7)
    x[0, :, :] += seed % 5
    zero = quantize_rows(x, RowFormat(32, bits, 16, axis=axis, zero_point="integer")).zero
    assert torch.equal(zero.float(), zero.float().round())
    negative_zero = (zero == 0) & (zero.view(torch.int16) != 0)
    assert not negative_zero.any()


def test_an_integer_zero_point_represents_zero_exactly():
    """What it is for: where a group spans 0, one of its levels is 0."""
    x = random_rows(64, 3) - 0.5
    fmt = RowFormat(64, 4, 32, zero_point="integer")
    rows = quantize_rows(x, fmt)
    levels = (torch.arange(16)[:, None, None, None] - rows.zero.float()) * rows.scale.float()
    assert (levels == 0).any(0).all()
    plain = quantize_rows(x, RowFormat(64, 4, 32))
    levels = (torch.arange(16)[:, None, None, None] - plain.zero.float()) * plain.scale.float()
    assert not (levels == 0).any(0).all()


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_lloyd_max_levels_are_a_fixed_point_for_a_normal_variable(bits):
    """Each level is the mean of a standard normal variable over the interval in which it is the nearest level."""
    levels = LLOYD_MAX_LEVELS[bits]
    assert len(levels) == 2**bits
    assert list(levels) == [-x for x in reversed(levels)]
    bounds = [-math.inf, *((a + b) / 2 for a, b in pairwise(levels)), math.inf]

    def density(x: float) -> float:
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def mass(x: float) -> float:
        return (1 + math.erf(x / math.sqrt(2))) / 2

    for level, low, high in zip(levels, bounds[:-1], bounds[1:], strict=True):
        mean = (density(low) - density(high)) / (mass(high) - mass(low))
        assert level == pytest.approx(mean, abs=2e-6)


@pytest.mark.parametrize(("bits", "distortion"), [(1, 0.3634), (2, 0.1175), (4, 0.009497)])
def test_lloyd_max_coding_has_the_distortion_of_max_1960(bits, distortion):
    """Relative squared error on Gaussian rows: the table of Max (1960), which TurboQuant builds on."""
    x = torch.randn(4000, 256, generator=torch.Generator().manual_seed(bits)).bfloat16()
    fmt = RowFormat(256, bits, 256, zero_point="none")
    error = dequantize_rows(quantize_rows(x, fmt), fmt) - x.float()
    assert float(error.square().sum() / x.float().square().sum()) == pytest.approx(distortion, rel=0.02)


@given(st.sampled_from([1, 2, 4]), st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_lloyd_max_codes_are_the_nearest_levels(bits, seed):
    fmt = RowFormat(40, bits, 8, zero_point="none")
    x = random_rows(40, seed)
    rows = quantize_rows(x, fmt)
    rms = x.float().unflatten(-1, (5, 8)).square().mean(-1).sqrt()
    assert torch.allclose(rows.scale.float(), rms, rtol=2**-8)
    grid = torch.tensor(LLOYD_MAX_LEVELS[bits]) * rows.scale.float().repeat_interleave(8, -1)[..., None]
    distance = (x.float()[..., None] - grid).abs()
    chosen = distance.gather(-1, rows.codes.long()[..., None])[..., 0]
    assert bool((chosen <= distance.amin(-1) + 1e-6 * distance.amax(-1)).all())


# -- norms and centroids -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["head", "token"])
def test_norms_are_those_of_table_10(scope):
    x = random_rows(80, 1, tokens=5).double()
    for head in range(HEADS):
        for t in range(5):
            seen = x[head, t] if scope == "head" else x[:, t].flatten()
            squares = sum(float(y) ** 2 for y in seen)
            expected = {
                "l2": math.sqrt(squares),
                "rsqrt": math.sqrt(squares + 1e-8),
                "max": max(abs(float(y)) for y in seen),
                "mean_abs": sum(abs(float(y)) for y in seen) / len(seen),
            }
            for kind, norm in expected.items():
                ours = token_norms(x.float(), kind, scope)
                assert ours.shape == (HEADS, 5)
                assert ours.dtype == torch.bfloat16
                assert float(ours[head, t]) == pytest.approx(norm, rel=2**-8)


@pytest.mark.parametrize("kind", ["l2", "rsqrt", "max", "mean_abs"])
def test_scaled_rows_do_not_care_how_long_tokens_are(kind):
    """Powers of two move into the norm exactly: same codes, same grid; a token of zeros stays zero."""
    fmt = RowFormat(32, 2, 16, axis="channel", token_scale=kind)
    x = random_rows(32, 5)
    x[:, 7] = 0
    lengths = 2.0 ** torch.arange(TOKENS).remainder(9).sub(4)
    plain, scaled = quantize_rows(x, fmt), quantize_rows(x * lengths[:, None].bfloat16(), fmt)
    assert torch.equal(plain.codes, scaled.codes)
    assert torch.equal(plain.scale, scaled.scale)
    ratio = scaled.norm.float() / plain.norm.float()
    others = torch.arange(TOKENS) != 7
    assert torch.allclose(ratio[:, others], lengths[others].expand(HEADS, -1), rtol=1e-6)
    assert dequantize_rows(scaled, fmt)[:, 7].abs().max() < 1e-4, "rsqrt's epsilon is a norm of 1e-4"


def test_one_centroid_is_centring():
    """With C = 1 residual coding subtracts the same row from every token: the codes of centred rows, the row added back."""
    x = random_rows(64, 9)
    mean = x.float().mean(1, keepdim=True)
    fmt = RowFormat(64, 4, 64)
    coded = quantize_rows(x, RowFormat(64, 4, 64, centroids=1), RowTables(centroids=mean))
    centred = quantize_rows(x.float() - mean, fmt)
    assert torch.equal(coded.codes, centred.codes)
    assert torch.equal(coded.scale, centred.scale)
    assert torch.equal(coded.centroid, torch.zeros(HEADS, TOKENS, dtype=torch.int16))
    decoded = dequantize_rows(coded, RowFormat(64, 4, 64, centroids=1), RowTables(centroids=mean))
    assert torch.equal(decoded, dequantize_rows(centred, fmt) + mean)


@given(st.integers(1, 9), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_centroids_are_the_nearest_of_their_own_head(count, seed):
    x = random_rows(16, seed, tokens=20).float()
    table = torch.randn(HEADS, count, 16, generator=torch.Generator().manual_seed(seed))
    found = nearest_centroids(x, table)
    for head in range(HEADS):
        for t in range(20):
            distances = [float((x[head, t].double() - table[head, c].double()).square().sum()) for c in range(count)]
            assert distances[int(found[head, t])] <= min(distances) * (1 + 1e-5)


def test_centroids_of_keys_and_values_are_stored_apart():
    """Both indices of a page: a key's table must not be read for values."""
    row = RowFormat(32, 4, 32, centroids=7)
    page = PageFormat(row, row)
    tables = random_tables(page, HEADS, 1)
    swapped = PageTables(tables.value, tables.key)
    k, v = random_rows(32, 1), random_rows(32, 2)
    encoded = encode_pages(k, v, page, tables)
    right, wrong = decode_pages(encoded, page, tables), decode_pages(encoded, page, swapped)
    for half, other, rows in zip(right, wrong, (k, v), strict=True):
        assert float((half - rows.float()).abs().mean()) < 0.5 * float((other - rows.float()).abs().mean())
