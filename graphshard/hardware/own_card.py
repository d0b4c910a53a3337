"""How the ranks of a job come to one card: rank 0 decides, and all ranks measure if it asks them to.

1. Every rank writes the name of its host into the stores of its groups. A rank that finds a card for this need in a
   store takes it: it compiles alone, later than the others.
2. Rank 0 takes the shipped card of its GPU, or a card that an earlier run has kept, and writes it into the stores.
3. If it has none, it asks for measuring. All ranks of the groups agree that they will, and measure; the card of rank 0
   goes to the others, and into the cache folder of rank 0's user.

Ranks that are not rank 0 never look into their own cache, so what lies there cannot make them differ.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .._compat import group_by_name
from ..coordination import (
    Decision,
    PlanStore,
    agree_on_group,
    can_wait_in_compilation,
    decide_together,
)
from ..cost import GroupTopology, HardwareCard, load_card, parse_card
from ..errors import AgreementError
from ..ir import text_fingerprint
from ..progress import LOGGER, say_nothing
from .kept_cards import file_of, keep_card, machine_key, read_kept
from .live_probes import LiveGroup, measure_card
from .machine_need import MachineNeed
from .named_devices import shipped_card_of_device

#: Answers of rank 0.
_CARD, _MEASURE, _NONE = "card", "measure", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCard:
    """The card of this machine, or why there is none.

    Attributes:
        card: None if there is none.
        reason: why there is none; "" with a card.
    """

    card: HardwareCard | None = None
    reason: str = ""


def own_card(
    need: MachineNeed,
    groups: Sequence[str],
    device: torch.device,
    *,
    what: str,
    report: Callable[[str], None],
) -> OwnCard:
    """The card that all ranks of some process groups use for a graph.

    Args:
        need: what the graph needs; its groups are those of ``groups``, in this order.
        groups: names of this rank's process groups. Empty for one rank alone.
        device: where this rank computes.
        what: names the graph in errors.
        report: takes lines of progress, on rank 0.

    Raises:
        AgreementError: rank 0, or the host of a rank, is not there within the time limit of a group.
        RefusedError: a rank has stopped with an error.
    """
    if fake := [name for name in groups if not can_wait_in_compilation(name)]:
        kind = dist.get_backend(group_by_name(fake[0]))
        return OwnCard(reason=f"process group {fake[0]!r} is a {kind} one, whose ranks cannot be measured")
    stores = [PlanStore.of_use(name, "cards") for name in groups]
    number = text_fingerprint(json.dumps(need.as_data()))[:16]
    for store in stores:
        if store.store.check([f"measured/{number}"]):
            return _read(json.loads(store.store.get(f"measured/{number}")))
        store.store.set(f"host/{store.rank}", platform.node())
    ranks = _Ranks(need=need, groups=groups, stores=stores, device=device, what=what)
    about = f"the hardware card of {what}"
    answer = decide_together(stores, f"asked/{number}", ranks.answer, what=about, compiles=what)
    is_first = all(store.rank == 0 for store in stores)
    if answer["answer"] != _MEASURE:
        return _read(answer, is_own=is_first)
    for name in groups:  # collectives follow: a rank that compiles alone must not begin with them
        agree_on_group(name, [f"measurements of {json.dumps(answer['need'])}"], what=what)
    measured = MachineNeed.from_data(answer["need"])
    per_node = int(answer["ranks_per_node"])
    began = time.perf_counter()
    card = measure_card(
        measured,
        ranks.live_groups(per_node, measured),
        device,
        per_node,
        report if is_first else say_nothing,
    )

    def publish(known: Mapping[str, Any] | None) -> Decision[Mapping[str, Any]]:
        if known is not None:
            return Decision(plan=known, result=known)
        file = keep_card(answer["key"], measured, card)
        seconds = time.perf_counter() - began
        LOGGER.info("measured this machine in %.1f s; kept in %s", seconds, file or "no file")
        found = {"answer": _CARD, "card": card.as_dict(), "file": "" if file is None else str(file)}
        return Decision(plan=found, result=found)

    found = decide_together(stores, f"measured/{number}", publish, what=about)
    return _read(found, is_own=is_first)


def _read(answer: Mapping[str, Any], *, is_own: bool = False) -> OwnCard:
    """The card of an answer, as every rank reads it; its file only where it was written."""
    if answer["answer"] == _NONE:
        return OwnCard(reason=str(answer["reason"]))
    if "name" in answer:
        return OwnCard(card=load_card(answer["name"]))
    card = parse_card(json.dumps(answer["card"]), where="the card of rank 0")
    file = Path(answer["file"]) if is_own and answer["file"] else None
    return OwnCard(card=replace(card, file=file))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranks:
    """What rank 0 decides with; arguments as for :func:`own_card`."""

    need: MachineNeed
    groups: Sequence[str]
    stores: Sequence[PlanStore]
    device: torch.device
    what: str

    def answer(self, known: Mapping[str, Any] | None) -> Decision[Mapping[str, Any]]:
        """What rank 0 answers, or has answered."""
        answer = known if known is not None else self._decide()
        return Decision(plan=answer, result=answer)

    def _decide(self) -> Mapping[str, Any]:
        if (name := shipped_card_of_device(self.device)) is not None:
            LOGGER.info("hardware card %s, by the name of the device", name)
            return {"answer": _CARD, "name": name}
        hosts = [self._hosts(name, store) for name, store in zip(self.groups, self.stores, strict=True)]
        per_node = _ranks_per_node(hosts)
        for name, group in zip(self.groups, self.live_groups(per_node), strict=True):
            if group.topology.num_nodes > 1 and group.topology.ranks_per_node > 1:
                return {
                    "answer": _NONE,
                    "reason": f"process group {name!r} has several nodes with several ranks each, whose links cannot "
                    "be told apart by measuring it; `graphshard calibrate` measures a node and the network apart",
                }
        key = self._key(hosts)
        kept = read_kept(file_of(key))
        if kept is not None and kept.need.covers(self.need):
            LOGGER.info("hardware card %s, measured earlier", kept.file)
            return {"answer": _CARD, "card": kept.card.as_dict(), "file": str(kept.file)}
        need = self.need if kept is None else kept.need.joined(self.need)
        return {"answer": _MEASURE, "need": need.as_data(), "key": key, "ranks_per_node": per_node}

    def live_groups(self, ranks_per_node: int, need: MachineNeed | None = None) -> list[LiveGroup]:
        """The groups with their topology, and what is needed of them."""
        return [
            LiveGroup(
                name=name,
                need=of_group,
                topology=GroupTopology.of_ranks(
                    dist.get_process_group_ranks(group_by_name(name)), ranks_per_node
                ),
            )
            for name, of_group in zip(self.groups, (need or self.need).groups, strict=True)
        ]

    def _hosts(self, name: str, store: PlanStore) -> list[str]:
        """The hosts of a group's ranks, in their order.

        Raises:
            AgreementError: a rank is missing at the time limit.
            RefusedError: a rank has stopped with an error.
        """
        keys = [f"host/{rank}" for rank in range(group_by_name(name).size())]
        number = store.refusals.round()
        if not store.refusals.wait(store.store, keys, number, store.timeout_seconds, compiles=self.what):
            missing = [rank for rank, key in enumerate(keys) if not store.store.check([key])]
            raise AgreementError(
                f"rank(s) {missing} of process group {name!r} did not compile a graph within "
                f"{store.timeout_seconds:.0f} s, so the machine cannot be measured; all ranks must run the same code"
            )
        return [store.store.get(key).decode() for key in keys]

    def _key(self, hosts: Sequence[Sequence[str]]) -> dict[str, str]:
        """What a measured card holds for."""
        return machine_key(
            [[sorted(set(of_group)).index(host) for host in of_group] for of_group in hosts],
            [dist.get_backend(group_by_name(name)) for name in self.groups],
            self.device,
            num_ranks=dist.get_world_size() if self.groups else 1,
            num_threads=torch.get_num_threads(),
        )


def _ranks_per_node(hosts: Sequence[Sequence[str]]) -> int:
    """Ranks of the job on a node: all of them if the groups lie on one node, else what the launcher says."""
    names = {host for of_group in hosts for host in of_group}
    if len(names) == 1:
        return dist.get_world_size()
    most = max((of_group.count(host) for of_group in hosts for host in set(of_group)), default=1)
    return int(os.environ.get("LOCAL_WORLD_SIZE", most))
