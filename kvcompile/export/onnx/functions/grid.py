"""Scale, zero point and codes of groups, and back; docs/manifest.md, steps 4 to 9 of "From a row to codes" and what follows.

Rows are ``[N, K, T, D]`` (blocks, KV heads, tokens, head_dim). `split` is what becomes of ``[T, D]`` so that groups have a
dimension of their own, `along` is that dimension: ``[T, D / g, g]`` and 4 with axis token, ``[T / g, g, D]`` and 3 with axis
channel. Scale and zero point keep it with size 1.
"""

from collections.abc import Sequence

from kvcompile.export.onnx.functions.opset import FLOAT, INT64, UINT8, UINT32, Byte, Float, op, spec
from kvcompile.export.onnx.functions.rows import RoundBf16


@spec
def SplitGroups(x_NKTD: Float, split: Sequence[int]) -> Float:
    """Step 4: rows of any dtype in groups, five dimensions."""
    shape = op.Concat(op.Constant(value_ints=[0, 0]), op.Constant(value_ints=split), axis=0)
    return op.Reshape(x_NKTD, shape)


@spec
def TopCode(bits: int) -> Float:
    """``L = 2^b - 1``, float32 scalar."""
    return op.Cast(op.Pow(op.Constant(value_int=2), op.Constant(value_int=bits)) - 1, to=FLOAT)


@spec
def GridScale(groups: Float, bits: int, along: int) -> tuple[Float, Float]:
    """Steps 5 to 7: the scale of every group, a BF16 number as float32, and its smallest entry."""
    over = op.Reshape(op.Constant(value_int=along), [1])
    low, high = op.ReduceMin(groups, over), op.ReduceMax(groups, over)
    scale = RoundBf16((high - low) / TopCode(bits=bits))
    constant = RoundBf16(op.Where(low == 0.0, 1.0, op.Abs(low)))
    return op.Where(scale < 1e-30, constant, scale), low


@spec
def FloatZero(low: Float, scale: Float) -> Float:
    """Step 8, float: ``bf16(0 - lo / s)``."""
    return RoundBf16(0.0 - low / scale)


@spec
def IntegerZero(low: Float, scale: Float) -> Float:
    """Step 8, integer: ``bf16(0 - rint(lo / s))``."""
    return RoundBf16(0.0 - op.Round(low / scale))


@spec
def NearestCodes(groups: Float, scale: Float, zero: Float, bits: int) -> Byte:
    """Step 9, nearest: codes uint8 in the shape of `groups`."""
    return op.Cast(op.Round(op.Clip(groups / scale + zero, 0.0, TopCode(bits=bits))), to=UINT8)


@spec
def FeedbackCodes(x_NKTD: Float, scale_NKTD: Float, zero_NKTD: Float, factor_KDD: Float, bits: int) -> Float:
    """Step 9, error_feedback: codes float32 ``[N, K, T, D]``, one channel after another; every sum is exact.

    Scale and zero point are those of each entry's group, `factor_KDD` is the factor U. Holds for rows whose largest scale is
    no subnormal float32 number.
    """
    top, dim = TopCode(bits=bits), op.Squeeze(op.Shape(x_NKTD, start=-1))
    largest = op.ReduceMax(scale_NKTD, [-1])
    exponent = op.Cast(op.Constant(value_int=0x7F800000), to=UINT32)
    delta = op.BitCast(op.BitwiseAnd(op.BitCast(largest, to=UINT32), exponent), to=FLOAT) * 0.015625
    unit = delta * 0.015625
    steps_KDD = factor_KDD * 64.0
    channels_D = op.Range(0, dim, 1)
    codes_NKTD = op.ConstantOfShape(op.Shape(x_NKTD))
    errors_NKTD = op.ConstantOfShape(op.Shape(x_NKTD))
    i = op.Constant(value_int=0)
    more = i < dim
    while more:
        channel = op.Unsqueeze(i, [0])
        exact, scale = op.Gather(x_NKTD, channel, axis=-1), op.Gather(scale_NKTD, channel, axis=-1)
        zero = op.Gather(zero_NKTD, channel, axis=-1)
        fed = op.MatMul(errors_NKTD, op.Gather(steps_KDD, channel, axis=-1))
        code = op.Round(op.Clip((exact - fed * unit) / scale + zero, 0.0, top))
        error = op.Clip(op.Round(((code - zero) * scale - exact) / delta), -511.0, 511.0)
        codes_NKTD = op.Where(channels_D == i, code, codes_NKTD)
        errors_NKTD = op.Where(channels_D == i, error, errors_NKTD)
        i = i + 1
        more = i < dim
    return codes_NKTD


@spec
def LevelScale(groups: Float) -> Float:
    """Without a zero point: ``bf16(max(sqrt(mean x^2), 1e-30))`` of every group of channels."""
    return RoundBf16(op.Max(op.Sqrt(op.ReduceMean(groups * groups, [-1])), 1e-30))


@spec
def LevelCodes(groups: Float, scale: Float, levels: Sequence[float]) -> Byte:
    """Without a zero point: how many midpoints between neighbouring levels are smaller than ``x / s``; uint8."""
    ascending = op.Constant(value_floats=levels)
    midpoints = (op.Slice(ascending, [1], [99]) + op.Slice(ascending, [0], [-1])) / 2.0
    smaller = op.Unsqueeze(groups / scale, [-1]) > midpoints
    return op.Cast(op.ReduceSum(op.Cast(smaller, to=FLOAT), [-1], keepdims=0), to=UINT8)


@spec
def Dequantize(codes: Byte, scale: Float, zero: Float) -> Float:
    """``(code - z) * s`` of codes uint8 in groups."""
    return (op.Cast(codes, to=FLOAT) - zero) * scale


@spec
def DequantizeLevels(codes: Byte, scale: Float, levels: Sequence[float]) -> Float:
    """``level[code] * s`` of codes uint8 in groups."""
    return op.Gather(op.Constant(value_floats=levels), op.Cast(codes, to=INT64), axis=0) * scale
