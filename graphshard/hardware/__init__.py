"""The hardware card of the machine at hand: shipped for its device, kept from an earlier run, or measured now.

Imports: ``errors``, ``machine``, ``ir``, ``coordination``, ``memory``, ``cost``, ``fsdp``.

Read first: ``own_card`` (how ranks come to one card), then ``named_devices`` (GPUs with a shipped card),
``machine_need`` and ``graph_need`` (what a graph needs of a card), ``live_probes`` (measures process groups in use) and
``kept_cards`` (the user's cache).
"""

from .graph_need import GraphNeed, need_of_graph
from .kept_cards import KeptCard, delete_cards, keep_calibrated, kept_cards
from .live_probes import STAND_INS
from .machine_need import GroupNeed, MachineNeed
from .named_devices import shipped_card_of, shipped_card_of_device
from .own_card import OwnCard, own_card

__all__ = [
    "STAND_INS",
    "GraphNeed",
    "GroupNeed",
    "KeptCard",
    "MachineNeed",
    "OwnCard",
    "delete_cards",
    "keep_calibrated",
    "kept_cards",
    "need_of_graph",
    "own_card",
    "shipped_card_of",
    "shipped_card_of_device",
]
