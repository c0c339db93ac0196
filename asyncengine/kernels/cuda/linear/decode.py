"""Codes of 4 and 8 bits become numbers of bfloat16 or float16 in registers, exactly, without the scale.

A conversion by the compiler takes a slow instruction for each element. Here the bits of a code become bits of a float,
two elements at a time: in its last places for int4 and int8, shifted into place for floats. One sum or product makes
the number of it.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, import-untyped"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

INT4_PLACES = (3, 2, 1, 0), (7, 6, 5, 4), (11, 10, 9, 8), (15, 14, 13, 12)
"""Places in 16 bits of the bits of four codes of int4, the highest bit first.

The last 8 bits of a bfloat16 whose other bits are 0 are a whole number of 2^-133, also where they reach the exponent;
the last 11 bits of a float16 are one of 2^-24. So a code that stays where it is, behind a mask, is a number already.
"""


@triton.constexpr_function
def int4_unit(*, half: bool) -> float:
    """The number that the code 9 of int4 becomes in registers, a power of 2; the code c becomes c - 8 times it.

    A greater one takes a second instruction, because the greatest powers of 2 are 2^127 in bfloat16 and 2^15 in
    float16 (``half``). Kernels divide their sums by it.
    """
    return 2.0**-9 if half else 2.0**-7


def nibbles_of_word(word: str, made: Sequence[str], *, half: bool) -> str:
    """Instructions that make numbers, in four registers of two, of eight codes of int4 in the order of INT4_PLACES.

    They are ``int4_unit`` times codes less 8: a product with a power of 2 and a sum, in one instruction.
    """
    kind = "f16x2" if half else "bf16x2"
    one, sixteenth, less = ("7800", "6800", "a400") if half else ("7e80", "7c80", "bd80")
    constants = {"one": one, "sixteenth": sixteenth, "less": less}
    lines = [f".reg .b32 {name}; mov.b32 {name}, 0x{bits}{bits};" for name, bits in constants.items()]
    lines.append(f".reg .b32 s, t; shr.b32 s, {word}, 8;")
    for number, to in enumerate(made):
        source = word if number < 2 else "s"
        mask, factor = ("0x00f000f0", "sixteenth") if number % 2 else ("0x000f000f", "one")
        lines.append(f"and.b32 t, {source}, {mask}; fma.rn.{kind} {to}, t, {factor}, less;")
    return " ".join(lines)


def bytes_of_word(word: str, first: str, second: str, *, half: bool) -> str:
    """Instructions that make 4 numbers, in two registers of two, of the 4 bytes of int8 of a word.

    A fraction of bfloat16 has 7 places. Behind 0x43 a byte without its sign is 128 more than its other 7 bits; its sign
    alone is 128 or, since it reaches the exponent, 256. The difference is the number. A fraction of float16 has 10
    places: 0x6400 is 1024, to which 128 more than the number is added.
    """
    lines = [".reg .b32 a, b;"] + ([f".reg .b32 u; xor.b32 u, {word}, 0x80808080;"] if half else [])
    source, magic = ("u", "0x64646464") if half else (word, "0x43434343")
    lines += [f"prmt.b32 {made}, {source}, {magic}, {order};" for made, order in (("a", "0x4140"), ("b", "0x4342"))]
    if half:
        lines.append(".reg .b32 less; mov.b32 less, 0xe480e480;")
        lines += [f"add.rn.f16x2 {made}, {of}, less;" for made, of in ((first, "a"), (second, "b"))]
        return " ".join(lines)
    lines.append(".reg .b32 c, d, minus; mov.b32 minus, 0xbf80bf80;")
    for made, of, sign in ((first, "a", "c"), (second, "b", "d")):
        lines.append(f"and.b32 {sign}, {of}, 0xff80ff80; and.b32 {of}, {of}, 0xff7fff7f;")
        lines.append(f"fma.rn.bf16x2 {made}, {sign}, minus, {of};")
    return " ".join(lines)


_FOUR = ("$0", "$1", "$2", "$3")
_NIBBLES_BF16 = tl.constexpr(f"{{ {nibbles_of_word('$4', _FOUR, half=False)} }}")
_NIBBLES_FP16 = tl.constexpr(f"{{ {nibbles_of_word('$4', _FOUR, half=True)} }}")

_INT8_BF16 = tl.constexpr(f"{{ {bytes_of_word('$2', '$0', '$1', half=False)} }}")
_INT8_FP16 = tl.constexpr(f"{{ {bytes_of_word('$2', '$0', '$1', half=True)} }}")

# Exponent and fraction move to the last places of those of bfloat16, whose exponents are greater by 120.
_FLOAT8_BF16 = tl.constexpr(
    """{
.reg .b32 a, b, c, d, e, f, power, zero;
mov.b32 power, 0x7b807b80;
mov.b32 zero, 0x80008000;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.b32 c, a, 4;
shr.b32 d, b, 4;
and.b32 e, a, 0x80008000;
and.b32 f, b, 0x80008000;
lop3.b32 c, c, 0x07f007f0, e, 0xea;
lop3.b32 d, d, 0x07f007f0, f, 0xea;
fma.rn.bf16x2 $0, c, power, zero;
fma.rn.bf16x2 $1, d, power, zero;
}""".replace("\n", " ")
)


FP4_PLACES = (15, 8, 7, 6), (11, 4, 3, 2), (9, 5, 1, 0), (10, 14, 13, 12)
"""Places in 16 bits of the sign, the two bits of the exponent and the fraction of four floats of 4 bits.

