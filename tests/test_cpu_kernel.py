"""The CPU kernels mean the codec: `attend_layer` whatever the format, the windows and the page table; `feedback_codes`."""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcompile.codec import LayerCache, PageFormat, RowFormat, attend_layer, quantize_rows
from kvcompile.errors import CacheError
from kvcompile.kernels import compiler, cpu, cpu_encode
from kvcompile.runtime.backend import CodecBackend, CpuBackend, choose_backend
from tests.layers import random_layer, random_tables

needs_compiler = pytest.mark.skipif(not cpu.is_available(), reason="no working C compiler")


def random_queries(layer: LayerCache, queries: int, sharpness: float = 1.0) -> torch.Tensor:
    batch, num_kv_heads = layer.sink_k_BKSD.shape[:2]
    generator = torch.Generator().manual_seed(7)
    return sharpness * torch.randn(batch, num_kv_heads * queries, layer.fmt.head_dim, generator=generator)


def check(layer: LayerCache, q_BHD: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Relative error of every row and head. Rounding a logit of 100 alone changes its weight by 4e-6 in both."""
    scaling = layer.fmt.head_dim**-0.5
    expected, expected_lse = attend_layer(q_BHD, layer, scaling)
    actual, actual_lse = cpu.attend(q_BHD, layer, scaling)
    assert actual.dtype == actual_lse.dtype == torch.float32
    assert actual.shape == q_BHD.shape
    error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-20)
    assert error.max() < tolerance
    empty = layer.num_tokens_B == 0
    assert (actual_lse[empty] == -torch.inf).all() and not actual[empty].any()
    assert torch.allclose(actual_lse, expected_lse, rtol=tolerance / 5, atol=tolerance)


@needs_compiler
@pytest.mark.parametrize(
    ("head_dim", "key", "value", "queries"),
    [
        (16, (2, 16), (2, 16), 1),
        (16, (4, 4), (2, 8), 5),
        (64, (2, 64), (2, 64), 2),
        (64, (4, 16), (2, 32), 16),
        (80, (2, 80), (4, 80), 3),
        (80, (4, 40), (2, 16), 4),
        (96, (2, 32), (4, 48), 6),
        (128, (2, 128), (2, 128), 4),
        (128, (2, 32), (2, 64), 8),
        (128, (4, 128), (4, 128), 7),
        (256, (2, 64), (2, 256), 16),
        (256, (4, 256), (4, 32), 9),
    ],
)
def test_geometries(head_dim: int, key: tuple[int, int], value: tuple[int, int], queries: int) -> None:
    fmt = PageFormat(RowFormat(head_dim, *key, clip_ratio=0.96), RowFormat(head_dim, *value))
    layer = random_layer(fmt, 2, [70, 1500, 0, 3, 641], sink=5, ring=128, seed=head_dim)
    check(layer, random_queries(layer, queries))
    check(layer, random_queries(layer, queries, sharpness=20.0), tolerance=1e-4)


KIVI = {"axis": "channel", "group_size": 32}
NORMS = {"token_scale": "rsqrt", "norm_scope": "token", "zero_point": "integer"}


@needs_compiler
@pytest.mark.parametrize("tokens", [64, 128])
@pytest.mark.parametrize(
    ("head_dim", "key", "value", "queries"),
    [
        (16, {"bits": 2, "axis": "channel", "group_size": 16}, {"bits": 1, "group_size": 16}, 2),
        (64, {"bits": 1, "axis": "channel", "group_size": 64}, {"bits": 1, "group_size": 32}, 7),
        (64, {"bits": 1, "group_size": 64}, {"bits": 4, "group_size": 64, "zero_point": "integer"}, 1),
        (72, {"bits": 4, **KIVI}, {"bits": 2, "group_size": 8}, 3),
        (80, {"bits": 2, **KIVI, **NORMS}, {"bits": 4, "group_size": 80}, 3),
        (96, {"bits": 4, "axis": "channel", "group_size": 64, "token_scale": "max"}, {"bits": 2, "group_size": 96}, 6),
        (96, {"bits": 1, "group_size": 32, "token_scale": "l2"}, {"bits": 2, "group_size": 32}, 5),
        (128, {"bits": 2, **KIVI}, {"bits": 2, "group_size": 32}, 4),
        (128, {"bits": 4, **KIVI}, {"bits": 4, "group_size": 32}, 8),
        (128, {"bits": 2, **KIVI, **NORMS}, {"bits": 2, "group_size": 32, "zero_point": "integer"}, 5),
        (128, {"bits": 2, "group_size": 128, "rounding": "error_feedback"}, {"bits": 1, "group_size": 16}, 4),
        (128, {"bits": 1, **KIVI, "rounding": "error_feedback"}, {"bits": 2, "group_size": 64}, 4),
        (256, {"bits": 2, "axis": "channel", "group_size": 16}, {"bits": 4, "group_size": 256}, 8),
        (256, {"bits": 4, "group_size": 64, "token_scale": "mean_abs"}, {"bits": 1, "group_size": 128}, 2),
    ],
)
def test_formats(head_dim: int, key: dict, value: dict, queries: int, tokens: int) -> None:
    """Keys by channel, norms, integer zero points, one bit, pages of 64 and of 128 tokens, in many mixtures."""
    fmt = PageFormat(RowFormat(head_dim, **key), RowFormat(head_dim, **value), tokens)
    assert cpu.supports(fmt)
    layer = random_layer(fmt, 2, [70, 1500, 0, 3, 641], sink=5, ring=256, seed=head_dim)
    check(layer, random_queries(layer, queries))
    check(layer, random_queries(layer, queries, sharpness=20.0), tolerance=1e-4)


@needs_compiler
def test_one_group_of_tokens_per_page() -> None:
    fmt = PageFormat(RowFormat(128, 2, 128, axis="channel"), RowFormat(128, 2, 128), 128)
    layer = random_layer(fmt, 3, [2000, 128 * 5 + 64], sink=64, ring=128)
    check(layer, random_queries(layer, 4))


def test_what_is_left_to_the_codec() -> None:
    """A layer of a format without a kernel is attended by the codec, behind the same backend."""
    plain = RowFormat(64, 2, 64)
    for key, value in [
        (RowFormat(64, 2, 64, zero_point="none"), plain),
        (RowFormat(64, 2, 64, centroids=8), plain),
        (plain, RowFormat(64, 2, 64, centroids=8)),
        (plain, RowFormat(64, 2, 64, axis="channel")),
        (RowFormat(80, 1, 80), RowFormat(80, 2, 80)),
    ]:
        fmt = PageFormat(key, value)
        assert not cpu.supports(fmt)
        layer = random_layer(fmt, 2, [300, 40], sink=4, ring=128)
        q_BHD = random_queries(layer, 2)
        for ours, expected in zip(CpuBackend().attend(q_BHD, layer, 0.1), attend_layer(q_BHD, layer, 0.1), strict=True):
            assert torch.equal(ours, expected)
        with pytest.raises(CacheError, match="codec backend"):
            cpu.attend(q_BHD, layer, 0.1)


@needs_compiler
@pytest.mark.parametrize(
    ("num_tokens", "sink", "ring"),
    [
        ([0], 4, 64),
        ([1], 4, 64),
        ([64 * 9], 0, 0),  # nothing but pages
        ([4 + 64 * 8, 4 + 64 * 17, 0], 4, 0),
        ([63, 64, 65, 128], 0, 64),
        ([2, 4], 4, 0),  # nothing but sinks
        ([200, 17], 16, 192),  # no pages
        ([64 * n + 31 for n in range(0, 90, 11)], 64, 256),
        ([12000], 1, 64),
        ([1300, 900], 640, 640),  # windows longer than a block
    ],
)
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_histories(num_tokens: list[int], sink: int, ring: int, num_kv_heads: int) -> None:
    fmt = PageFormat(RowFormat(64, 2, 64), RowFormat(64, 2, 64))
    layer = random_layer(fmt, num_kv_heads, num_tokens, sink, ring, seed=sink + ring)
    check(layer, random_queries(layer, 2))


@needs_compiler
def test_threads_and_dtypes() -> None:
    fmt = PageFormat(RowFormat(64, 2, 64), RowFormat(64, 2, 64))
    layer = random_layer(fmt, 2, [3000, 40], sink=4, ring=64)
    q_BHD = random_queries(layer, 2)
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 7):
            torch.set_num_threads(n)
            check(layer, q_BHD)
            once, again = cpu.attend(q_BHD, layer, 0.1), cpu.attend(q_BHD, layer, 0.1)
            assert torch.equal(once[0], again[0]) and torch.equal(once[1], again[1])
    finally:
        torch.set_num_threads(threads)
    check(layer, q_BHD.bfloat16())
    check(layer, q_BHD.transpose(0, 1).contiguous().transpose(0, 1))
    wide = torch.cat([layer.table_BN, layer.table_BN], dim=1)
    check(replace(layer, table_BN=wide[:, : layer.table_BN.shape[1]]), q_BHD)


@needs_compiler
def test_constant_rows_and_large_logits() -> None:
    """Groups without range, and one token that takes all the weight."""
    fmt = PageFormat(RowFormat(64, 2, 64), RowFormat(64, 2, 64))
    layer = random_layer(fmt, 1, [700], sink=4, ring=64)
    layer.sink_k_BKSD[0, 0, 2] *= 1000
    check(layer, random_queries(layer, 2, sharpness=100.0), tolerance=1e-3)
    layer.pages_PKX.zero_()  # scale and zero point 0
    check(layer, random_queries(layer, 2))


@needs_compiler
def test_wrong_layers_are_refused() -> None:
    fmt = PageFormat(RowFormat(64, 2, 64), RowFormat(64, 2, 64))
    layer = random_layer(fmt, 2, [300], sink=4, ring=64)
    q_BHD = random_queries(layer, 1)
    with pytest.raises(CacheError, match="contiguous"):
        cpu.attend(q_BHD, replace(layer, pages_PKX=layer.pages_PKX[:, :, ::2]), 1.0)
    with pytest.raises(CacheError, match="bfloat16"):
        cpu.attend(q_BHD, replace(layer, sink_k_BKSD=layer.sink_k_BKSD.float()), 1.0)


@needs_compiler
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")
def test_one_openmp_runtime_and_denormals_live() -> None:
    """The library adds no second OpenMP runtime and does not flush denormals in the process."""
    program = """
import torch
from kvcompile.kernels import cpu

def runtimes():
    return {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.rsplit("/", 1)[-1]}

before = runtimes()
assert cpu.is_available()
assert not before or runtimes() == before, (before, runtimes())
assert torch.tensor([1e-40]).mul(0.5).item() > 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Nothing that was found out about compilers lasts into this test or out of it."""
    cached = (
        cpu.is_available,
        cpu._kernel,
        cpu_encode._function,
        compiler.load_library,
        compiler.find_compiler,
    )
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize(
    ("command", "message"),
    [("no-such-compiler", "Install GCC"), ("false", "Install GCC"), ("echo -n", "does not build with echo -n")],
)
def test_no_compiler(command: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", command)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not cpu.is_available()
    layer = random_layer(PageFormat(RowFormat(64, 2, 64), RowFormat(64, 2, 64)), 2, [9], sink=4, ring=64)
    with pytest.raises(CacheError, match=message):
        cpu.attend(random_queries(layer, 1), layer, 1.0)
    check_feedback(RowFormat(64, 2, 64, rounding="error_feedback"), torch.randn(2, 5, 64))


@needs_compiler
@pytest.mark.usefixtures("forgetful")
def test_libraries_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cpu.is_available()
    made = {path: path.stat().st_mtime_ns for path in tmp_path.glob("kvcompile/*")}
    assert made
    for function in (cpu.is_available, cpu._kernel, compiler.load_library):
        function.cache_clear()
    assert cpu.is_available()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("kvcompile/*")} == made


@needs_compiler
@pytest.mark.usefixtures("forgetful")
def test_without_openmp_and_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that knows neither flag still builds the kernel."""
    command, _ = compiler.find_compiler()
    picky = tmp_path / "picky-cc"
    picky.write_text(f'#!/bin/sh\ncase "$*" in *-fopenmp*|*-march*) exit 1;; esac\nexec {shlex.join(command)} "$@"\n')
    picky.chmod(0o755)
    compiler.find_compiler.cache_clear()
    monkeypatch.setenv("CC", str(picky))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keys = RowFormat(64, 2, 16, axis="channel", token_scale="l2", rounding="error_feedback")
    for key in (RowFormat(64, 2, 64), keys):
        layer = random_layer(PageFormat(key, RowFormat(64, 4, 32)), 2, [700, 30], sink=4, ring=64)
        check(layer, random_queries(layer, 3))
    check_feedback(keys, torch.randn(2, 64, 64))


def check_feedback(fmt: RowFormat, x: torch.Tensor, seed: int = 0) -> None:
    """The kernel's codes of rows ``[..., K, T, D]`` are the codec's, bit for bit."""
    tables = random_tables(PageFormat(fmt, fmt), x.shape[-3], seed).key
    expected = quantize_rows(x, fmt, tables)
    actual = quantize_rows(x, fmt, tables, cpu_encode.feedback_codes)
    assert actual.codes.dtype == torch.uint8
    assert torch.equal(actual.codes, expected.codes)


@settings(max_examples=60, deadline=None)
@given(
    head_dim=st.sampled_from([8, 16, 64, 80, 96, 128, 256]),
    bits=st.sampled_from([1, 2, 4]),
    group=st.sampled_from([8, 16, 32, 64, 128, 256]),
    axis=st.sampled_from(["token", "channel"]),
    zero_point=st.sampled_from(["float", "integer"]),
    token_scale=st.sampled_from(["none", "l2"]),
    clip_ratio=st.sampled_from([1.0, 0.96, 0.7]),
    shape=st.sampled_from([(1, 64), (2, 128), (3, 2, 64), (2, 1, 2, 128)]),
    magnitude=st.integers(-25, 25),
    spread=st.sampled_from([0.0, 1.0, 4.0]),
    seed=st.integers(0, 2**31),
)
def test_feedback_codes(
    head_dim: int, bits: int, group: int, axis: str, zero_point: str, token_scale: str, clip_ratio: float,
    shape: tuple[int, ...], magnitude: int, spread: float, seed: int,
) -> None:  # fmt: skip
    """Over all magnitudes, channels of unequal size, clipped rows, constant groups and zeros."""
    whole = head_dim if axis == "token" else shape[-1]
    group = group if whole % group == 0 else whole
    fmt = RowFormat(
        head_dim, bits, group, clip_ratio, axis, zero_point, rounding="error_feedback", token_scale=token_scale
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, head_dim, generator=generator) * 10.0**magnitude
    x = x * torch.exp(spread * torch.randn(head_dim, generator=generator))
    x[..., : shape[-1] // 4, : head_dim // 2] = x[..., :1, :1]  # constant over tokens and over channels
    x[..., -3:, :] = 0
    check_feedback(fmt, x.bfloat16() if seed % 2 else x, seed)


@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 3, 64), (2, 65, 64), (0, 2, 64, 64), (2, 10, 6)])
def test_feedback_codes_of_odd_shapes(shape: tuple[int, ...]) -> None:
    """Tokens that fill no vector, nothing at all, heads that the kernel leaves to the codec."""
    check_feedback(RowFormat(shape[-1], 4, shape[-1], rounding="error_feedback"), torch.randn(shape))


