"""Steps that ranks take again and again need no meeting before each: one is held where a rank asks for it.

A *step* is a collective, or several, of an uncompiled model on one process group. Each rank notes which step has
followed the steps before it. A step that has always been the next one at its place is *known*. A rank starts the
collectives of a known step at once. For any other step it comes to a meeting (:func:`meet`) first.

**Why no rank waits in vain.** All ranks of a group have the same past. So if one of them takes another step than the
others, it is unknown to at least one rank, and that rank comes to the meeting. The others wait for it in a collective.
While they wait, they look whether another rank has come to the meeting of a step that they have skipped, and join it.
The meeting then fails on all ranks as if all had come in time. If the steps are equal, all go on.

This needs collectives that a host can wait for with a time limit. Gloo's on the CPU are such; NCCL's are not, so ranks
meet before each of those. A group on which a meeting failed beside an open collective cannot be used any more.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .._compat import group_by_name, uses_gloo
from ..errors import AgreementError, RefusedError
from .bounded_wait import LimitedWork, WaitingThread
from .group_store import count_in_group, group_store, is_fake_group
from .refusals import Refusals
from .rendezvous import meet

#: How long a rank waits in a collective before it looks whether others have come to a meeting.
_PATIENCE_SECONDS = 0.5

#: Places that are remembered; beyond that, a rank forgets them all.
_MAX_PLACES = 100_000

#: Forwards since the last reduction that are told apart.
_MAX_FORWARDS = 64

#: What follows a place that several steps have followed.
_SEVERAL = object()

_GRAPH = "graph"

_LEFT_OPEN = (
    "This error has left a collective open, so the process group cannot be used any more: "
    "start the processes again"
)


@dataclass(frozen=True, slots=True)
class StepWords:
    """What :func:`meet` is told of a step."""

    step: str
    what: str
    remedy: str

    @staticmethod
    def of(step: str, remedy: str, limit: int = 300) -> StepWords:
        """Words of a step whose name may be long; ``what`` has at most ``limit`` characters of it, and dots."""
        return StepWords(step, step if len(step) <= limit else step[:limit] + " ...", remedy)


@dataclass(eq=False, kw_only=True)
class Steps:
    """The steps of this rank on one process group.

    Attributes:
        group_name: name of the group.
        num_ranks: its ranks; 1 for a group that has no others to wait for.
        can_skip: the host can wait for collectives of the group on the CPU with a time limit.
        number: how often the ranks have counted steps of a group of this name, this time included.
        position: number of steps so far.
    """

    group_name: str
    num_ranks: int
    can_skip: bool
    number: int
    position: int = 0
    _place: int = 0
    _next: dict[int, Any] = field(default_factory=dict)
    _forwards: int = 0
    _settled: int = 0
    _skipped: dict[int, tuple[int, Callable[[], StepWords]]] = field(default_factory=dict)
    _joined: set[int] = field(default_factory=set)
    _thread: WaitingThread | None = None
    _must_meet: bool = False
    _parted: str = ""

    @staticmethod
    def of_group(name: str) -> Steps:
        """Those of the process group of this name."""
        group = group_by_name(name)
        found = _steps_by_group().get(group)
        if found is None:
            is_alone = group.size() == 1 or is_fake_group(name)
            found = _steps_by_group()[group] = Steps(
                group_name=name,
                num_ranks=1 if is_alone else group.size(),
                can_skip=not is_alone and uses_gloo(group),
                number=0 if is_alone else count_in_group(name, "steps"),
            )
        return found

    def come(
        self,
        step: Hashable,
        words: Callable[[], StepWords],
        *,
        begins: bool = False,
        reduces: bool = False,
        can_skip: bool = True,
    ) -> None:
        """Called before the collectives of a step. Meets the other ranks, unless the step is known.

        Args:
            step: tells it apart from other steps of this rank.
            words: what other ranks are told of it.
            begins: it is the first one since a forward of its model has begun.
            reduces: it reduces gradients.
            can_skip: this rank will wait for its collectives by :meth:`wait`.

        Raises:
            AgreementError, RefusedError: as :func:`meet`; or the group has a collective left open by such an error.
        """
        if self.num_ranks == 1:
            return
        self.position += 1
        place, taken = self._place, hash((step, begins))
        is_known = self._note(place, taken)
        # What came before a forward does not matter, but how many forwards there were since the last reduction.
        self._place = hash((self._forwards if begins else place, taken))
        if begins:
            self._forwards = min(self._forwards + 1, _MAX_FORWARDS)
        if reduces:
            self._forwards = 0
        if is_known and can_skip and self.can_skip and not self._must_meet:
            self._skipped[self.position] = (place, words)
        else:
            self._meet(words())

    def come_to_graph(self, graph: str, words: StepWords, *, is_known: bool) -> None:
        """Called before a compiled graph runs. Meets the other ranks, if it is not known that all will run it.

        It is not known either if uncompiled steps have followed at this place.
        """
        if self.num_ranks == 1:
            return
        self.position += 1
        is_known &= self._next.get(self._place, _GRAPH) == _GRAPH and not self._must_meet
        self._note(self._place, _GRAPH)
        self._place = hash((_GRAPH, graph))
        if not is_known:
            self._meet(words)

    def wait(self, work: dist.Work, position: int, *, takes_limit: bool) -> None:
        """Waits for a collective of a step; joins meetings that other ranks hold in place of the steps skipped.

        Args:
            work: the collective, of tensors on the CPU.
            position: that of the step.
            takes_limit: ``work.wait`` takes a time limit; that of a reduce-scatter of gloo or of a :class:`GatherWork`
                does not.

        Raises:
            AgreementError: another rank takes another step, or waits for this one to compile a graph.
            RefusedError: a rank has refused a graph and does not come.
        """
        if not self.can_skip or self._settled >= position:  # all ranks have come
            work.wait()
            return
        if not takes_limit and self._thread is None:
            self._thread = WaitingThread()
        limited = LimitedWork(work, None if takes_limit else self._thread)
        if not limited.is_over(_PATIENCE_SECONDS):
            self._watch(limited)
        limited.finish()
        self._settle(position)

    def _note(self, place: int, step: Any) -> bool:
        """Notes that a step follows at a place. Returns whether no other has, and this one has before."""
        if len(self._next) >= _MAX_PLACES:
            self._next.clear()
            self._joined.clear()
        found = self._next.get(place)
        if found is None:
            self._next[place] = step
        elif found != step:
            self._next[place] = _SEVERAL
        return found == step

    def _settle(self, position: int) -> None:
        """Notes that all ranks have come to a step, and so to those before it."""
        if position > self._settled:
            self._settled = position
            for each in [each for each in self._skipped if each <= position]:
                del self._skipped[each]

    def _meet(self, words: StepWords) -> None:
        if self._parted:
            refusals = Refusals.of_group(self.group_name)
            refusals.refuse(refusals.round(), self._parted)
            raise AgreementError(self._parted)
        self._must_meet = True
        self._come_to(self.position, words)
        self._must_meet = False

    def _come_to(self, position: int, words: StepWords) -> None:
        here = self._name(position)
        meet(self.group_name, words.step, what=words.what, remedy=words.remedy, here=here)
        self._settle(position)

    def _name(self, position: int) -> str:
        return f"{self.number}.{position}"

    def _watch(self, work: LimitedWork) -> None:
        """Waits for a collective that takes long, and joins meetings meanwhile."""
        refusals = Refusals.of_group(self.group_name)
        number = refusals.round()
        skipped = next(iter(self._skipped.values()), None)

        def is_over() -> bool:
            _join_meetings()
            return work.is_over(_PATIENCE_SECONDS)

        try:
            refusals.wait_until(
                is_over,
                number,
                float("inf"),
                meets=skipped[1]().what if skipped is not None else "communicate",
                num_ranks=self.num_ranks,
                pause=work.is_over,
            )
        except AgreementError as error:
            self._thread = None  # it still waits, and other collectives must not wait behind that
            if isinstance(error, RefusedError):
                refusals.leave(number)
            self._part(error)
            raise

    def _join(self) -> None:
        """Joins meetings that other ranks hold in place of skipped steps."""
        if not self._skipped:
            return
        board = group_store(self.group_name, "meet", str(Refusals.of_group(self.group_name).round()))
        for position, (place, words) in list(self._skipped.items()):
            if board.check([f"here/{self._name(position)}"]):
                if place in self._joined:  # once more: from now on, all meet there
                    self._next[place] = _SEVERAL
                self._joined.add(place)
                del self._skipped[position]
                try:
                    self._come_to(position, words())
                except AgreementError as error:
                    self._part(error)
                    raise

    def _part(self, error: AgreementError) -> None:
        """Notes that an error has left a collective of the group open."""
        told = str(error)
        self._must_meet, self._parted = True, told if _LEFT_OPEN in told else f"{told} {_LEFT_OPEN}"
        self._skipped.clear()  # meetings that are held later are not in place of these


@cache
def _steps_by_group() -> WeakKeyDictionary[dist.ProcessGroup, Steps]:
    """The steps of this process on its process groups."""
    return WeakKeyDictionary()


def _join_meetings() -> None:
    """Joins meetings on all groups: the collective that this rank waits for may be behind a step of another one."""
    for steps in list(_steps_by_group().values()):
        steps._join()
