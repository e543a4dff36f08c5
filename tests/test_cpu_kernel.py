"""The CPU kernel means `attend_layer`, whatever the geometry, the windows and the page table."""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcompile.codec import LayerCache, PageFormat, RowFormat, attend_layer
from kvcompile.errors import CacheError
from kvcompile.kernels import cpu
from tests.layers import random_layer

needs_compiler = pytest.mark.skipif(not cpu.is_available(), reason="no working C compiler")


def random_queries(layer: LayerCache, queries: int, sharpness: float = 1.0) -> torch.Tensor:
    batch, num_kv_heads = layer.sink_k_BKSD.shape[:2]
    generator = torch.Generator().manual_seed(7)
    return sharpness * torch.randn(batch, num_kv_heads * queries, layer.fmt.head_dim, generator=generator)


def check(layer: LayerCache, q_BHD: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Relative error of every row and head. Rounding a logit of 100 alone changes its weight by 4e-6 in both."""
    scaling = layer.fmt.head_dim**-0.5
    expected, actual = attend_layer(q_BHD, layer, scaling), cpu.attend(q_BHD, layer, scaling)
    assert actual.dtype == torch.float32
    assert actual.shape == q_BHD.shape
    error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-20)
    assert error.max() < tolerance


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
            assert torch.equal(cpu.attend(q_BHD, layer, 0.1), cpu.attend(q_BHD, layer, 0.1))
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
    cached = (cpu.is_available, cpu._kernel, cpu._compiler)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize(
    ("compiler", "message"),
    [("no-such-compiler", "Install GCC"), ("false", "Install GCC"), ("echo -n", "does not build with echo -n")],
)
def test_no_compiler(compiler: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not cpu.is_available()
    layer = random_layer(PageFormat(RowFormat(64, 2, 64), RowFormat(64, 2, 64)), 2, [9], sink=4, ring=64)
    with pytest.raises(CacheError, match=message):
        cpu.attend(random_queries(layer, 1), layer, 1.0)


@needs_compiler
@pytest.mark.usefixtures("forgetful")
def test_libraries_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cpu.is_available()
    made = {path: path.stat().st_mtime_ns for path in tmp_path.glob("kvcompile/*")}
    assert made
    cpu._kernel.cache_clear()
    cpu._kernel(16, 2, 2, 16, 16, 1)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("kvcompile/*")} == made


@needs_compiler
@pytest.mark.usefixtures("forgetful")
def test_without_openmp_and_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that knows neither flag still builds the kernel."""
    command, _ = cpu._compiler()
    picky = tmp_path / "picky-cc"
    picky.write_text(f'#!/bin/sh\ncase "$*" in *-fopenmp*|*-march*) exit 1;; esac\nexec {shlex.join(command)} "$@"\n')
    picky.chmod(0o755)
    cpu._compiler.cache_clear()
    monkeypatch.setenv("CC", str(picky))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    layer = random_layer(PageFormat(RowFormat(64, 2, 64), RowFormat(64, 4, 32)), 2, [700, 30], sink=4, ring=64)
    check(layer, random_queries(layer, 3))
