"""Numbers as text with units."""

from __future__ import annotations

GIB = 2**30


def size_text(num_bytes: float) -> str:
    """Bytes as text: "1.24 GiB"."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes:.0f} B"


def time_text(seconds: float) -> str:
    """Seconds as text: "12.3 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e6:.3g} us"
