"""Numbers as the decode kernels' tensor cores take them: packed codes as int8, floats as pairs of int8 or of BF16.

Shapes in a kernel: rows and PG query heads, padded; a pair of columns is (high, low).
"""
# mypy: allow-untyped-defs

import triton
import triton.language as tl

from kvcompile.kernels.triton_encode import as_float, bf16_bits, to_bf16

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
OPERAND_RUN = tl.constexpr(8 if triton.__version__.startswith(("3.6", "3.7")) else 4)
"""Neighbours along the summed axis that one thread has of an int8 operand: the compiler's choice, other than the hardware's."""


@triton.constexpr_function
def _shift(i, bits):
    """Codes of the high half of a byte are shifted down; within a half they stay where they are."""
    return 4 if i * bits >= 4 else 0


@triton.constexpr_function
def code_weight(i, bits):
    """What `codes` multiplies codes i by: their place in a half byte, which costs no instruction to keep."""
    return 2 ** (i * bits - _shift(i, bits))


@triton.constexpr_function
def _mask(i, bits):
    return (2**bits - 1) * code_weight(i, bits)


@triton.constexpr_function
def _assembly(i, bits):
    mask = f"0x{_mask(i, bits) * 0x01010101:08x}"
    if _shift(i, bits):
        return f"{{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, {mask}; }}"
    return f"and.b32 $0, $1, {mask};"


