"""The functions of a page format: rows to stored rows, stored rows to codes, codes to page bytes, and back.

What a format leaves out ("none", 0 or null in the manifest) is in none of its functions. Shapes: N blocks (or batch rows), K KV
heads, T tokens of a page, D head_dim, X page bytes; docs/manifest.md, "From a row to codes" and "A page".
"""

from kvcompile.codec import PageFormat, RowFormat
from kvcompile.codec.quantizer import LLOYD_MAX_LEVELS
from kvcompile.export.onnx.compose import Function
from kvcompile.export.onnx.layer import HALVES, Half, Layer

NORMS = {"l2": "NormL2", "rsqrt": "NormRsqrt", "max": "NormMax", "mean_abs": "NormMeanAbs"}


def coded_parts(row: RowFormat) -> list[str]:
    """What is stored of a half besides its codes, in the order in which functions return and take it."""
    parts = ["scale"] if row.zero_point == "none" else ["scale", "zero"]
    return [*parts, *(["norm"] if row.token_scale != "none" else []), *(["centroid"] if row.centroids else [])]


def store_function(layer: Layer, half: Half) -> Function:
    """``StoreKey(x_NKTD, rotation?, mean?)``: ``bf16(x @ R - mean)`` as float32 ``[N, K, T, D]``."""
    tensors = layer.names(f"{half}.rotation", f"{half}.mean")
    body = Function(
        f"Store{half.title()}", ["x", *tensors], f"Rows of the model as {half}s are stored: rotated, centred, BF16."
    )
    x = "x"
    if f"{half}.rotation" in tensors:
        x = body.call("Rotate", x, f"{half}.rotation")
    if f"{half}.mean" in tensors:
        x = body.call("Center", x, f"{half}.mean")
    return body.returns(("rows", body.call("RoundBf16", x)))


def encode_function(layer: Layer, half: Half) -> Function:
    """``EncodeKey(rows, clip_ratio, feedback?, centroids?)``: codes uint8 ``[N, K, T, D]``, then `coded_parts`.

    `rows` float32 ``[N, K, T, D]`` are stored rows. Scale and zero point float32 keep the shape of groups; norm is float32
    ``[N, K, T, 1]``, centroid int64 ``[N, K, T]``.
    """
    row, tokens = layer.row(half), layer.fmt.tokens
    tables = layer.names(f"{half}.feedback", f"{half}.centroids")
    body = Function(f"Encode{half.title()}", ["rows", f"{half}.clip_ratio", *tables], f"Stored {half} rows to codes.")
    split, along = _groups(row, tokens)
    found: dict[str, str] = {}
    x = "rows"
    if row.token_scale != "none":
        found["norm"] = body.call(NORMS[row.token_scale], x, axes=[1, 3] if row.norm_scope == "token" else [3])
        x = body.call("Div", x, found["norm"])
    if row.centroids:
        found["centroid"] = body.call("NearestCentroid", x, f"{half}.centroids")
        x = body.call("Sub", x, body.call("Centroids", f"{half}.centroids", found["centroid"]))
    x = body.call("ClipRows", x, f"{half}.clip_ratio")
    groups = body.call("SplitGroups", x, split=split)
    if row.zero_point == "none":
        found["scale"] = body.call("LevelScale", groups)
        codes = body.call("LevelCodes", groups, found["scale"], levels=list(LLOYD_MAX_LEVELS[row.bits]))
    else:
        found["scale"], low = body.calls("GridScale", groups, outputs=2, bits=row.bits, along=along)
        zero = "FloatZero" if row.zero_point == "float" else "IntegerZero"
        found["zero"] = body.call(zero, low, found["scale"])
        if row.rounding == "nearest":
            codes = body.call("NearestCodes", groups, found["scale"], found["zero"], bits=row.bits)
        else:
            whole = body.call("Shape", groups)
            grids = [_merge(body, body.call("Expand", found[part], whole), x) for part in ("scale", "zero")]
            codes = body.call("FeedbackCodes", x, *grids, f"{half}.feedback", bits=row.bits)
            codes = body.call("Cast", codes, to=2)
    return body.returns(("codes", _merge(body, codes, x)), *((part, found[part]) for part in coded_parts(row)))


def decode_function(layer: Layer, half: Half) -> Function:
    """``DecodeKey(codes, coded_parts, centroids?)``, the inverse of `encode_function`: float32 ``[N, K, T, D]``."""
    row = layer.row(half)
    tables = layer.names(f"{half}.centroids")
    body = Function(f"Decode{half.title()}", ["codes", *coded_parts(row), *tables], f"Codes of {half}s to rows.")
    groups = body.call("SplitGroups", "codes", split=_groups(row, layer.fmt.tokens)[0])
    if row.zero_point == "none":
        x = body.call("DequantizeLevels", groups, "scale", levels=list(LLOYD_MAX_LEVELS[row.bits]))
    else:
        x = body.call("Dequantize", groups, "scale", "zero")
    x = _merge(body, x, "codes")
    if row.centroids:
        x = body.call("Add", x, body.call("Centroids", f"{half}.centroids", "centroid"))
    if row.token_scale != "none":
        x = body.call("Mul", x, "norm")
    return body.returns(("rows", x))


