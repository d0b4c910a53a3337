"""A rank that refuses a graph tells the ranks that wait for it, at once.

Ranks that compile one graph wait for each other in several places. A rank that stops with an error of its own (its
batch does not keep the memory budget, for instance) never comes there. So it writes why it stopped into the store of
the group, and ranks that wait look there too.

**Rounds of refusals.** A refusal ends a *round* of the group. Every rank leaves a round exactly once, by a refusal of
its own or by seeing another's. So an error reaches each rank once, and does not affect what comes after it. Exchanges
between ranks are counted from 0 in each round, since a refusal leaves some of them half done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist

from .._compat import TorchDynamoException, group_by_name
from .._compat_frames import ShortenTraceback
from ..errors import AgreementError, RefusedError
from .group_store import group_store, is_fake_group

#: Pause between two looks of a rank that waits: the least, the share of the time it has waited, and the most.
_LEAST_SECONDS, _SHARE, _MOST_SECONDS = 0.001, 0.1, 1.0

#: How long one rank must wait for a compile of others, while another waits to meet them, until both stop. A rank that
#: goes on takes back that it waits within a pause.
_CROSSED_SECONDS = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusals:
    """The refusals of one process group.

    Attributes:
        store: a store that all ranks of the group share, under a prefix of its own.
        rank: this rank's place in the group, from 0.
    """

    store: dist.Store
    rank: int

    @staticmethod
    def of_group(name: str) -> Refusals:
        """Those of the process group of this name, which is no fake one."""
        return Refusals(store=group_store(name, "refusals"), rank=group_by_name(name).rank())

    def round(self) -> int:
        """The number of the current round: how many this rank has left."""
        return int(self.store.add(f"round/{self.rank}", 0))

    def refuse(self, number: int, reason: str) -> None:
        """Ends a round for all ranks, unless another rank did, and leaves it."""
        self.store.compare_set(f"{number}/reason", "", reason)
        self.leave(number)

    def leave(self, number: int) -> None:
        """Leaves a round that is over, unless this rank has done so."""
        if self.round() == number:
            self.store.add(f"round/{self.rank}", 1)

    def check(self, number: int) -> None:
        """Raises RefusedError if some rank has refused in this round."""
        if self.store.check([f"{number}/reason"]):
            raise RefusedError(self.store.get(f"{number}/reason").decode())

    def wait(
        self,
        store: dist.Store,
        keys: Sequence[str],
        number: int,
        seconds: float,
        *,
        compiles: str = "",
        meets: str = "",
        num_ranks: int = 0,
    ) -> bool:
        """Waits for keys of ``store``, all of them, or for a refusal in this round, whichever comes first.

        The other arguments, the result and the errors are those of :meth:`wait_until`.
        """
        return self.wait_until(
            lambda: store.check(list(keys)),
            number,
            seconds,
            compiles=compiles,
            meets=meets,
            num_ranks=num_ranks,
        )

    def wait_until(
        self,
        is_there: Callable[[], bool],
        number: int,
        seconds: float,
        *,
        compiles: str = "",
        meets: str = "",
        num_ranks: int = 0,
        pause: Callable[[float], Any] = time.sleep,
    ) -> bool:
        """Waits until a condition holds or for a refusal in this round, whichever comes first.

        It polls: a store can wait for all of several keys, but not for one of them. A rank that waits to meet the
        others, while another one waits for them to compile, ends the round for both: neither would come.

        Args:
            is_there: the condition.
            number: of this round.
            seconds: the time limit.
            compiles: the graph whose collectives this rank compares; "" elsewhere.
            meets: what this rank is about to do with all others; "" elsewhere.
            num_ranks: ranks of the group, where ``meets`` is given.
            pause: waits for some seconds.

        Returns:
            True if the condition holds; False at the time limit, or if the store is gone with the rank that served it.

        Raises:
            RefusedError: a rank has refused and the condition does not hold.
            AgreementError: another rank has waited for this one to compile a graph for some seconds.
        """
        started, announced, crossed_at = time.monotonic(), False, None
        with suppress(dist.DistError):
            try:
                while not is_there():
                    try:
                        self.check(number)
                    except RefusedError:  # the rank that refuses may have written the last key before that
                        if is_there():
                            return True
                        raise
                    waited = time.monotonic() - started
                    if waited >= seconds:
                        return False
                    if compiles and not announced and waited >= _MOST_SECONDS:
                        self.store.set(f"{number}/compiles/{self.rank}", compiles)
                        announced = True
                    other = self._that_compiles(number, num_ranks if waited >= _MOST_SECONDS else 0)
                    crossed_at = None if other is None else waited if crossed_at is None else crossed_at
                    if other is not None and waited - (crossed_at or 0.0) >= _CROSSED_SECONDS:
                        self._refuse_crossed(number, other, meets)
                    pause(min(max(_LEAST_SECONDS, _SHARE * waited), _MOST_SECONDS, seconds - waited))
                return True
            finally:
                if announced:
                    self.store.delete_key(f"{number}/compiles/{self.rank}")
        return False

    def _that_compiles(self, number: int, num_ranks: int) -> int | None:
        ranks = (rank for rank in range(num_ranks) if rank != self.rank)
        return next((rank for rank in ranks if self.store.check([f"{number}/compiles/{rank}"])), None)

    def _refuse_crossed(self, number: int, other: int, meets: str) -> NoReturn:
        graph = self.store.get(f"{number}/compiles/{other}").decode()
        reason = (
            f"rank {other} waits for all ranks to compile {graph}, but rank {self.rank} is about to {meets}. Every "
            "rank must take the same branches of compiled code"
        )
        self.refuse(number, reason)
        raise AgreementError(reason)


@contextmanager
def refusing(groups: Iterable[str], what: str) -> Iterator[None]:
    """A context whose errors reach the ranks of some process groups.

    The refusal of another rank is forwarded to those groups that the other rank is not in.

    Args:
        groups: names of process groups.
        what: what is done in the context, for the error of the other ranks.
    """
    boards = [Refusals.of_group(name) for name in groups if not is_fake_group(name)]
    rounds = [board.round() for board in boards]
    try:
        yield
    except Exception as error:
        # Dynamo starts again, or leaves the graph alone. What compilers raise (Inductor's errors) goes to the user.
        if isinstance(error, TorchDynamoException) and not isinstance(error, ShortenTraceback):
            raise
        if not boards:  # there may be no process group, which has the ranks
            raise
        told = (
            str(error)
            if isinstance(error, RefusedError)
            else f"rank {dist.get_rank()} could not {what}: {error}"
        )
        with suppress(dist.DistError):  # a store that is gone must not hide the error
            for board, number in zip(boards, rounds, strict=True):
                board.refuse(number, told)
        raise
