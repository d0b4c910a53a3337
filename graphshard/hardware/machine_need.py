"""What a graph needs of a hardware card: collectives of some kinds and sizes, and kernels of some classes and dtypes.

It is made of the parameters and ops of a model, never of its batch: it is equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..cost import ProbeSizes

#: The largest collective that is measured, and the least that the largest may be. Above, the last bandwidth counts.
_LEAST_LARGEST, _MOST_LARGEST = 2**20, 2**24

#: Sizes of collectives from small to large, in front of the largest.
_SMALL_SIZES = (2**10, 2**14, 2**17, 2**19, 2**21, 2**23)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNeed:
    """Collectives of one process group.

    Attributes:
        num_ranks: ranks of the group.
        kinds: kinds of collectives, sorted.
        largest_bytes: of the largest one that is measured.
    """

    num_ranks: int
    kinds: tuple[str, ...]
    largest_bytes: int

    @staticmethod
    def of_parameters(num_ranks: int, kinds: tuple[str, ...], num_bytes: int) -> GroupNeed:
        """The need of a group over which parameters of ``num_bytes`` in all are gathered or reduced."""
        largest = min(max(num_bytes, _LEAST_LARGEST), _MOST_LARGEST)
        return GroupNeed(
            num_ranks=num_ranks, kinds=tuple(sorted(kinds)), largest_bytes=1 << (largest - 1).bit_length()
        )

    def covers(self, other: GroupNeed) -> bool:
        """Whether a card measured for this need serves the other one."""
        return (
            self.num_ranks == other.num_ranks
            and set(other.kinds) <= set(self.kinds)
            and other.largest_bytes <= self.largest_bytes
        )

    def joined(self, other: GroupNeed) -> GroupNeed:
        """Both needs of one group."""
        return GroupNeed(
            num_ranks=self.num_ranks,
            kinds=tuple(sorted({*self.kinds, *other.kinds})),
            largest_bytes=max(self.largest_bytes, other.largest_bytes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineNeed:
    """What a graph needs of a card.

    Attributes:
        device_type: "cpu" or "cuda".
        groups: its process groups, in the order in which ranks measure them.
        dtypes: names of the dtypes of products, sorted.
        classes: classes of kernels beside products, sorted: "attention", "convolution".
    """

    device_type: str
    groups: tuple[GroupNeed, ...] = ()
    dtypes: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()

    def covers(self, other: MachineNeed) -> bool:
        """Whether a card measured for this need serves the other one."""
        return (
            self.device_type == other.device_type
            and set(other.dtypes) <= set(self.dtypes)
            and set(other.classes) <= set(self.classes)
            and all(any(mine.covers(theirs) for mine in self.groups) for theirs in other.groups)
        )

    def joined(self, other: MachineNeed) -> MachineNeed:
        """Both needs; their groups have the same ranks, in the same order."""
        return MachineNeed(
            device_type=self.device_type,
            groups=tuple(mine.joined(theirs) for mine, theirs in zip(self.groups, other.groups, strict=True)),
            dtypes=tuple(sorted({*self.dtypes, *other.dtypes})),
            classes=tuple(sorted({*self.classes, *other.classes})),
        )

    def sizes(self, group: GroupNeed | None = None) -> ProbeSizes:
        """What is measured for it, of compute or of one of its groups: a short form of what ``calibrate`` measures."""
        full = ProbeSizes.for_device(self.device_type)
        collectives: dict[str, Any] = {}
        if group is not None:
            collectives = {"kinds": group.kinds, "collective_bytes": _sizes_up_to(group.largest_bytes)}
        return ProbeSizes(
            matmul=full.matmul,
            attention=full.attention,
            memory_bytes=full.memory_bytes[:-1] if self.device_type == "cpu" else full.memory_bytes,
            num_samples=9 if group is not None else 4,
            sample_seconds=1e-3,
            enough_seconds=1.0,
            most_seconds=_MOST_SECONDS,
            dtypes=tuple(getattr(torch, name) for name in self.dtypes),
            classes=self.classes,
            compiles=False,
            **collectives,
        )

    def as_data(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "device_type": self.device_type,
            "groups": [[each.num_ranks, list(each.kinds), each.largest_bytes] for each in self.groups],
            "dtypes": list(self.dtypes),
            "classes": list(self.classes),
        }

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> MachineNeed:
        """Reads :meth:`as_data` back.

        Raises:
            TypeError, KeyError, ValueError: it is no such data.
        """
        return MachineNeed(
            device_type=str(data["device_type"]),
            groups=tuple(
                GroupNeed(num_ranks=int(num_ranks), kinds=tuple(map(str, kinds)), largest_bytes=int(largest))
                for num_ranks, kinds, largest in data["groups"]
            ),
            dtypes=tuple(map(str, data["dtypes"])),
            classes=tuple(map(str, data["classes"])),
        )


#: No further turn of all collectives of a group begins that would end later than this many seconds.
_MOST_SECONDS = 3.0


def _sizes_up_to(largest: int) -> tuple[int, ...]:
    return (*(size for size in _SMALL_SIZES if size < largest), largest)
