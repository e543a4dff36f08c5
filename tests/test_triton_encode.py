"""The encoding kernels equal the codec bit for bit: on the GPU where there is one, else in Triton's interpreter."""
# ruff: noqa: E402 - the interpreter must be chosen before the kernels are imported

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")

from kvcompile.codec import NO_PAGE_TABLES, PageFormat, PageTables, RowFormat, RowTables, encode_pages
from kvcompile.kernels.triton_encode import rotate_rows, rotate_write, supports, write_pages
from kvcompile.linalg import hadamard
from tests.compiled import compile_for_hopper
from tests.layers import random_tables

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy, on awkward rows

FORMATS = [  # head_dim, (bits, group, clip) of the keys, of the values
    (128, (2, 128, 0.96), (2, 128, 0.92)),
    (128, (4, 128, 1.0), (2, 32, 0.92)),
    (128, (2, 64, 0.5), (4, 16, 0.0)),
    (64, (2, 64, 0.96), (2, 64, 1.0)),
    (64, (2, 16, 0.9), (4, 32, 0.96)),
    (16, (2, 16, 0.96), (4, 16, 0.92)),
    (80, (2, 80, 0.96), (4, 40, 0.92)),
    (80, (4, 16, 0.96), (2, 20, 0.92)),
    (96, (2, 96, 1.0), (2, 32, 0.96)),
    (96, (4, 48, 0.92), (4, 96, 0.96)),
    (256, (2, 256, 0.96), (2, 64, 0.92)),
    (256, (4, 128, 0.99), (4, 256, 0.96)),
]


def page_format(head_dim: int, key: tuple[int, int, float], value: tuple[int, int, float]) -> PageFormat:
    return PageFormat(RowFormat(head_dim, *key), RowFormat(head_dim, *value))


