"""Reads a memory budget as users write it. It imports no torch, so that the command can refuse one at once."""

from __future__ import annotations

import re
from decimal import Decimal

from .errors import OptionError, OptionTypeError

_UNITS = {"": 1, "b": 1, **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)}} | {
    f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)
}

#: A text without a unit is not taken for fewer bytes.
_FEWEST_BYTES = 2**20

#: 8 EiB, more than any machine has.
_TOO_MANY_BYTES = 2**63


def parse_bytes(value: int | str) -> int:
    """Bytes from a number or from a text like "60GiB" (1024) or "2GB" (1000).

    Raises:
        OptionError: the text cannot be read, or is a number below 2**20 without a unit; the number is not positive, or
            is 8 EiB or more.
        OptionTypeError: the value is neither an int nor a text.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise OptionTypeError(f"memory_budget={value!r} must be bytes (an int) or a text like '60GiB'")
    num_bytes = value if isinstance(value, int) else _read_bytes(value)
    if num_bytes <= 0:
        shown = "" if num_bytes <= -_TOO_MANY_BYTES else f"={value!r}"
        raise OptionError(f"memory_budget{shown} must be positive")
    if num_bytes >= _TOO_MANY_BYTES:
        raise OptionError(
            "memory_budget is 8 EiB or more; write what a rank has, or leave it out for no more than FSDP2 holds"
        )
    return num_bytes


def _read_bytes(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    unit = _UNITS.get(match.group(2)) if match else None
    if match is not None and not match.group(2) and Decimal(match.group(1)) < _FEWEST_BYTES:
        raise OptionError(
            f"memory_budget={text!r} has no unit, and would be {match.group(1)} bytes; write {match.group(1)}GiB, or "
            f"{match.group(1)}B if bytes are meant"
        )
    if match is None or unit is None:
        raise OptionError(
            f"memory_budget={text!r} cannot be read; write bytes, or a text like '60GiB' or '2GB'"
        )
    return int(Decimal(match.group(1)) * unit)
