"""How many bits a cached element takes under a scheme: codes, metadata, norms, windows and the states of a correction."""

from kvcompile.scheme.model import LayerScheme, LinearCorrection, NoTokenScale, Quantizer, RowCodec

BF16_BITS = 16
STATE_BITS = 32


def group_size(quantizer: Quantizer, head_dim: int) -> int:
    """The group that is really used: of channels at most the whole head, of tokens what the scheme says."""
    return min(quantizer.group_size, head_dim) if quantizer.axis == "token" else quantizer.group_size


def history_bits(row: RowCodec, head_dim: int) -> float:
    """Bits per element of a packed row: codes, BF16 metadata per group, and what is stored once per token."""
    quantizer = row.quantizer
    metadata = BF16_BITS if quantizer.zero_point == "none" else 2 * BF16_BITS
    per_token = BF16_BITS * ((not isinstance(row.token_scale, NoTokenScale)) + (row.centroids > 0))
    return quantizer.bits + metadata / group_size(quantizer, head_dim) + per_token / head_dim


def bits_per_element(scheme: LayerScheme, head_dim: int, tokens: int, state_bits: int = STATE_BITS) -> float:
    """Mean bits per key and value element of a layer at a context of `tokens` (seed 000 tables 1 and 2: 2.28 at 128k).

    Sink and recent tokens count in BF16, and with a channel-wise half the residual block too, in full. The paper of KVLinC
    counts `state_bits` as 16; here states are float32.
    """
    packed = (history_bits(scheme.key, head_dim) + history_bits(scheme.value, head_dim)) / 2
    residual = scheme.window.block if "channel" in (scheme.key.quantizer.axis, scheme.value.quantizer.axis) else 0
    dense = min(scheme.window.sink + scheme.window.recent + residual, tokens)
    bits = packed + dense / tokens * (BF16_BITS - packed)
    if isinstance(scheme.correction, LinearCorrection):
        bits += state_bits * scheme.correction.features * (head_dim + 1) / (2 * tokens * head_dim)
    return bits
