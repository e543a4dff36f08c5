"""The normative codec: what it must satisfy for any input, and the byte layout, decoded independently with numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompile.codec import (
    PAGE_TOKENS,
    PageFormat,
    RowFormat,
    clip_rows,
    decode_pages,
    dequantize_rows,
    encode_pages,
    pack_codes,
    quantize_rows,
    unpack_codes,
)
from tests.layers import random_layer

FORMATS = [
    (16, 2, 16), (64, 2, 32), (80, 4, 16), (96, 2, 32), (128, 2, 128), (128, 2, 64), (128, 4, 128), (256, 2, 32), (64, 1, 16),
]  # fmt: skip


@st.composite
def formats(draw, clip=True):
    dim, bits, group = draw(st.sampled_from(FORMATS))
    ratio = draw(st.sampled_from([0.5, 0.84, 0.92, 0.96, 1.0])) if clip else 1.0
    return RowFormat(dim, bits, group, ratio)


def rows_of(fmt: RowFormat, seed: int, count: int = 7, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, fmt.head_dim, generator=generator) * scale
    x[:, seed % fmt.head_dim] *= 20  # an outlier channel
    return x.bfloat16()


@given(formats(), st.integers(0, 10_000), st.sampled_from([1e-20, 1e-3, 1.0, 1e4, 1e30]))
@settings(max_examples=80, deadline=None)
def test_error_is_at_most_half_a_step_of_the_clipped_row(fmt, seed, scale):
    x = rows_of(fmt, seed, scale=scale)
    rows = quantize_rows(x, fmt)
    assert int(rows.codes.max()) <= 2**fmt.bits - 1
    decoded = dequantize_rows(rows, fmt)
    clipped = clip_rows(x.float(), fmt.clip_index)
    limit = rows.scale.float().repeat_interleave(fmt.group_size, -1)
    # half a step, and what rounding scale and zero point to bf16 moves the ends of the grid by
    assert bool(((decoded - clipped).abs() <= limit * (0.5 + 2**fmt.bits * 2**-6)).all())


@given(formats(clip=False), st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_encoding_is_idempotent(fmt, seed):
    """What was decoded encodes to the same bytes (without clipping, which by design changes a row again)."""
    encoded = quantize_rows(rows_of(fmt, seed), fmt)
    again = quantize_rows(dequantize_rows(encoded, fmt), fmt)
    decoded, twice = dequantize_rows(encoded, fmt), dequantize_rows(again, fmt)
    assert torch.equal(encoded.codes, again.codes)
    assert torch.allclose(decoded, twice, rtol=2**-7, atol=float(decoded.abs().max()) * 2**-7)


@given(st.integers(2, 300), st.floats(0.01, 1.0), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_clip_is_the_order_statistic(dim, ratio, seed):
    x = torch.randn(3, dim, generator=torch.Generator().manual_seed(seed))
    index = min(int(ratio * dim), dim - 1)
    tau = x.abs().sort(dim=-1).values[:, index : index + 1]
    assert torch.equal(clip_rows(x, index), x.clamp(-tau, tau))


@given(st.sampled_from([2, 4]), st.integers(1, 40), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_packing_round_trips(bits, bytes_per_row, seed):
    dim = bytes_per_row * 8 // bits
    codes = torch.randint(0, 2**bits, (5, dim), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = pack_codes(codes, bits)
    assert packed.shape == (5, bytes_per_row)
    assert torch.equal(unpack_codes(packed, bits), codes)


def test_packing_order_is_that_of_the_public_engines():
    """OSCAR: byte j = c[j] | c[j+D/4]<<2 | c[j+D/2]<<4 | c[j+3D/4]<<6; SAW-INT4: c[j] | c[j+D/2]<<4."""
    c = torch.randint(0, 4, (128,), dtype=torch.uint8)
    assert torch.equal(pack_codes(c, 2), c[:32] | c[32:64] << 2 | c[64:96] << 4 | c[96:] << 6)
    c = torch.randint(0, 16, (128,), dtype=torch.uint8)
    assert torch.equal(pack_codes(c, 4), c[:64] | c[64:] << 4)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-30, 1e30, -0.0])
def test_constant_rows_come_back(value):
    """A constant group has no range: no NaN, and the value itself to BF16."""
    fmt = RowFormat(64, 2, 32)
    decoded = dequantize_rows(quantize_rows(torch.full((2, 64), value).bfloat16(), fmt), fmt)
    assert torch.allclose(decoded, torch.full((2, 64), value), rtol=2**-7, atol=0)


def test_stored_zero_points_have_one_sign():
    x = torch.zeros(2, 64)
    x[0, 3] = x[1, 5] = 1.0
    x[1, 7] = -0.0
    zero = quantize_rows(x, RowFormat(64, 2, 32)).zero
    assert torch.equal(zero.view(torch.int16), torch.zeros_like(zero.view(torch.int16)))
    rounded = quantize_rows(x + 0.1, RowFormat(64, 2, 64, zero_point="integer")).zero  # 0 - round(0.3)
    assert torch.equal(rounded.view(torch.int16), torch.zeros_like(rounded.view(torch.int16)))


@pytest.mark.parametrize(("dim", "bits", "group"), FORMATS)
def test_pages_decoded_by_hand(dim, bits, group):
    """A reader written from the layout's description alone, in numpy, sees the same numbers."""
    fmt = PageFormat(RowFormat(dim, bits, group, 0.96), RowFormat(dim, 2, group, 0.92))
    k, v = (torch.randn(PAGE_TOKENS, dim, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (1, 2))
    page = encode_pages(k, v, fmt).numpy()
    ours = decode_pages(encode_pages(k, v, fmt), fmt)
    n_k, n_v, groups = 8 // bits, 4, dim // group
    k_end = 64 * dim // n_k
    v_end = k_end + 64 * dim // n_v
    meta = page[v_end:].view("<u4").reshape(2, groups, 64)
    scale, zero = ((part.astype(np.uint32) << 16).view("<f4") for part in (meta & 0xFFFF, meta >> 16))
    for token in range(0, 64, 9):
        for channel in range(dim):
            k_code = page[token * dim // n_k + channel % (dim // n_k)] >> bits * (channel // (dim // n_k)) & (
                2**bits - 1
            )
            v_code = page[k_end + channel % (dim // n_v) * 64 + token] >> 2 * (channel // (dim // n_v)) & 3
            g = channel // group
            assert (k_code - zero[0, g, token]) * scale[0, g, token] == float(ours[0][token, channel])
            assert (v_code - zero[1, g, token]) * scale[1, g, token] == float(ours[1][token, channel])
    assert page.nbytes == fmt.page_bytes


def test_a_page_of_the_reference_geometry_has_4608_bytes():
    fmt = PageFormat(RowFormat(128, 2, 128), RowFormat(128, 2, 128))
    assert fmt.page_bytes == 4608
    assert fmt.page_bytes * 8 / (2 * 64 * 128) == 2.25


def test_layer_order_is_sink_pages_ring():
    fmt = PageFormat(RowFormat(64, 2, 64), RowFormat(64, 2, 64))
    layer = random_layer(fmt, 2, [5, 64 + 3 * 64 + 100, 0], sink=64, ring=128, seed=0)
    k, v = layer.dense_row(0)
    assert k.shape == v.shape == (2, 5, 64)
    assert torch.equal(k, layer.sink_k_BKSD[0, :, :5].float())
    assert layer.dense_row(1)[0].shape[1] == 64 + 3 * 64 + 100
    assert layer.dense_row(2)[0].shape[1] == 0
