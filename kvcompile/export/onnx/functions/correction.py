"""Linear correction; docs/manifest.md, "Linear correction".

Shapes: B batch rows, N new pages of one sequence, K KV heads, H = K G query heads, T tokens of a page, D head_dim, F features.
"""

from kvcompile.export.onnx.functions.opset import FLOAT, Float, Int, op, spec


@spec
def Features(logits: Float) -> Float:
    """A softmax over each half of the last of four dimensions."""
    shape = op.Concat([0, 0, 0, 2], op.Shape(logits, start=-1) / 2, axis=0)
    return op.Reshape(op.Softmax(op.Reshape(logits, shape), axis=-1), op.Shape(logits))


@spec
def KeyFeatures(k_NKTD: Float, decoded_NKTD: Float, key_KDF: Float) -> Float:
    """``phi_k`` ``[N, K, T, F]`` in the paper's form: of what quantization took from stored keys."""
    return Features(op.MatMul(k_NKTD - decoded_NKTD, key_KDF))


@spec
def KeyFeaturesRelative(k_NKTD: Float, decoded_NKTD: Float, key_KDF: Float, decoded_KDF: Float) -> Float:
    """``phi_k`` ``[N, K, T, F]`` in the relative form: of what it took and of what it left."""
    return Features(op.MatMul(k_NKTD - decoded_NKTD, key_KDF) + op.MatMul(decoded_NKTD, decoded_KDF))


@spec
def AbsorbPages(s_KFD: Float, p_KF: Float, phi_NKTF: Float, v_NKTD: Float) -> tuple[Float, Float]:
    """The states of one sequence after N more pages: ``S + phi^T v_q`` and ``P + sum phi``."""
    added_NKFD = op.MatMul(op.Transpose(phi_NKTF, perm=[0, 1, 3, 2]), v_NKTD)
    s = s_KFD + op.ReduceSum(added_NKFD, [0], keepdims=0)
    return s, p_KF + op.ReduceSum(phi_NKTF, [0, 2], keepdims=0)


@spec
def Weights(lse_BH: Float, num_tokens_B: Int, scale_H: Float) -> tuple[Float, Float]:
    """Paper's form: factors ``[B, H]`` of the attention output and of the correction, both divided by ``max(U, 1)``."""
    return op.Exp(op.Min(lse_BH, 0.0)), scale_H * op.Exp(0.0 - op.Max(lse_BH, 0.0))


@spec
def WeightsRelative(lse_BH: Float, num_tokens_B: Int, scale_H: Float) -> tuple[Float, Float]:
    """Relative form: 1 and ``scale / n``, both divided by U; n counts the tokens that the query sees, itself included."""
    seen_B1 = op.Unsqueeze(op.Max(op.Cast(num_tokens_B, to=FLOAT), 1.0), [1])
    return op.ConstantOfShape(op.Shape(lse_BH)) + 1.0, scale_H / seen_B1


@spec
def Correct(
    out_BHD: Float, q_BHD: Float, s_BKFD: Float, p_BKF: Float, query_HDF: Float, kept_BH: Float, weight_BH: Float
) -> Float:
    """Attention output ``[B, H, D]`` with ``w phi_q S`` in its numerator and ``w phi_q P`` in its denominator."""
    kv, features = op.Shape(p_BKF, start=1, end=2), op.Shape(p_BKF, start=2)
    grouped = op.Concat(op.Shape(q_BHD, end=1), kv, op.Shape(q_BHD, start=1, end=2) / kv, features, axis=0)
    phi_BH1F = Features(op.MatMul(op.Unsqueeze(q_BHD, [2]), query_HDF))
    phi_BKGF = op.Reshape(phi_BH1F, grouped)
    added_BHD = op.Reshape(op.MatMul(phi_BKGF, s_BKFD), op.Shape(out_BHD))
    added_BH = op.Reshape(op.MatMul(phi_BKGF, op.Unsqueeze(p_BKF, [-1])), op.Shape(kept_BH))
    numerator = out_BHD * op.Unsqueeze(kept_BH, [-1]) + added_BHD * op.Unsqueeze(weight_BH, [-1])
    return numerator / op.Unsqueeze(op.Max(kept_BH + added_BH * weight_BH, 1e-30), [-1])
