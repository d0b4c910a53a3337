"""Which units a forward half reads several times before their gradients are reduced.

A pipeline's stage runs the forwards of several micro-batches before the first backward. A unit that does not reshard is
gathered for the first of them and stays so for the others, as in FSDP2. In a training of one forward and one backward
this would only hold what no backward reads. So a half waits until it has seen such a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from ...fsdp.state import Unit


@dataclass(slots=True)
class RepeatedForwards:
    """The calls of one forward half, counted by what all ranks do alike: forwards, and backwards that reduce."""

    _last_run: WeakKeyDictionary[Unit, int] = field(default_factory=WeakKeyDictionary)
    _last_repeated: WeakKeyDictionary[Unit, int] = field(default_factory=WeakKeyDictionary)

    def note(self, units: Iterable[Unit]) -> None:
        """Notes that the half runs; ``units``: those whose parameters it reads."""
        for unit in units:
            if not unit.reshards:
                now = unit.tree.iterations
                if self._last_run.get(unit) == now:
                    self._last_repeated[unit] = now
                self._last_run[unit] = now

    def expects_more(self, unit: Unit) -> bool:
        """Whether the half has run more than once for the unit in this iteration or in the one before."""
        last = self._last_repeated.get(unit)
        return last is not None and not unit.reshards and unit.tree.iterations - last <= 1
