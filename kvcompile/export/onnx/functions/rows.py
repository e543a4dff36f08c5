"""From a model's rows to stored rows, and from those to the numbers that a grid is laid over; docs/manifest.md, "Rotations and
means" and steps 1 to 3 of "From a row to codes".

Shapes: N blocks of tokens (or batch rows), K KV heads, H = K G query heads, T tokens, D head_dim, C centroids.
"""

from collections.abc import Sequence

from kvcompile.export.onnx.functions.opset import (
    BFLOAT16,
    FLOAT,
    INT64,
    UINT16,
    Double,
    Float,
    Int,
    Word,
    op,
    spec,
)


@spec
def RoundBf16(x: Float) -> Float:
    """``bf16(x)``: float32 of any shape to the nearest BF16 number, ties to even, as float32."""
    return op.Cast(op.Cast(x, to=BFLOAT16), to=FLOAT)


@spec
def ToBits(x: Float) -> Word:
    """The bit patterns uint16 of ``bf16(x)``."""
    return op.BitCast(op.Cast(x, to=BFLOAT16), to=UINT16)


@spec
def FromBits(bits: Word) -> Float:
    """BF16 bit patterns uint16 to float32, exactly."""
    return op.Cast(op.BitCast(bits, to=BFLOAT16), to=FLOAT)


@spec
def Rotate(x_NHTD: Float, rotation_KDD: Float) -> Float:
    """Rows float32 ``[N, H, T, D]`` times the rotation ``[K, D, D]`` of their KV head ``h // (H / K)``; not rounded."""
    kv = op.Shape(rotation_KDD, start=0, end=1)
    groups = op.Shape(x_NHTD, start=1, end=2) / kv
    grouped = op.Concat(op.Shape(x_NHTD, start=0, end=1), kv, groups, op.Shape(x_NHTD, start=2), axis=0)
    x_NKGTD = op.Reshape(x_NHTD, grouped, allowzero=1)
    return op.Reshape(op.MatMul(x_NKGTD, op.Unsqueeze(rotation_KDD, [1])), op.Shape(x_NHTD), allowzero=1)


@spec
def RotateBack(x_NHTD: Float, rotation_KDD: Float) -> Float:
    """`Rotate` with the transposed matrices: the inverse of an orthogonal rotation, or for queries ``q (R^-1)^T``."""
    from_right_KDD = op.Transpose(rotation_KDD, perm=[0, 2, 1])
    return Rotate(x_NHTD, from_right_KDD)


@spec
def Center(x_NKTD: Float, mean_KD: Float) -> Float:
    """Rows ``[N, K, T, D]`` without the mean ``[K, D]`` of their KV head."""
    return x_NKTD - op.Unsqueeze(mean_KD, [1])


@spec
def AddMean(x_BHTD: Float, mean_KD: Float) -> Float:
    """Attention outputs ``[B, H, T, D]`` plus the mean ``[K, D]`` of the values of their KV head."""
    kv = op.Shape(mean_KD, start=0, end=1)
    groups = op.Shape(x_BHTD, start=1, end=2) / kv
    grouped = op.Concat(op.Shape(x_BHTD, start=0, end=1), kv, groups, op.Shape(x_BHTD, start=2), axis=0)
    x_BKGTD = op.Reshape(x_BHTD, grouped, allowzero=1) + op.Unsqueeze(mean_KD, [1, 2])
    return op.Reshape(x_BKGTD, op.Shape(x_BHTD), allowzero=1)


@spec
def StoredNorm(norm: Float, x_NKTD: Float) -> Float:
    """Step 1: ``bf16(max(m, 1e-8))`` as ``[N, K, T, 1]``; a norm of the whole token is repeated for its KV heads."""
    shape = op.Concat(op.Shape(x_NKTD, end=3), [1], axis=0)
    return RoundBf16(op.Expand(op.Max(norm, 1e-8), shape))


@spec
def NormL2(x_NKTD: Float, axes: Sequence[int]) -> Float:
    """Step 1, l2: over the channels (`axes` 3) or over KV heads and channels (1, 3)."""
    over = op.Constant(value_ints=axes)
    return StoredNorm(op.Sqrt(op.ReduceSum(x_NKTD * x_NKTD, over)), x_NKTD)


@spec
def NormRsqrt(x_NKTD: Float, axes: Sequence[int]) -> Float:
    """Step 1, rsqrt: ``1 / (1 / sqrt(sum x^2 + 1e-8))``."""
    over = op.Constant(value_ints=axes)
    rsqrt = 1.0 / op.Sqrt(op.ReduceSum(x_NKTD * x_NKTD, over) + 1e-8)
    return StoredNorm(1.0 / rsqrt, x_NKTD)


@spec
def NormMax(x_NKTD: Float, axes: Sequence[int]) -> Float:
    """Step 1, max: the largest magnitude."""
    over = op.Constant(value_ints=axes)
    return StoredNorm(op.ReduceMax(op.Abs(x_NKTD), over), x_NKTD)


@spec
def NormMeanAbs(x_NKTD: Float, axes: Sequence[int]) -> Float:
    """Step 1, mean_abs: the mean magnitude."""
    over = op.Constant(value_ints=axes)
    return StoredNorm(op.ReduceMean(op.Abs(x_NKTD), over), x_NKTD)


@spec
def NearestCentroid(x_NKTD: Float, centroids_KCD: Float) -> Int:
    """Step 2: ids int64 ``[N, K, T]`` of the largest ``x . c - |c|^2 / 2``."""
    half_square_KC = op.ReduceSum(centroids_KCD * centroids_KCD, [-1], keepdims=0) / 2.0
    products_NKTC = op.MatMul(x_NKTD, op.Transpose(centroids_KCD, perm=[0, 2, 1]))
    return op.ArgMax(products_NKTC - op.Unsqueeze(half_square_KC, [1]), axis=-1, keepdims=0)


@spec
def Centroids(centroids_KCD: Float, ids_NKT: Int) -> Float:
    """The centroids ``[N, K, T, D]`` that ids int64 ``[N, K, T]`` name."""
    heads, size = op.Shape(centroids_KCD, start=0, end=1), op.Shape(centroids_KCD, start=1, end=2)
    first_K1 = op.Unsqueeze(op.Range(0, op.Squeeze(heads), 1) * size, [1])
    flat = op.Reshape(centroids_KCD, op.Concat(heads * size, op.Shape(centroids_KCD, start=2), axis=0))
    return op.Gather(flat, ids_NKT + first_K1, axis=0)


@spec
def ClipRows(x_NKTD: Float, ratio: Double) -> Float:
    """Step 3: clamp every row to ``+-tau``, entry ``min(int(ratio D), D - 1)`` of its magnitudes in ascending order.

    `ratio` is a float64 scalar. For ``D - 1`` tau is the largest magnitude, which changes nothing.
    """
    dim = op.Shape(x_NKTD, start=-1)
    index = op.Min(op.Cast(ratio * op.Cast(dim, to=11), to=INT64), dim - 1)
    largest, _places = op.TopK(op.Abs(x_NKTD), dim - index, axis=-1)
    tau = op.Gather(largest, op.Constant(value_ints=[-1]), axis=-1)
    return op.Min(op.Max(x_NKTD, -tau), tau)
