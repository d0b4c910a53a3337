"""GPUs that a shipped card describes, by the name and the memory that the driver reports.

Variants of one chip differ in memory, clocks and links, so a name must match as a whole, and the memory must be that of
the card. "NVIDIA H100 PCIe" is not "NVIDIA H100 80GB HBM3", and an A100 of 40 GB is not one of 80 GB. Such variants are
measured.
"""

from __future__ import annotations

import re

import torch

from ..cost import load_card

#: Shipped cards, by what the name of the device must match as a whole.
_NAMES = {
    r"NVIDIA H100 80GB HBM3": "h100-sxm",
    r"NVIDIA H200": "h200-sxm",
    r"NVIDIA A100-SXM4-80GB": "a100-sxm",
    r"NVIDIA B200": "b200",
}

#: A driver reports a few percent less than the data sheet's memory, and a slice of a GPU reports half of it or less.
_LEAST_SHARE, _MOST_SHARE = 0.9, 1.1


def shipped_card_of(name: str, memory_bytes: int) -> str | None:
    """The name of the shipped card of a GPU; None if no card describes this variant.

    Args:
        name: as ``torch.cuda.get_device_name`` gives it.
        memory_bytes: as the driver reports it.
    """
    for pattern, card in _NAMES.items():
        if re.fullmatch(pattern, name.strip()):
            share = memory_bytes / load_card(card).memory_bytes
            return card if _LEAST_SHARE <= share <= _MOST_SHARE else None
    return None


def shipped_card_of_device(device: torch.device) -> str | None:
    """:func:`shipped_card_of` a device of this process; None for a CPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return shipped_card_of(properties.name, int(properties.total_memory))
