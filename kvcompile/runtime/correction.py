"""Linear correction of attention over quantized keys (KVLinC, seed 004 section 3.2): feature maps and running states.

Shapes: B batch rows, K KV heads, G query heads per KV head, H = K G, D head_dim, F features, T tokens, N blocks.

``phi(x) = [softmax(x W1), softmax(x W2)]``. States ``S = sum phi_k(k - k_q)^T v_q`` and ``P = sum phi_k(k - k_q)`` grow
when a block is quantized; phi(0) is not 0, so tokens in BF16 windows stay out of them. A query adds ``phi_q(q) S`` to the
numerator and ``phi_q(q) P`` to the denominator of its softmax, both unscaled: Algorithm 1 of the paper, which rescales only
the softmax by exp(-m), is corrected here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Correction:
    """Trained feature maps of one layer: ``query_HDF`` and ``key_KDF`` float32; the halves of F are W1 and W2."""

    query_HDF: Tensor
    key_KDF: Tensor


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

    def add(self, row: int, correction: Correction, error_NKTD: Tensor, v_NKTD: Tensor) -> None:
        """Take in blocks of a row: what quantization took from the keys, and the values as they are decoded."""
        phi_KTF = features(error_NKTD.transpose(0, 1).flatten(1, 2), correction.key_KDF)
        self.s_BKFD[row] += phi_KTF.mT @ v_NKTD.transpose(0, 1).flatten(1, 2)
        self.p_BKF[row] += phi_KTF.sum(dim=1)

    def select(self, index: Tensor) -> "CorrectionStates":
        """The states of these rows, copied."""
        return CorrectionStates(self.s_BKFD.index_select(0, index), self.p_BKF.index_select(0, index))

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Both states."""
        return self.s_BKFD, self.p_BKF

    def correct(self, out_BHTD: Tensor, lse_BHT: Tensor, q_BHTD: Tensor, correction: Correction) -> Tensor:
        """Attention output with the correction added to numerator and denominator; `lse` is the log of the latter."""
        groups = q_BHTD.shape[1] // self.p_BKF.shape[1]
        phi_BHTF = features(q_BHTD, correction.query_HDF)
        s_BHFD, p_BHF = (x.repeat_interleave(groups, 1) for x in (self.s_BKFD, self.p_BKF))
        weight_BHT = (-lse_BHT).exp()
        numerator = out_BHTD + (phi_BHTF @ s_BHFD) * weight_BHT[..., None]
        denominator = 1 + (phi_BHTF @ p_BHF[..., None])[..., 0] * weight_BHT
        return numerator / denominator[..., None]


def features(x_KTD: Tensor, w_KDF: Tensor) -> Tensor:
    """``phi(x)`` ``[..., K, T, F]`` of seed 004 equation 6."""
    logits = (x_KTD.float() @ w_KDF).unflatten(-1, (2, -1))
    return logits.softmax(dim=-1).flatten(-2)