def awkward_rows(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random rows in bf16 whose first ones are degenerate: constants, zeros, huge, tiny, subnormal, ties."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(shape, generator=generator) * (torch.rand(shape[-1], generator=generator) * 4).exp()
    head_dim = shape[-1]
    rows[..., 0, :] = 0.0
    rows[..., 1, :] = 1.7
    rows[..., 2, :] = -3e-5
    rows[..., 3, :] = 1e-39  # subnormal
    rows[..., 4, :] *= 1e-38
    rows[..., 5, 0], rows[..., 5, 1] = 3e38, -3e38  # the range overflows
    rows[..., 6, head_dim // 2] = 1e30
    rows[..., 7, :] = torch.arange(head_dim) % 4  # on the grid
    rows[..., 8, :] = torch.arange(head_dim) % 7 * 0.5  # between two codes
    rows[..., 9, :] = rows[..., 9, :1]
    rows[..., 9, 3] *= 1.0078125  # one bf16 step
    rows[..., 10, : head_dim // 2] = 2.0
    return rows.bfloat16()


def tables_on_device(tables: PageTables) -> PageTables:
    return PageTables(
        *(RowTables(None if x.feedback is None else x.feedback.to(DEVICE)) for x in vars(tables).values())
    )


def encode_by_kernel(
    k: torch.Tensor, v: torch.Tensor, fmt: PageFormat, tables: PageTables = NO_PAGE_TABLES
) -> torch.Tensor:
    """Pages [N, K, X] by the kernel, written out of order between pages that must stay as they are."""
    num_blocks = k.shape[0]
    pages = torch.full((num_blocks + 2, k.shape[1], fmt.page_bytes), 173, dtype=torch.uint8, device=DEVICE)
    ids = torch.arange(num_blocks, 0, -1, dtype=torch.int32)
    write_pages(k.to(DEVICE), v.to(DEVICE), fmt, tables_on_device(tables), pages, ids.to(DEVICE))
    assert (pages[0] == 173).all()
    assert (pages[-1] == 173).all()
    return pages.cpu()[ids.long()]


@pytest.mark.parametrize(("head_dim", "key", "value"), FORMATS)
def test_pages_equal_the_codec(head_dim, key, value):
    fmt = page_format(head_dim, key, value)
    k, v = awkward_rows(2, 2, 64, head_dim), awkward_rows(2, 2, 64, head_dim, seed=1)
    assert torch.equal(encode_by_kernel(k, v, fmt), encode_pages(k, v, fmt))


@pytest.mark.parametrize(("bits", "tokens", "zero_point"), [(1, 64, "float"), (2, 128, "integer"), (4, 64, "integer")])
def test_other_pages_and_zero_points(bits, tokens, zero_point):
    fmt = PageFormat(
        RowFormat(64, bits, 32, 0.96, zero_point=zero_point), RowFormat(64, bits, 64, zero_point=zero_point), tokens
    )
    k = awkward_rows(1, 2, tokens, 64)
    v = awkward_rows(1, 2, tokens, 64, seed=1).abs()  # zero points that round to minus zero
    v[..., 20:, :] = v[..., 20:, :].remainder(1) + 0.25
    assert torch.equal(encode_by_kernel(k, v, fmt), encode_pages(k, v, fmt))


FEEDBACK = [  # head_dim, (bits, group, clip) of the keys, of the values, tokens
    (16, (2, 16, 0.96), (4, 16, 1.0), 64),
    (64, (2, 64, 0.92), (4, 16, 0.96), 64),
    (80, (4, 80, 0.96), (2, 16, 1.0), 64),
    (96, (1, 48, 0.96), (2, 32, 0.5), 128),
    (128, (2, 128, 0.96), (4, 32, 1.0), 64),
    (256, (2, 128, 1.0), (2, 256, 0.92), 64),
]


def feedback_format(head_dim, key, value, tokens=64, zero_point="float"):
    rows = (RowFormat(head_dim, *x, zero_point=zero_point, rounding="error_feedback") for x in (key, value))
    return PageFormat(*rows, tokens)


@pytest.mark.parametrize(("head_dim", "key", "value", "tokens"), FEEDBACK)
def test_error_feedback_equals_the_codec(head_dim, key, value, tokens):
    fmt = feedback_format(head_dim, key, value, tokens)
    k, v = awkward_rows(1, 1, tokens, head_dim), awkward_rows(1, 1, tokens, head_dim, seed=1)
    v = v * torch.tensor([1e-30, 1e-3, 1.0, 1e30]).bfloat16()[torch.arange(tokens) % 4, None]
    for x in (k, v):
        x[..., 5, :2] = torch.tensor([1e38, -1e38])  # a scale must be finite
        x[..., 6, :] = x[..., 6, :].clamp(-1e30, 1e30)
        x[..., 12, :16] = 1.5  # a constant group beside others
        x[..., 13, :16] = 0.0
    v[..., 14:, :] = v[..., 14:, :].clamp(-1e38, 1e38)
    tables = random_tables(fmt, 1, seed=head_dim)
    expected = encode_pages(k, v, fmt, tables)
    assert torch.equal(encode_by_kernel(k, v, fmt, tables), expected)
    nearest = PageFormat(RowFormat(head_dim, *key), RowFormat(head_dim, *value), tokens)
    assert not torch.equal(encode_pages(k, v, nearest), expected)


def test_error_feedback_of_several_heads_and_blocks():
    """One side only, every head with a metric of its own, rows and pages with strides, integer zero points."""
    fmt = feedback_format(32, (2, 32, 0.9), (4, 16, 1.0), zero_point="integer")
    fmt = PageFormat(fmt.key, RowFormat(32, 4, 16, zero_point="integer"))
    k, v = (torch.randn(2, 64, 3, 32, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (0, 1))
    tables = random_tables(fmt, 3)
    factor = tables.key.feedback
    assert not torch.equal(factor[0], factor[1])
    assert factor.abs().max() > 0.5
    expected = encode_pages(k.transpose(1, 2), v.transpose(1, 2), fmt, tables)
    assert torch.equal(encode_by_kernel(k.transpose(1, 2), v.transpose(1, 2), fmt, tables), expected)


def test_error_feedback_at_its_limits():
    """The largest factors, and errors that saturate: sums that are far from small, and exact all the same."""
    fmt = feedback_format(64, (2, 64, 0.3), (4, 16, 1.0))
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-127, 128, (2, 1, 64, 64), generator=generator).triu(1) / 64
    factors[1] = factors[1].sign().triu(1) * 127 / 64
    k, v = (torch.randn(1, 1, 64, 64, generator=generator) * 3 for _ in range(2))
    v[..., 5] *= 1000
    tables = PageTables(*(RowTables(factor) for factor in factors))
    k, v = k.bfloat16(), v.bfloat16()
    assert torch.equal(encode_by_kernel(k, v, fmt, tables), encode_pages(k, v, fmt, tables))


def test_formats_that_are_left_to_the_codec():
    row = RowFormat(64, 2, 64)
    assert supports(PageFormat(row, row))
    assert supports(PageFormat(row, RowFormat(64, 2, 32, rounding="error_feedback"), 128))
    for other in (
        RowFormat(64, 2, 64, axis="channel"),
        RowFormat(64, 2, 64, zero_point="none"),
        RowFormat(64, 2, 64, token_scale="l2"),
        RowFormat(64, 2, 64, centroids=4),
        RowFormat(80, 2, 20, rounding="error_feedback"),
        RowFormat(24, 2, 24, rounding="error_feedback"),
    ):
        assert not supports(PageFormat(other, RowFormat(other.head_dim, 2, other.head_dim)))


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("clip", [0.0, 0.3, 0.97, 0.985, 1.0])
def test_every_clip_index(bits, clip):
    fmt = page_format(64, (bits, 64, clip), (bits, 32, 1 - clip))
    k, v = awkward_rows(1, 1, 64, 64, seed=2), awkward_rows(1, 1, 64, 64, seed=3)
    assert torch.equal(encode_by_kernel(k, v, fmt), encode_pages(k, v, fmt))


def test_any_strides():
    """Rows that lie [N, T, K, D] in memory inside wider tensors, and pages inside a pool of several layers."""
    fmt = page_format(64, (2, 64, 0.96), (2, 64, 0.92))
    k, v = awkward_rows(3, 2, 64, 64), awkward_rows(3, 2, 64, 64, seed=1)
    wide = torch.zeros(3, 64, 2, 96, dtype=torch.bfloat16, device=DEVICE)
    device_k = wide[..., 16:80].transpose(1, 2)
    device_k.copy_(k)
    device_v = v.transpose(0, 1).to(DEVICE).contiguous().transpose(0, 1)
    pool = torch.zeros(3, 5, 4, fmt.page_bytes, dtype=torch.uint8, device=DEVICE)
    ids = torch.tensor([4, 0, 2], dtype=torch.int64)
    write_pages(device_k, device_v, fmt, NO_PAGE_TABLES, pool[1, :, 1:3], ids.to(DEVICE))
    pool = pool.cpu()
    assert torch.equal(pool[1, ids, 1:3], encode_pages(k, v, fmt))
    pool[1, ids, 1:3] = 0
    assert not pool.any()


def test_no_blocks():
    fmt = page_format(16, (2, 16, 1.0), (2, 16, 1.0))
    empty = torch.zeros(0, 1, 64, 16, dtype=torch.bfloat16, device=DEVICE)
    pages = torch.zeros(1, 1, fmt.page_bytes, dtype=torch.uint8, device=DEVICE)
    write_pages(empty, empty, fmt, NO_PAGE_TABLES, pages, torch.zeros(0, dtype=torch.int32, device=DEVICE))
    assert not pages.any()


@pytest.mark.parametrize("head_dim", [16, 64])
def test_rotate_write(head_dim):
    """With exact sums (small integers times +-2^-k), rotating and encoding in one launch give the codec's bytes."""
    generator = torch.Generator().manual_seed(0)
    fmt = page_format(head_dim, (2, head_dim, 0.96), (4, 16, 0.92))
    k, v = (torch.randint(-40, 40, (2, 2, 64, head_dim), generator=generator).bfloat16() for _ in range(2))
    h = hadamard(head_dim).float()
    rotations = torch.stack([h, h.flip(0)])
    pages = torch.zeros(2, 2, fmt.page_bytes, dtype=torch.uint8, device=DEVICE)
    ids = torch.tensor([1, 0], dtype=torch.int32, device=DEVICE)
    rotated = [(x.float() @ rotations).bfloat16() for x in (k, v)]
    device_rows = (k.to(DEVICE), v.to(DEVICE))
    rotate_write(*device_rows, rotations.to(DEVICE), rotations.to(DEVICE), fmt, NO_PAGE_TABLES, pages, ids)
    assert torch.equal(pages.cpu()[[1, 0]], encode_pages(*rotated, fmt))
    fmt = PageFormat(RowFormat(head_dim, 2, head_dim, rounding="error_feedback"), fmt.value)
    tables = random_tables(fmt, 2)
    rotate_write(*device_rows, rotations.to(DEVICE), None, fmt, tables_on_device(tables), pages, ids)
    assert torch.equal(pages.cpu()[[1, 0]], encode_pages(rotated[0], v, fmt, tables))


@pytest.mark.parametrize(
    ("batch", "num_heads", "groups", "num_tokens", "head_dim"),
    [(1, 2, 1, 1, 128), (2, 1, 7, 5, 80), (1, 2, 2, 37, 96), (3, 1, 4, 1, 16), (1, 1, 1, 70, 64), (1, 1, 2, 3, 256)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotate_rows(batch, num_heads, groups, num_tokens, head_dim, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, num_tokens, num_heads * groups, head_dim, generator=generator).to(dtype).transpose(1, 2)
    r = torch.linalg.qr(torch.randn(num_heads, head_dim, head_dim, generator=generator, dtype=torch.float64)).Q.float()
    expected = x.double() @ r.double().repeat_interleave(groups, dim=0)
    rotated = rotate_rows(x.transpose(1, 2).to(DEVICE).transpose(1, 2), r.to(DEVICE))
    assert rotated.dtype == torch.bfloat16
    torch.testing.assert_close(rotated.cpu().double(), expected, rtol=2**-8, atol=1e-5)


def test_wrong_shapes_are_refused():
    fmt = page_format(16, (2, 16, 1.0), (2, 16, 1.0))
    rows = torch.zeros(1, 1, 64, 16, dtype=torch.bfloat16, device=DEVICE)
    pages = torch.zeros(1, 1, fmt.page_bytes, dtype=torch.uint8, device=DEVICE)
    ids = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="expected blocks"):
        write_pages(rows[:, :, :63], rows[:, :, :63], fmt, NO_PAGE_TABLES, pages, ids)
    with pytest.raises(ValueError, match="do not fit"):
        write_pages(rows, rows, fmt, NO_PAGE_TABLES, pages[:, :, 1:], ids)
    with pytest.raises(TypeError, match="bfloat16"):
        write_pages(rows.float(), rows, fmt, NO_PAGE_TABLES, pages, ids)
    symmetric = PageFormat(RowFormat(16, 2, 16, zero_point="none"), fmt.value)
    with pytest.raises(ValueError, match="no kernel"):
        write_pages(rows, rows, symmetric, NO_PAGE_TABLES, pages[:, :, : symmetric.page_bytes], ids)
    with pytest.raises(ValueError, match="needs its factor"):
        write_pages(rows, rows, feedback_format(16, (2, 16), (2, 16)), NO_PAGE_TABLES, pages, ids)


@pytest.mark.parametrize("rotate", [False, True])
def test_compiles_for_hopper(rotate, tmp_path):
    bf16, f32 = "*bf16", "*fp32"
    side = {"BITS": 2, "GROUP": 128, "INTEGER": False, "FEEDBACK": False, "CHUNK": 32, "TILE": 32}
    pointers = {"k_ptr": bf16, "v_ptr": bf16, "rk_ptr": f32, "rv_ptr": f32, "tau_ptr": f32}
    built = compile_for_hopper(
        "kvcompile.kernels.triton_encode:_write_kernel",
        pointers | {"pages_ptr": "*u8", "ids_ptr": "*i32"},
        {"D": 128, "PAGE": 64, "ROTATE_K": rotate, "ROTATE_V": False, "STEP": 16}
        | {f"{s}_{name}": value for s in "KV" for name, value in side.items()},
        tmp_path,
        num_warps=4,
    )
    assert "div.rn.f32" in built["ptx"]  # IEEE division
    assert ".ftz" not in built["ptx"]  # subnormals survive
    if not rotate:
        assert "fma.rn.f32" not in built["ptx"]  # nothing was fused
        assert "STL" not in built["sass"]  # nothing spills


@pytest.mark.parametrize("head_dim", [64, 128])
def test_feedback_compiles_for_hopper(head_dim, tmp_path):
    pointers = {"x_ptr": "*bf16", "factor_ptr": "*fp32", "pages_ptr": "*u8", "ids_ptr": "*i32", "tau_ptr": "*fp32"}
    constants = {"D": head_dim, "PAGE": 64, "BITS": 2, "GROUP": head_dim, "CODES": 0, "META": 32 * head_dim}
    built = compile_for_hopper(
        "kvcompile.kernels.triton_encode:_feedback_kernel",
        pointers,
        constants | {"TRANSPOSED": False, "TILE": 32, "CHUNK": head_dim // 4},
        tmp_path,
        num_warps=1,
        enable_fp_fusion=False,
    )
    assert "div.rn.f32" in built["ptx"]
    assert ".ftz" not in built["ptx"]
    assert "mul.rn.f32" in built["ptx"]  # ptxas fuses no product whose rounding is spelled out
    assert "mul.f32" not in built["ptx"]
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in built["ptx"]
    assert built["sass"].count("STL") <= 32  # some registers per block of channels, not its tiles


def test_rotation_compiles_for_hopper(tmp_path):
    built = compile_for_hopper(
        "kvcompile.kernels.triton_encode:_rotate_kernel",
        {"x_ptr": "*bf16", "r_ptr": "*fp32", "out_ptr": "*bf16"},
        {"HEADS_PER_MATRIX": 4, "D": 128, "TILE": 16, "WIDTH": 128, "STEP": 16, "ROUND": True},
        tmp_path,
        num_warps=4,
    )
    assert "tf32" not in built["ptx"]
    assert "STL" not in built["sass"]