@needs_compiler
def test_feedback_codes_do_not_depend_on_threads_or_strides() -> None:
    threads = torch.get_num_threads()
    fmt = RowFormat(128, 2, 32, axis="channel", rounding="error_feedback")
    try:
        torch.set_num_threads(5)
        check_feedback(fmt, torch.randn(7, 64, 3, 128).transpose(1, 2))
    finally:
        torch.set_num_threads(threads)


def test_the_backend_writes_the_pages_of_the_codec() -> None:
    fmt = PageFormat(
        RowFormat(64, 2, 64, axis="channel", rounding="error_feedback"),
        RowFormat(64, 2, 64, 0.95, rounding="error_feedback"),
    )
    k, v = torch.randn(2, 5, 2, 64, 64).bfloat16()
    ids, tables = torch.tensor([3, 1, 0, 6, 4]), random_tables(fmt, 2)
    ours, expected = torch.zeros(2, 8, 2, fmt.page_bytes, dtype=torch.uint8)
    CpuBackend().write_pages(k, v, fmt, tables, ours, ids)
    CodecBackend().write_pages(k, v, fmt, tables, expected, ids)
    assert torch.equal(ours, expected)


@needs_compiler
def test_error_feedback_alone_is_worth_the_backend() -> None:
    odd = PageFormat(RowFormat(24, 2, 24), RowFormat(24, 2, 24))
    fed = replace(odd, key=replace(odd.key, rounding="error_feedback"))
    assert choose_backend(None, torch.device("cpu"), [odd]).name == "codec"
    assert choose_backend(None, torch.device("cpu"), [odd, fed]).name == "cpu"
