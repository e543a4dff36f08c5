"""Codes and metadata as bytes; docs/manifest.md, "Packing order" and "A page". Shapes: N blocks, K KV heads, any M, J numbers."""

from collections.abc import Sequence

from kvcompile.export.onnx.functions.opset import INT64, UINT8, UINT16, UINT32, Byte, Cell, Float, op, spec
from kvcompile.export.onnx.functions.rows import FromBits, ToBits


@spec
def Pack(codes_NKMD: Byte, bits: int) -> Byte:
    """Codes uint8 ``[N, K, M, D]`` to bytes ``[N, K, M, D b / 8]``: byte j is the sum of ``code[j + i D/n] << (b i)``."""
    width = op.Constant(value_int=bits)
    shifts_n = op.Range(0, 8, width)
    chunks = op.Shape(shifts_n)
    shape = op.Concat([0, 0, 0], chunks, op.Shape(codes_NKMD, start=-1) / chunks, axis=0)
    shifted = op.BitShift(
        op.Reshape(codes_NKMD, shape), op.Unsqueeze(op.Cast(shifts_n, to=UINT8), [1]), direction="LEFT"
    )
    return op.Cast(op.ReduceSum(op.Cast(shifted, to=INT64), [3], keepdims=0), to=UINT8)


@spec
def Unpack(bytes_NKMJ: Byte, bits: int) -> Byte:
    """Bytes uint8 ``[N, K, M, D b / 8]`` to codes ``[N, K, M, D]``."""
    width = op.Constant(value_int=bits)
    shifts_n = op.Cast(op.Range(0, 8, width), to=UINT8)
    mask = op.Cast(op.Pow(op.Constant(value_int=2), width) - 1, to=UINT8)
    shifted = op.BitShift(op.Unsqueeze(bytes_NKMJ, [3]), op.Unsqueeze(shifts_n, [1]), direction="RIGHT")
    row = op.Concat(op.Shape(bytes_NKMJ, end=3), op.Shape(bytes_NKMJ, start=-1) * op.Shape(shifts_n), axis=0)
    return op.Reshape(op.BitwiseAnd(shifted, mask), row, allowzero=1)


@spec
def ToLittleEndian(numbers_NKM: Cell, size: int) -> Byte:
    """uint32 numbers ``[N, K, M]`` to their lowest `size` bytes, lowest first: ``[N, K, M size]``."""
    shifts = op.Range(0, op.Constant(value_int=size) * 8, 8)
    parts = op.BitShift(op.Unsqueeze(numbers_NKM, [-1]), op.Cast(shifts, to=UINT32), direction="RIGHT")
    low = op.BitwiseAnd(parts, op.Cast(op.Constant(value_int=255), to=UINT32))
    return op.Reshape(op.Cast(low, to=UINT8), [0, 0, -1])


@spec
def FromLittleEndian(bytes_NKM: Byte, size: int) -> Cell:
    """The inverse of `ToLittleEndian`: bytes ``[N, K, M size]`` to numbers uint32 ``[N, K, M]``."""
    width = op.Reshape(op.Constant(value_int=size), [1])
    shape = op.Concat(op.Shape(bytes_NKM, end=2), op.Shape(bytes_NKM, start=-1) / width, width, axis=0)
    places = op.Pow(op.Constant(value_int=256), op.Range(0, op.Squeeze(width), 1))
    parts = op.Cast(op.Reshape(bytes_NKM, shape, allowzero=1), to=INT64)
    return op.Cast(op.ReduceSum(parts * places, [-1], keepdims=0), to=UINT32)


@spec
def Cells(scale: Float, zero: Float) -> Cell:
    """One uint32 cell per group: the BF16 bits of the zero point in the high half, those of the scale in the low half."""
    sixteen = op.Cast(op.Constant(value_int=16), to=UINT32)
    high = op.BitShift(op.Cast(ToBits(zero), to=UINT32), sixteen, direction="LEFT")
    return op.BitwiseOr(high, op.Cast(ToBits(scale), to=UINT32))


@spec
def ScaleCells(scale: Float) -> Cell:
    """Cells of a format without zero point: the BF16 bits of the scale, as uint32."""
    return op.Cast(ToBits(scale), to=UINT32)


@spec
def WordsToFloat(words: Cell) -> Float:
    """BF16 bit patterns held in uint32 to float32; the inverse of `ScaleCells`."""
    return FromBits(op.Cast(words, to=UINT16))


@spec
def ScaleAndZero(cells: Cell) -> tuple[Float, Float]:
    """The inverse of `Cells`."""
    sixteen = op.Cast(op.Constant(value_int=16), to=UINT32)
    low = op.BitwiseAnd(cells, op.Cast(op.Constant(value_int=65535), to=UINT32))
    high = op.BitShift(cells, sixteen, direction="RIGHT")
    return WordsToFloat(low), WordsToFloat(high)


@spec
def ToMetaOrder(cells: Cell, along: int, perm: Sequence[int]) -> Cell:
    """Cells of groups (five dimensions, `along` of size 1) to what a page stores, flat: ``[N, K, M]``.

    `perm` makes groups of channels come before tokens; with axis channel it changes nothing.
    """
    over = op.Reshape(op.Constant(value_int=along), [1])
    return op.Reshape(op.Transpose(op.Squeeze(cells, over), perm=perm), [0, 0, -1])


@spec
def FromMetaOrder(cells_NKM: Cell, along: int, perm: Sequence[int], shape: Sequence[int]) -> Cell:
    """The inverse of `ToMetaOrder`; `shape` is what a page stores of one KV head, ``[D / g, T]`` or ``[T / g, D]``."""
    over = op.Reshape(op.Constant(value_int=along), [1])
    full = op.Concat(op.Constant(value_ints=[0, 0]), op.Constant(value_ints=shape), axis=0)
    return op.Unsqueeze(op.Transpose(op.Reshape(cells_NKM, full), perm=perm), over)
