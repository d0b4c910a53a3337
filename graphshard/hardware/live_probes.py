"""Measures a card on process groups that are in use, while a model compiles.

All ranks of the groups take part. Each measures its own groups, so on a mesh all groups of an axis are at work at once,
as in a step. What is measured is what ``graphshard calibrate`` measures, at fewer sizes and for seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .._compat import group_by_name
from ..cost import (
    CommProbe,
    ComputeProbe,
    GroupTopology,
    HardwareCard,
    LinkClass,
    describe_machine,
    load_card,
    probe_collectives,
    probe_compute,
    slowest,
)
from ..machine import Machine
from .machine_need import GroupNeed, MachineNeed

#: The card whose links a rank has that measures none, by the type of its device.
STAND_INS = {"cpu": "cpu-loopback", "cuda": "h100-sxm"}

#: Where the entries come from, in a card.
_SOURCE = "measured while a model compiled"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveGroup:
    """A process group to measure.

    Attributes:
        name: of the group.
        need: its collectives.
        topology: how its ranks lie on nodes: all on one, or each on its own.
    """

    name: str
    need: GroupNeed
    topology: GroupTopology


def measure_card(
    need: MachineNeed,
    groups: Sequence[LiveGroup],
    device: torch.device,
    ranks_per_node: int,
    report: Callable[[str], None],
) -> HardwareCard:
    """Measures this rank's device and groups; every rank of the groups calls it at the same time.

    Args:
        need: what is measured.
        groups: in the same order on all ranks; none measures the device alone, with the links of a shipped card.
        device: of this rank.
        ranks_per_node: ranks that share a node.
        report: takes lines of progress.

    Returns:
        The card of this rank. Those of other ranks may differ.
    """
    with _undisturbed(device):
        first = group_by_name(groups[0].name) if groups else None
        report("measuring compute")
        compute = probe_compute(
            device,
            need.sizes(),
            together=partial(dist.barrier, first) if groups else lambda: None,
            slowest=partial(slowest, device, group=first) if groups else lambda seconds: seconds,
        )
        probes = []
        for group in groups:
            report(f"measuring {', '.join(group.need.kinds)} over {group.need.num_ranks} ranks")
            sizes = need.sizes(group.need)
            probes.append(probe_collectives(device, sizes, group=group_by_name(group.name)))
    return _card(compute, list(zip(groups, probes, strict=True)), device, ranks_per_node)


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Neither the user's settings change what is measured, nor measuring the user's random numbers."""
    devices = [device] if device.type == "cuda" else []
    dtype = torch.get_default_dtype()
    with (
        torch.random.fork_rng(devices),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def _card(
    compute: ComputeProbe,
    probes: Sequence[tuple[LiveGroup, CommProbe]],
    device: torch.device,
    ranks_per_node: int,
) -> HardwareCard:
    values: dict[str, Any] = {each.name: getattr(compute, each.name) for each in fields(compute)}
    like = load_card(STAND_INS[device.type])
    links: dict[str, Any] = {"intra_node": like.intra_node, "inter_node": like.inter_node}
    comm: Any = probes[0][1] if probes else like
    measured = {
        "intra_node": [probe.link for group, probe in probes if group.topology.num_nodes == 1],
        "inter_node": [probe.link for group, probe in probes if group.topology.num_nodes > 1],
    }
    for name, found in measured.items():
        other = measured["inter_node" if name == "intra_node" else "intra_node"]
        if found:
            links[name] = _joined(found)
        elif other:
            links[name] = replace(other[0], measured=())
    if device.type == "cpu":
        values["memory_bytes"] //= ranks_per_node
    names = [each.name for each in fields(CommProbe) if each.name != "link"]
    taken = {name: getattr(comm, name) for name in names}
    return HardwareCard(
        name="this machine",
        summary=f"{describe_machine(device.type)}, {_SOURCE}",
        device_type=device.type,
        machine=Machine.here() if device.type == "cpu" else None,
        ranks_per_node=ranks_per_node,
        sources=dict.fromkeys((*values, *taken, *links), _SOURCE),
        **values,
        **taken,
        **links,
    )


def _joined(links: Sequence[LinkClass]) -> LinkClass:
    """The first link, with the rows of all; of two groups of one size and kind, the rows of the first."""
    rows = list(links[0].measured)
    for link in links[1:]:
        known = {(row.op, row.num_ranks) for row in rows}
        rows += [row for row in link.measured if (row.op, row.num_ranks) not in known]
    return replace(links[0], measured=tuple(rows))