@triton.jit
def codes(packed, i: tl.constexpr, BITS: tl.constexpr):
    """Codes i of all bytes times `code_weight`, as int8.

    Four bytes per instruction, in the layout of a tensor-core operand, so that codes never leave registers.
    """
    if INTERPRETED:
        return ((packed >> _shift(i, BITS)) & _mask(i, BITS)).to(tl.int8)
    else:
        return tl.inline_asm_elementwise(_assembly(i, BITS), "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4)


@triton.constexpr_function
def place_weight(i, bits):
    """What `codes_in_place` multiplies codes i by."""
    return 2 ** (i * bits)


@triton.constexpr_function
def place_offset(i, bits):
    """What `codes_in_place` takes from codes i: the sign of the top bit."""
    return 128 if (i + 1) * bits == 8 else 0


@triton.constexpr_function
def _place_assembly(i, bits):
    mask = f"0x{((2**bits - 1) << i * bits) * 0x01010101:08x}"
    if (i + 1) * bits == 8:
        return f"lop3.b32 $0, $1, {mask}, 0x80808080, 0x6a;"  # (a & b) ^ c
    return f"and.b32 $0, $1, {mask};"


@triton.jit
def codes_in_place(packed, i: tl.constexpr, BITS: tl.constexpr):
    """Codes i of all bytes times `place_weight` minus `place_offset`, as int8: one instruction for four of any place."""
    if INTERPRETED:
        return ((packed & (2**BITS - 1) << i * BITS) ^ place_offset(i, BITS)).to(tl.int8)
    else:
        return tl.inline_asm_elementwise(
            _place_assembly(i, BITS), "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4
        )


@triton.jit
def _low_byte(n):
    """The low byte of an int32 as a signed byte."""
    low = n & 0xFF
    return (low - ((low & 0x80) << 1)).to(tl.int8)


@triton.jit
def _fixed_bytes(x, inverse):
    """Signed bytes high and low of `x * inverse`, rounded, which is 256 high + low.

    Adding 1.5 * 2^23 leaves the nearest integer in the low bits, and 128 more the high byte of that with a signed low one.
    """
    n = (x * inverse + 12583040.0).to(tl.int32, bitcast=True)
    if INTERPRETED:
        return _low_byte(n >> 8), _low_byte(n ^ 128)
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, low;
            prmt.b32 a, $2, $3, 0x5140; prmt.b32 b, $4, $5, 0x5140;
            prmt.b32 $0, a, b, 0x7632; prmt.b32 low, a, b, 0x5410; xor.b32 $1, low, 0x80808080; }""",
            "=r,=r,r,r,r,r", [n], dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def fixed_pairs(x, inverse, ROWS: tl.constexpr, PG: tl.constexpr):
    """`x * inverse` ``[ROWS, PG]``, at most 32512 in magnitude, rounded, as int8 ``[ROWS, 2 PG]``: each column as two.

    A number is 256 high + low; 32512 is 256 * 127.
    """
    high, low = _fixed_bytes(x, inverse)
    return tl.join(high, low).reshape(ROWS, 2 * PG)


@triton.jit
def dealt_pairs(x, inverse, T: tl.constexpr, PG: tl.constexpr):
    """`fixed_pairs` of rows that were dealt: row 8 j + a of every 32 is token 4 a + j of the result.

    A thread of a tensor-core result holds rows that are 8 apart, so that it has the four tokens of an operand's word.
    """
    high, low = _fixed_bytes(x, inverse)
    high_00, high_01, high_10, high_11 = _neighbours(high, T, PG)
    low_00, low_01, low_10, low_11 = _neighbours(low, T, PG)
    even = tl.join(tl.join(high_00, low_00), tl.join(high_10, low_10))
    odd = tl.join(tl.join(high_01, low_01), tl.join(high_11, low_11))
    return tl.join(even, odd).permute(0, 1, 4, 5, 2, 3).reshape(T, 2 * PG)


@triton.jit
def pair_rows(x, inverse, ROWS: tl.constexpr, PG: tl.constexpr):
    """`fixed_pairs` as rows ``[2 PG, ROWS]``: the high bytes of all columns, then the low ones, which the same thread has."""
    high, low = _fixed_bytes(x, inverse)
    return tl.join(high, low).permute(2, 1, 0).reshape(2 * PG, ROWS)


@triton.jit
def halves(x, T: tl.constexpr, PG: tl.constexpr):
    """Rows ``[T, PG]`` that were dealt in pairs as the even tokens ``[PG, T / 2]`` and the odd ones, in order."""
    even, odd = tl.split(x.reshape(T // 16, 2, 8, PG).permute(0, 2, 3, 1))
    return tl.trans(even.reshape(T // 2, PG)), tl.trans(odd.reshape(T // 2, PG))


@triton.jit
def in_order(x, T: tl.constexpr, PG: tl.constexpr):
    """Rows ``[T, PG]`` that were dealt in pairs, in the order of tokens."""
    return x.reshape(T // (4 * OPERAND_RUN), OPERAND_RUN // 2, 4, 2, PG).permute(0, 2, 1, 3, 4).reshape(T, PG)


@triton.jit
def split_rows(rows, COLUMNS: tl.constexpr, PG: tl.constexpr):
    """int32 ``[2 PG, COLUMNS]`` of high and then low rows as two ``[COLUMNS, PG]``."""
    return tl.split(rows.reshape(2, PG, COLUMNS).permute(2, 1, 0))


@triton.constexpr_function
def half_code_weight(i, bits):
    """What `half_codes` multiplies codes i by."""
    return 2.0 ** (i * bits - 24)


@triton.constexpr_function
def _half_assembly(i, bits, odd):
    mask = f"0x{((2**bits - 1) << i * bits) * 0x00010001:08x}"
    if odd:
        return f"{{ .reg .b32 t; shr.u32 t, $1, 8; and.b32 $0, t, {mask}; }}"
    return f"and.b32 $0, $1, {mask};"


@triton.jit
def half_codes(packed, i: tl.constexpr, BITS: tl.constexpr, ODD: tl.constexpr):
    """Codes i of the low, or the high, bytes of int16 numbers as float16, times `half_code_weight`.

    The bits of a code, left where they are, are those of a subnormal number, which tensor cores multiply exactly.
    """
    if INTERPRETED:
        return ((packed >> (8 if ODD else 0)) & ((2**BITS - 1) << i * BITS)).to(tl.float16, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            _half_assembly(i, BITS, ODD), "=r,r", [packed], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def _neighbours(x, T: tl.constexpr, PG: tl.constexpr):
    """Dealt rows ``[T, PG]`` as four times ``[T / 32, 8, PG]``: tokens 0 to 3 of each four."""
    even, odd = tl.split(x.reshape(T // 32, 2, 2, 8, PG).permute(0, 3, 4, 1, 2))
    x_00, x_10 = tl.split(even)
    x_01, x_11 = tl.split(odd)
    return x_00, x_01, x_10, x_11


@triton.jit
def split_columns(pairs, ROWS: tl.constexpr, PG: tl.constexpr):
    """int32 ``[ROWS, 2 PG]`` of (high, low) columns as two ``[ROWS, PG]``."""
    return tl.split(pairs.reshape(ROWS, PG, 2))


@triton.jit
def bf16_pairs(x, ROWS: tl.constexpr, PG: tl.constexpr):
    """float32 ``[ROWS, PG]`` to bf16 ``[ROWS, 2 PG]``, each column as (x rounded, rest)."""
    high = bf16_bits(x).to(tl.float32, bitcast=True)
    return tl.join(to_bf16(high), to_bf16(x - high)).reshape(ROWS, 2 * PG)


@triton.jit
def bf16_dot(a, pairs, ROWS: tl.constexpr, PG: tl.constexpr):
    """bf16 ``[ROWS, k]`` times pairs ``[k, 2 PG]``: float32 ``[ROWS, PG]``. Interpreters multiply no bf16."""
    both = tl.dot(as_float(a), as_float(pairs)) if INTERPRETED else tl.dot(a, pairs)
    high, low = tl.split(both.reshape(ROWS, PG, 2))
    return high + low


@triton.jit
def loop_end(n):
    """`n` as the end of a loop: with numpy >= 2.4 the interpreter of triton 3.6 takes no tensor (triton #9171)."""
    if INTERPRETED:
        return n.handle.data.item()
    else:
        return n
