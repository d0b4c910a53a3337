"""What a rank has said to the others while it compiled, so that a later process can say it again.

A rank whose code is kept compiles nothing, while others may compile. So that they need not wait for it, it takes part
in the agreements and decisions of the compilation as if it compiled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Agreed:
    """A sequence of texts on which the ranks of a process group have agreed.

    Attributes:
        group: the name of the group.
        sequence: the texts.
        what: names the graph in errors.
        is_of_models: they are those of the models that the process has numbered.
    """

    group: str
    sequence: tuple[str, ...]
    what: str
    is_of_models: bool = False


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision that the ranks of some process groups follow, of the models that the process has numbered.

    Attributes:
        groups: the names of the groups.
        key: of the decision.
        plan: what was decided, as JSON.
        what: names the graph in errors.
    """

    groups: tuple[str, ...]
    key: str
    plan: str
    what: str

    @staticmethod
    def of(groups: Sequence[str], key: str, plan: Mapping[str, Any], what: str) -> Decided:
        """A decision as it was made."""
        return Decided(tuple(groups), key, json.dumps(dict(plan), sort_keys=True), what)


@dataclass(frozen=True, slots=True)
class SeedCompared:
    """A graph whose ranks must draw the same random numbers; see :func:`~.agreed_seed.agree_on_seed`."""

    group: str
    graph: tuple[str, ...]
    what: str


Line = Agreed | Decided | SeedCompared

#: What was said, in order.
Transcript = tuple[Line, ...]

_heard: ContextVar[list[Line] | None] = ContextVar("graphshard_transcript", default=None)


@contextmanager
def recording() -> Iterator[list[Line]]:
    """A context that collects what this thread says in it."""
    said: list[Line] = []
    token = _heard.set(said)
    try:
        yield said
    finally:
        _heard.reset(token)


def note(line: Line) -> None:
    """Adds a line to the record, if there is one."""
    if (said := _heard.get()) is not None:
        said.append(line)
