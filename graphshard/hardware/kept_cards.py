"""Measured cards in the user's cache folder, one file each, under a key of the machine, the ranks and torch."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..cost import HardwareCard, read_kept_card
from ..errors import CardError
from ..ir import text_fingerprint
from ..machine import this_processor
from ..memory import TABLE_END, table_beside
from ..user_cache import cache_folder, keep_newest, write_in_one_step
from .machine_need import GroupNeed, MachineNeed

#: Settings that choose the network of a process group.
_NETWORK = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE")

#: The most cards that are kept; of more, the oldest are deleted. Each container has a key of its own.
_MOST_CARDS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCard:
    """A measured card of the cache.

    Attributes:
        file: where it is.
        key: what it holds for, by name: host, device, ranks, torch.
        need: what was measured.
        card: the card.
    """

    file: Path
    key: Mapping[str, str]
    need: MachineNeed
    card: HardwareCard


def file_of(key: Mapping[str, str]) -> Path | None:
    """The file of a card with this key, whether it is there or not; None if nothing is to be kept."""
    folder = cache_folder("cards")
    text = json.dumps(dict(sorted(key.items())))
    return None if folder is None else folder / f"{text_fingerprint(text)[:16]}.json"


def machine_key(
    nodes: Sequence[Sequence[int]],
    backends: Sequence[str],
    device: torch.device,
    *,
    num_ranks: int,
    num_threads: int,
) -> dict[str, str]:
    """What a card that is measured in this process holds for.

    Args:
        nodes: for each process group, the number of the node of each rank.
        backends: of each process group.
        device: where this rank computes.
        num_ranks: of the job.
        num_threads: of a rank on a CPU.
    """
    settings = [f"{name}={os.environ[name]}" for name in _NETWORK if name in os.environ]
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/net")
    if device.type == "cpu":
        device_text = f"{this_processor()}, {num_threads} thread(s)"
    else:
        memory = torch.cuda.get_device_properties(device).total_memory
        device_text = f"{torch.cuda.get_device_name(device)}, {memory} bytes"
    return {
        "host": platform.node(),
        "device": device_text,
        "torch": torch.__version__,
        "ranks": f"{num_ranks} in all, nodes of the ranks of each group: {[list(each) for each in nodes]}",
        "backends": ", ".join(backends),
        "network": ", ".join([namespace, *settings]),
    }


def keep_calibrated(
    card: HardwareCard, backend: str, device: torch.device, *, num_ranks: int, num_threads: int
) -> Path | None:
    """Keeps a card that ``graphshard calibrate`` measured with ranks of one node, for jobs with one group of as many.

    Args:
        card: with measured rows of its links.
        backend: of the group that was measured.
        device, num_ranks, num_threads: as for :func:`machine_key`.

    Returns:
        Its file; None if it cannot be written.
    """
    rows = card.intra_node.measured
    group = GroupNeed(
        num_ranks=num_ranks,
        kinds=tuple(sorted({row.op for row in rows})),
        largest_bytes=max((row.num_bytes for row in rows), default=0),
    )
    need = MachineNeed(
        device_type=card.device_type,
        groups=(group,),
        dtypes=tuple(sorted(card.peak_flops)),
        classes=("attention", "convolution"),
    )
    key = machine_key([[0] * num_ranks], [backend], device, num_ranks=num_ranks, num_threads=num_threads)
    return keep_card(key, need, card)


def read_kept(file: Path | None) -> KeptCard | None:
    """A kept card; None if there is none, or if the file cannot be read."""
    if file is None:
        return None
    try:
        key, card = read_kept_card(file)
        need = MachineNeed.from_data(json.loads(file.read_text())["need"])
        return KeptCard(file=file, key=key, need=need, card=card)
    except (OSError, ValueError, TypeError, KeyError, CardError):
        return None


def keep_card(key: Mapping[str, str], need: MachineNeed, card: HardwareCard) -> Path | None:
    """Writes a card and returns its file; None, with a line in the log, if the folder cannot be written."""
    file = file_of(key)
    data: dict[str, Any] = {"key": dict(key), "need": need.as_data(), "card": card.as_dict()}
    if file is None or not write_in_one_step(file, json.dumps(data, indent=1) + "\n"):
        return None
    keep_newest(file.parent, _MOST_CARDS, beside=TABLE_END)
    return file


def kept_cards() -> list[KeptCard]:
    """All kept cards, by file name."""
    folder = cache_folder("cards")
    files = sorted(folder.glob("*.json")) if folder is not None else []
    return [kept for kept in map(read_kept, files) if kept is not None]


def delete_cards(names: tuple[str, ...] = ()) -> list[Path]:
    """Deletes kept cards by the names of their files without ".json", or all; returns the files that are gone."""
    found = [kept.file for kept in kept_cards() if not names or kept.file.stem in names]
    for file in found:
        file.unlink(missing_ok=True)
        table_beside(file).unlink(missing_ok=True)
    return found
