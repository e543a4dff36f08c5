"""Reading and extending a cache; docs/manifest.md, "Which token is where" and "Rotations and means".

Shapes: B batch rows, K KV heads, G query heads per KV head, H = K G, D head_dim, S sink slots, W ring slots (at least 1),
P pages in the pool, N columns of the page table, one more after `KnownPages`, X page bytes, T tokens of a page,
V = S + (N + 1) T + W slots in all.
"""

from kvcompile.export.onnx.functions.opset import INT64, NEGATIVE_INFINITY, UINT8, Bool, Byte, Float, Int, op, spec


@spec
def Visible(num_tokens_B: Int, num_pages_B: Int, ids_BN: Int, sink_BKSD: Float, ring_BKWD: Float, page: int) -> Bool:
    """Which slots ``[B, V]`` hold tokens: the sink's, then the pages', then the ring's. `page` is T; lengths are int32."""
    tokens = op.Unsqueeze(op.Cast(num_tokens_B, to=INT64), [1])
    sink, ring = op.Squeeze(op.Shape(sink_BKSD, start=2, end=3)), op.Squeeze(op.Shape(ring_BKWD, start=2, end=3))
    paged = op.Unsqueeze(op.Cast(num_pages_B, to=INT64), [1]) * op.Constant(value_int=page)
    slots = op.Squeeze(op.Shape(ids_BN, start=1)) * op.Constant(value_int=page)
    waiting = tokens - op.Min(tokens, sink) - paged
    behind = op.Mod(op.Range(0, ring, 1) - paged, ring)  # how many slots after the oldest token of the ring
    return op.Concat(op.Range(0, sink, 1) < tokens, op.Range(0, slots, 1) < paged, behind < waiting, axis=1)


@spec
def KnownPages(table_BN: Int, num_pages_B: Int) -> Int:
    """The page table int64 ``[B, N + 1]`` with ids counted from 1; 0 past a row's count, where a table is undefined.

    The last column is always 0, so that no later shape is empty.
    """
    columns = op.Range(0, op.Squeeze(op.Shape(table_BN, start=1)), 1)
    known = columns < op.Unsqueeze(op.Cast(num_pages_B, to=INT64), [1])
    return op.Pad(op.Where(known, op.Cast(table_BN, to=INT64) + 1, 0), [0, 0, 0, 1])


@spec
def GatherPages(pages_PKX: Byte, ids_BN: Int) -> Byte:
    """Pages uint8 ``[B N, K, X]`` of all rows in order of age; id 0 is a page of zeros."""
    nothing = op.Expand(
        op.Cast(op.Constant(value_int=0), to=UINT8), op.Concat([1], op.Shape(pages_PKX, start=1), axis=0)
    )
    return op.Gather(op.Concat(nothing, pages_PKX, axis=0), op.Reshape(ids_BN, [-1]), axis=0)


@spec
def PagesOfRows(x_MKTD: Float, ids_BN: Int) -> Float:
    """Decoded pages ``[B N, K, T, D]`` as the tokens of their rows: ``[B, K, N T, D]``."""
    batch, columns = op.Shape(ids_BN, start=0, end=1), op.Shape(ids_BN, start=1)
    heads, tokens = op.Shape(x_MKTD, start=1, end=2), op.Shape(x_MKTD, start=2, end=3)
    apart = op.Concat(op.Shape(ids_BN), op.Shape(x_MKTD, start=1), axis=0)
    together = op.Concat(batch, heads, columns * tokens, op.Shape(x_MKTD, start=3), axis=0)
    x_BKNTD = op.Transpose(op.Reshape(x_MKTD, apart, allowzero=1), perm=[0, 2, 1, 3, 4])
    return op.Reshape(x_BKNTD, together, allowzero=1)


@spec
def GroupQueries(q_BHD: Float, kv: Int) -> Float:
    """Rows ``[B, H, D]`` as ``[B, K, G, D]``; `kv` is the list ``[K]``."""
    groups = op.Shape(q_BHD, start=1, end=2) / kv
    return op.Reshape(q_BHD, op.Concat(op.Shape(q_BHD, end=1), kv, groups, op.Shape(q_BHD, start=2), axis=0))


