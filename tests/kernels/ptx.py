"""The few instructions of PTX that convert codes (linear/decode.py), executed in torch."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

WORD = 0xFFFFFFFF
DTYPES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def halves(register: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The two numbers of registers int64 [n], the low one first: [n, 2]."""
    return register.to(torch.uint32).view(torch.uint16).view(dtype).view(-1, 2)


def register_of(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Registers int64 [n] of two numbers [n, 2], rounded to ``dtype``."""
    return values.to(dtype).view(torch.uint16).view(torch.uint32).view(-1).long()


def _permuted(a: torch.Tensor, b: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    of_both = [(source >> 8 * i) & 255 for source in (a, b) for i in range(4)]
    picked = [of_both[(int(order) >> 4 * i) & 15] for i in range(4)]
    return sum((byte << 8 * i for i, byte in enumerate(picked)), torch.zeros_like(a))


_BITWISE: dict[str, Callable[..., torch.Tensor]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shr.b32": lambda a, places: a >> places,
    "shl.b32": lambda a, places: a << places,
    "prmt.b32": _permuted,
    "lop3.b32": lambda a, b, c, table: (a & b) | c,
}


def execute(text: str, registers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The registers that instructions leave, of registers int64 [n]. Halves of registers are int64 too."""
    registers = dict(registers)
    [count] = {len(register) for register in registers.values()}

    def value(operand: str) -> torch.Tensor:
        return registers[operand] if operand in registers else torch.tensor([int(operand, 0)])

    for statement in filter(None, (part.strip() for part in re.sub(r"^\{ | \}$", "", text.strip()).split(";"))):
        operation, _, rest = statement.partition(" ")
        if operation == ".reg":
            continue
        if taken := re.fullmatch(r"\{(\S+), (\S+)\}, (\S+)", rest):
            assert operation == "mov.b32"
            low, high, source = taken.groups()
            registers[low], registers[high] = value(source) & 0xFFFF, value(source) >> 16
            continue
        to, *operands = (word.strip() for word in rest.split(","))
        if operation in _BITWISE:
            assert operation != "lop3.b32" or operands[-1] == "0xea"
            registers[to] = (_BITWISE[operation](*map(value, operands)) & WORD).expand(count)
            continue
        name, rounding, kind = operation.split(".")
        assert rounding == "rn"
        assert name in ("add", "fma")
        first, *others = (halves(value(operand).expand(count), DTYPES[kind]).double() for operand in operands)
        registers[to] = register_of(first + others[0] if name == "add" else first * others[0] + others[1], DTYPES[kind])
    return registers