Those of bfloat16 are 15, 8, 7 and 6. Of all orders this one takes the fewest instructions to move them there.
"""


def fp4_of_word(word: str, made: Sequence[str], factors: Sequence[str]) -> str:
    """Instructions that make numbers of bfloat16, in four registers of two, of eight floats of 4 bits in the order of
    FP4_PLACES, times factors that are 2^126 times a scale.

    The exponent of bfloat16 is greater by 126.
    """
    moved = (
        f"and.b32 t, {word}, 0x81c081c0;",
        f"shl.b32 u, {word}, 4; and.b32 t, u, 0x81c081c0;",
        f"shl.b32 u, {word}, 3; and.b32 t, u, 0x01000100; shl.b32 u, {word}, 6; lop3.b32 t, u, 0x80c080c0, t, 0xea;",
        f"shr.b32 u, {word}, 6; and.b32 t, u, 0x01c001c0; shl.b32 u, {word}, 5; lop3.b32 t, u, 0x80008000, t, 0xea;",
    )
    lines = [".reg .b32 t, u, zero; mov.b32 zero, 0x80008000;"]
    for move, to, factor in zip(moved, made, factors, strict=True):
        lines.append(f"{move} fma.rn.bf16x2 {to}, t, {factor}, zero;")
    return " ".join(lines)


_FP4 = tl.constexpr(f"{{ {fp4_of_word('$4', _FOUR, ('$5', '$5', '$6', '$6'))} }}")
_EXACT = tl.constexpr(0x7E80)


@triton.jit
def fp4(packed, PLAIN: tl.constexpr):
    """The numbers of words int16 [BN, P, 8] that have four floats of 4 bits each, in the order of FP4_PLACES.

    They are the numbers [BN, P, 16] of the low halves and of the high ones (see ``in_tiles`` of grouped.py), in
    bfloat16. PLAIN: see ``nibbles``.
    """
    if PLAIN:
        word = packed.to(tl.int32)
        low = _joined(_plain_fp4(word, 15, 8, 7, 6), _plain_fp4(word, 11, 4, 3, 2))
        high = _joined(_plain_fp4(word, 9, 5, 1, 0), _plain_fp4(word, 10, 14, 13, 12))
    else:
        exact = tl.full(packed.shape, _EXACT, tl.int16)
        low, high = scaled_fp4(packed, exact, exact)
    return low, high


@triton.jit
def _joined(first, second):
    """[..., 16] of two [..., 8]: of each in turn two numbers."""
    BN: tl.constexpr = first.shape[0]
    PARTS: tl.constexpr = first.shape[1]
    t = tl.reshape(tl.join(first, second), [BN, PARTS, 4, 2, 2])
    return tl.reshape(tl.permute(t, (0, 1, 2, 4, 3)), [BN, PARTS, 16])


@triton.jit
def _plain_fp4(word, sign: tl.constexpr, upper: tl.constexpr, lower: tl.constexpr, last: tl.constexpr):
    """The floats with bits of words at such places, see FP4_PLACES."""
    fraction, power = (word >> last) & 1, ((word >> upper) & 1) * 2 + ((word >> lower) & 1)
    halves = tl.where(power == 0, fraction, ((2 + fraction) << power) >> 1)
    return tl.where(((word >> sign) & 1) == 0, halves, -halves).to(tl.float32) * 0.5


@triton.jit
def scaled_fp4(packed, low, high):
    """``fp4`` times scales; the bits of 2^126 times these, in bfloat16, are in int16 of the shape of the words."""
    first, second, third, fourth = tl.inline_asm_elementwise(
        _FP4, "=r,=r,=r,=r,r,r,r", [packed, low, high], (tl.bfloat16,) * 4, is_pure=True, pack=2
    )
    return _joined(first, second), _joined(third, fourth)


@triton.jit
def codes_of_words(packed):
    """Codes in int32 of words int16 [BN, P, 8] in the order of INT4_PLACES: [BN, P, 16] of the low halves and of the
    high ones."""
    word = packed.to(tl.int32)
    low = _joined(word & 15, (word >> 4) & 15)
    high = _joined((word >> 8) & 15, (word >> 12) & 15)
    return low, high


@triton.jit
def nibbles(packed, dtype: tl.constexpr, PLAIN: tl.constexpr):
    """The numbers of words int16 [BN, P, 8] that have four codes of int4 each, in the order of INT4_PLACES.

    They are codes less 8, times ``int4_unit``: [BN, P, 16] of the low halves and of the high ones, in ``dtype``. PLAIN:
    by operations that any dtype has.
    """
    if PLAIN:
        low, high = codes_of_words(packed)
        UNIT: tl.constexpr = int4_unit(half=dtype == tl.float16)
        low, high = ((low.to(tl.float32) - 8.0) * UNIT).to(dtype), ((high.to(tl.float32) - 8.0) * UNIT).to(dtype)
    else:
        if dtype == tl.bfloat16:
            first, second, third, fourth = tl.inline_asm_elementwise(
                _NIBBLES_BF16, "=r,=r,=r,=r,r", [packed], (tl.bfloat16,) * 4, is_pure=True, pack=2
            )
        else:
            first, second, third, fourth = tl.inline_asm_elementwise(
                _NIBBLES_FP16, "=r,=r,=r,=r,r", [packed], (tl.float16,) * 4, is_pure=True, pack=2
            )
        low, high = _joined(first, second), _joined(third, fourth)
    return low, high


@triton.jit
def whole_bytes(codes, dtype: tl.constexpr, PLAIN: tl.constexpr):
    """The numbers of int8 or float8 codes in ``dtype``. PLAIN: see ``nibbles``."""
    INT8: tl.constexpr = codes.dtype == tl.int8
    if PLAIN:
        made = codes.to(tl.float32).to(dtype)
    elif INT8 and dtype == tl.bfloat16:
        made = tl.inline_asm_elementwise(_INT8_BF16, "=r,=r,r", [codes], tl.bfloat16, is_pure=True, pack=4)
    elif INT8:
        made = tl.inline_asm_elementwise(_INT8_FP16, "=r,=r,r", [codes], tl.float16, is_pure=True, pack=4)
    elif dtype == tl.bfloat16:
        made = tl.inline_asm_elementwise(_FLOAT8_BF16, "=r,=r,r", [codes], tl.bfloat16, is_pure=True, pack=4)
    else:
        made = codes.to(dtype)
    return made
