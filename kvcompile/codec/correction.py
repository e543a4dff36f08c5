"""Linear correction of attention over quantized keys (KVLinC, seed 004 section 3.2): feature maps and running states.

Shapes: B batch rows, K KV heads, G query heads per KV head, H = K G, D head_dim, F features, T tokens, N blocks.

``phi(x) = [softmax(x W1), softmax(x W2)]``. States ``S = sum phi_k^T v_q`` and ``P = sum phi_k`` grow when a block is
quantized; phi(0) is not 0, so tokens in BF16 windows stay out of them. A query adds ``w phi_q(q) S`` to the numerator and
``w phi_q(q) P`` to the denominator of its softmax. Two forms (`docs/schemes.md` says what they gain):

paper     ``phi_k(k - k_q)``, and ``w = scale``: equation 5 for scale 1. Algorithm 1 of the paper rescales only the softmax by
          exp(-m) and leaves the correction as it is; here both are rescaled.
relative  ``phi_k`` reads ``k - k_q`` and ``k_q`` (a second matrix, added before its softmax), and ``w = scale U / n``, where
          U is the softmax's own denominator over the n tokens that the query sees: a share of attention, whatever the logits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Correction:
    """Trained feature maps of one layer, float32; the halves of F are W1 and W2.

    ``query_HDF``, ``key_KDF`` (of key errors), ``scale_H`` (0 switches a head off) and, in the relative form only,
    ``decoded_KDF`` (of decoded keys).
    """

    query_HDF: Tensor
    key_KDF: Tensor
    scale_H: Tensor
    decoded_KDF: Tensor | None = None

    def query_features(self, q_HTD: Tensor) -> Tensor:
        """``phi_q(q)`` ``[..., H, T, F]`` float32 of queries in the basis of the stored keys."""
        return _normalize(q_HTD.float() @ self.query_HDF)

    def key_features(self, error_KTD: Tensor, decoded_KTD: Tensor) -> Tensor:
        """``phi_k`` ``[..., K, T, F]`` float32 of what quantization took from keys, and of what it left."""
        logits_KTF = error_KTD.float() @ self.key_KDF
        if self.decoded_KDF is not None:
            logits_KTF = logits_KTF + decoded_KTD.float() @ self.decoded_KDF
        return _normalize(logits_KTF)

    def weights(self, lse_HT: Tensor, tokens_T: Tensor) -> tuple[Tensor, Tensor]:
        """Factors ``[..., H, T]`` of the attention output and of the correction, up to a common one.

        `lse_HT` is the log of U, `tokens_T` is n (any shape that broadcasts). Nothing overflows, whatever the lse; both are
        infinite for padding, which then gets no correction.
        """
        if self.decoded_KDF is not None:
            return torch.ones_like(lse_HT), (self.scale_H[:, None] / tokens_T.clamp_min(1)).expand_as(lse_HT)
        return lse_HT.clamp_max(0).exp(), self.scale_H[:, None] * (-lse_HT.clamp_min(0)).exp()


def _normalize(logits_KTF: Tensor) -> Tensor:
    """Seed 004 equation 6: a softmax over each half of the features."""
    return logits_KTF.unflatten(-1, (2, -1)).softmax(dim=-1).flatten(-2)


@dataclass
class CorrectionStates:
    """S ``[B, K, F, D]`` and P ``[B, K, F]`` float32 of one layer of a cache."""

    s_BKFD: Tensor
    p_BKF: Tensor

    @classmethod
    def zeros(cls, correction: Correction, batch: int, head_dim: int, device: torch.device) -> "CorrectionStates":
        """Nothing quantized yet."""
        num_kv, _, features = correction.key_KDF.shape
        shape = (batch, num_kv, features)
        return cls(torch.zeros(*shape, head_dim, device=device), torch.zeros(shape, device=device))

    def add(self, row: int, correction: Correction, k_NKTD: Tensor, decoded_NKTD: Tensor, v_NKTD: Tensor) -> None:
        """Take in blocks of a row: stored bfloat16 keys, and keys and values as they are decoded."""
        k_KTD, decoded_KTD, v_KTD = (x.float().transpose(0, 1).flatten(1, 2) for x in (k_NKTD, decoded_NKTD, v_NKTD))
        phi_KTF = correction.key_features(k_KTD - decoded_KTD, decoded_KTD)
        self.s_BKFD[row] += phi_KTF.mT @ v_KTD
        self.p_BKF[row] += phi_KTF.sum(dim=1)

    def select(self, index: Tensor) -> "CorrectionStates":
        """The states of these rows, copied."""
        return CorrectionStates(self.s_BKFD.index_select(0, index), self.p_BKF.index_select(0, index))

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Both states."""
        return self.s_BKFD, self.p_BKF

    def correct(
        self, out_BHTD: Tensor, lse_BHT: Tensor, tokens_BT: Tensor, q_BHTD: Tensor, correction: Correction
    ) -> Tensor:
        """Attention output float32 with the correction added to numerator and denominator.

        `lse_BHT` is the log of the denominator, `tokens_BT` counts the tokens that a query sees, itself included.
        """
        groups = q_BHTD.shape[1] // self.p_BKF.shape[1]
        phi_BKXF = correction.query_features(q_BHTD).unflatten(1, (-1, groups)).flatten(2, 3)
        added_BHTD = (phi_BKXF @ self.s_BKFD).reshape(q_BHTD.shape)
        added_BHT = (phi_BKXF @ self.p_BKF[..., None]).reshape(lse_BHT.shape)
        kept_BHT, weight_BHT = correction.weights(lse_BHT, tokens_BT[:, None])
        numerator = out_BHTD * kept_BHT[..., None] + added_BHTD * weight_BHT[..., None]
        return numerator / (kept_BHT + added_BHT * weight_BHT).clamp_min(1e-30)[..., None]