def encode_page_function(layer: Layer) -> Function:
    """``EncodePage(k, v, ...)``: stored rows float32 ``[N, K, T, D]`` to pages uint8 ``[N, K, X]``."""
    encoders = {half: encode_function(layer, half) for half in HALVES}
    inputs = [name for half in HALVES for name in encoders[half].inputs[1:]]
    body = Function("EncodePage", ["k", "v", *inputs], "Stored rows of a page's tokens to its bytes.")
    codes, metadata, last = [], [], []
    for half, rows in zip(HALVES, ("k", "v"), strict=True):
        row = layer.row(half)
        parts = coded_parts(row)
        packed, *values = body.calls(encoders[half], rows, *encoders[half].inputs[1:], outputs=1 + len(parts))
        found = dict(zip(parts, values, strict=True))
        packed = body.call("Pack", packed, bits=row.bits)
        if half == "value":
            packed = body.call("Transpose", packed, perm=[0, 1, 3, 2])
        codes.append(body.call("Reshape", packed, body.constant(0, 0, -1)))
        metadata.append(body.call("ToLittleEndian", meta_cells(body, row, found), size=_cell_bytes(row)))
        if "norm" in found:
            words = body.call("ScaleCells", body.call("Squeeze", found["norm"], body.constant(3)))
            last.append(body.call("ToLittleEndian", words, size=2))
        if "centroid" in found:
            last.append(body.call("ToLittleEndian", body.call("Cast", found["centroid"], to=12), size=2))
    return body.returns(("pages", body.call("Concat", *codes, *metadata, *last, axis=-1)))


def decode_page_function(layer: Layer) -> Function:
    """``DecodePage(pages, centroids?)``: pages uint8 ``[N, K, X]`` to rows float32 ``[N, K, T, D]`` of keys and of values."""
    fmt = layer.fmt
    body = Function(
        "DecodePage", ["pages", *layer.names("key.centroids", "value.centroids")], "Bytes of pages to rows."
    )
    sizes = {name: size for name, (_, size) in fmt.sections.items() if size}
    pieces = body.calls("Split", "pages", body.constant(*sizes.values()), outputs=len(sizes), axis=-1)
    section = dict(zip(sizes, pieces, strict=True))
    out = []
    for half in HALVES:
        decoder = decode_function(layer, half)
        row = layer.row(half)
        found = _metadata(body, row, fmt.tokens, section[f"{half}_meta"])
        if f"{half}_norm" in section:
            words = body.call("FromLittleEndian", section[f"{half}_norm"], size=2)
            found["norm"] = body.call("Unsqueeze", body.call("WordsToFloat", words), body.constant(3))
        if f"{half}_centroid" in section:
            words = body.call("FromLittleEndian", section[f"{half}_centroid"], size=2)
            found["centroid"] = body.call("Cast", words, to=7)
        codes = body.call("Unpack", _code_bytes(body, fmt, half, section[f"{half}_codes"]), bits=row.bits)
        tables = layer.names(f"{half}.centroids")
        out.append(body.call(decoder, codes, *(found[part] for part in coded_parts(row)), *tables))
    return body.returns(("k", out[0]), ("v", out[1]))


def meta_cells(body: Function, row: RowFormat, found: dict[str, str]) -> str:
    """Scale and zero point as cells uint32 ``[N, K, M]``, in the order of a page."""
    zeros = [found["zero"]] if "zero" in found else []
    cells = body.call("Cells" if zeros else "ScaleCells", found["scale"], *zeros)
    return body.call("ToMetaOrder", cells, **_meta_order(row))


def _groups(row: RowFormat, tokens: int) -> tuple[list[int], int]:
    """What becomes of ``[T, D]`` so that groups have a dimension of their own, and which dimension that is."""
    if row.axis == "token":
        return [tokens, row.num_groups, row.group_size], 4
    return [tokens // row.group_size, row.group_size, row.head_dim], 3


def _meta_order(row: RowFormat) -> dict[str, object]:
    """Attributes of `ToMetaOrder`: groups of channels come before tokens."""
    return {"along": 4, "perm": [0, 1, 3, 2]} if row.axis == "token" else {"along": 3, "perm": [0, 1, 2, 3]}


def _cell_bytes(row: RowFormat) -> int:
    return 2 if row.zero_point == "none" else 4


def _metadata(body: Function, row: RowFormat, tokens: int, raw: str) -> dict[str, str]:
    shape = [row.num_groups, tokens] if row.axis == "token" else [tokens // row.group_size, row.head_dim]
    cells = body.call("FromLittleEndian", raw, size=_cell_bytes(row))
    cells = body.call("FromMetaOrder", cells, shape=shape, **_meta_order(row))
    if row.zero_point == "none":
        return {"scale": body.call("WordsToFloat", cells)}
    return dict(zip(("scale", "zero"), body.calls("ScaleAndZero", cells, outputs=2), strict=True))


def _code_bytes(body: Function, fmt: PageFormat, half: str, raw: str) -> str:
    """Code bytes of a page as rows of tokens: ``[N, K, T, D b / 8]``."""
    if half == "key":
        return body.call("Reshape", raw, body.constant(0, 0, fmt.tokens, fmt.key.row_bytes))
    columns = body.call("Reshape", raw, body.constant(0, 0, fmt.value.row_bytes, fmt.tokens))
    return body.call("Transpose", columns, perm=[0, 1, 3, 2])


def _merge(body: Function, groups: str, rows: str) -> str:
    """Groups, or what has the shape of rows already, as ``[N, K, T, D]``, the shape of `rows`."""
    return body.call("Reshape", groups, body.call("Shape", rows))