@spec
def Logits(q_BHD: Float, k_BKVD: Float, scaling: Float) -> Float:
    """Products ``[B, K, G, V]`` of rotated queries with stored keys, scaled."""
    q_BKGD = GroupQueries(q_BHD, op.Shape(k_BKVD, start=1, end=2))
    return op.MatMul(q_BKGD, op.Transpose(k_BKVD, perm=[0, 1, 3, 2])) * scaling


@spec
def Shift(q_BHD: Float, mean_KD: Float, scaling: Float) -> Float:
    """What the mean of the keys takes from every logit ``[B, H]`` of a rotated query."""
    products_BKGD = GroupQueries(q_BHD, op.Shape(mean_KD, end=1)) * op.Unsqueeze(mean_KD, [1])
    return op.Reshape(op.ReduceSum(products_BKGD, [-1]), op.Shape(q_BHD, end=2)) * scaling


@spec
def AddShift(logits_BKGV: Float, shift_BH: Float) -> Float:
    """Logits with the `Shift` of their query."""
    return logits_BKGV + op.Reshape(shift_BH, op.Concat(op.Shape(logits_BKGV, end=3), [1], axis=0))


@spec
def SoftCap(logits: Float, softcap: Float) -> Float:
    """``softcap tanh(logit / softcap)``."""
    return op.Tanh(logits / softcap) * softcap


@spec
def Attend(logits_BKGV: Float, v_BKVD: Float, visible_BV: Bool) -> tuple[Float, Float]:
    """Attention of one token per row: output ``[B, H, D]``, log of the softmax denominator ``[B, H]``, both float32.

    Slots that are not visible may hold anything. A row without tokens gives zeros and minus infinity.
    """
    hidden = op.Constant(value_float=NEGATIVE_INFINITY)
    logits_BKGV = op.Where(op.Unsqueeze(visible_BV, [1, 2]), logits_BKGV, hidden)
    v_BKVD = op.Where(op.Unsqueeze(visible_BV, [1, 3]), v_BKVD, 0.0)
    largest = op.Max(op.ReduceMax(logits_BKGV, [-1]), -3.0e38)
    weights_BKGV = op.Exp(logits_BKGV - largest)
    denominator = op.ReduceSum(weights_BKGV, [-1])
    out_BKGD = op.MatMul(weights_BKGV, v_BKVD) / op.Max(denominator, 1e-30)
    lse_BKG1 = op.Log(denominator) + largest
    heads = op.Concat(op.Shape(logits_BKGV, end=1), [-1], axis=0)
    whole = op.Concat(heads, op.Shape(v_BKVD, start=3), axis=0)
    return op.Reshape(out_BKGD, whole), op.Reshape(lse_BKG1, heads)


@spec
def LeaveToSinks(out_BHD: Float, lse_BH: Float, sinks_H: Float) -> Float:
    """Attention outputs less the share that attention sinks take: further logits in a head's denominator, without a value."""
    return out_BHD * op.Unsqueeze(op.Sigmoid(lse_BH - sinks_H), [2])


@spec
def AppendSink(sink_BKSD: Float, row_BKTD: Float, num_tokens_B: Int) -> Float:
    """The sink with the new row (T = 1) of every sequence that has less than S tokens, in slot `num_tokens`."""
    size = op.Squeeze(op.Shape(sink_BKSD, start=2, end=3))
    here_BS = op.Range(0, size, 1) == op.Unsqueeze(op.Cast(num_tokens_B, to=INT64), [1])
    return op.Where(op.Unsqueeze(here_BS, [1, 3]), row_BKTD, sink_BKSD)


@spec
def AppendRing(ring_BKWD: Float, row_BKTD: Float, num_tokens_B: Int, sink_BKSD: Float) -> Float:
    """The ring with the new row (T = 1) of every sequence whose sink is full, in slot ``(num_tokens - S) % W``."""
    size = op.Squeeze(op.Shape(ring_BKWD, start=2, end=3))
    history_B1 = op.Unsqueeze(op.Cast(num_tokens_B, to=INT64), [1]) - op.Squeeze(op.Shape(sink_BKSD, start=2, end=3))
    here_BW = op.And(op.Range(0, size, 1) == op.Mod(history_B1, size), history_B1 >= 0)
    return op.Where(op.Unsqueeze(here_BW, [1, 3]), row_BKTD, ring_BKWD)
