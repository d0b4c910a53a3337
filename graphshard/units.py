"""Bytes, seconds and counts as text with units, for people."""

from __future__ import annotations

GIB = 2**30


def size_text(num_bytes: float) -> str:
    """Bytes as text: "1.24 GiB"."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{_rounded(num_bytes / size, 4)} {unit}"
    return f"{num_bytes:.0f} B"


def time_text(seconds: float) -> str:
    """Seconds as text: "12.3 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{_rounded(seconds / size, 4)} {unit}"
    return f"{_rounded(seconds * 1e6, 3)} us"


def count_text(number: int) -> str:
    """A count as text: "12.6 million"."""
    for unit, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6), ("thousand", 1e3)):
        if number >= size:
            return f"{_rounded(number / size, 3)} {unit}"
    return str(number)


def _rounded(value: float, digits: int) -> str:
    """A number with so many digits that count, without an exponent: .3g alone writes 999.9 as 1e+03."""
    return f"{float(f'{value:.{digits}g}'):.15g}"


def exact_size(num_bytes: int) -> str:
    """Bytes for a message that asks for a number: "1.24 GiB (1331439861 bytes)", or "100 bytes"."""
    return f"{num_bytes} bytes" if num_bytes < 1024 else f"{size_text(num_bytes)} ({num_bytes} bytes)"
