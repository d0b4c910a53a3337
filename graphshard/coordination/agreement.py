"""Agreement of the ranks: before a newly compiled graph runs, they compare its collectives.

If ranks issue different collectives, one hangs for minutes or aborts with a size mismatch. So each rank publishes a
hash of the sequence that its new graph will issue on a process group. Rank 0 of the group compares them and publishes a
verdict, and every rank reads it. The exchange uses the key-value store of the group, under a time limit, and no
collective.

A sequence that all ranks have agreed on is not exchanged again. A rank that recompiles alone (its last batch was
smaller) issues the collectives that all ranks have, and must not wait for ranks that compile nothing. A rank that is
alone with a *new* sequence is the divergence to report.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from .._compat import group_by_name, group_timeout_seconds
from ..errors import AgreementError
from ..ir import text_fingerprint
from .group_store import can_wait_in_compilation, group_store
from .refusals import Refusals
from .transcript import Agreed, note


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The exchange on one process group.

    Attributes:
        store: a store that all ranks of the group share, under a prefix of its own.
        rank: this rank's place in the group, from 0.
        num_ranks: ranks in the group.
        timeout_seconds: how long to wait for the slowest rank.
        refusals: where ranks that stop write why.
    """

    store: dist.Store
    rank: int
    num_ranks: int
    timeout_seconds: float
    refusals: Refusals

    def require(self, sequence: Sequence[str], *, what: str) -> None:
        """Returns when all ranks hold the same ``sequence``.

        Args:
            sequence: a text for each collective.
            what: names the graph in errors.

        Raises:
            AgreementError: on every rank, if the sequences differ (names the first different collective and both
                ranks) or if ranks are missing at the time limit (names them).
            RefusedError: a rank has stopped with an error of its own, and does not come.
        """
        digest = text_fingerprint("\n".join(sequence))
        if self.num_ranks == 1 or self.store.check([f"agreed/{digest}"]):
            return
        number = self.refusals.round()
        self.refusals.check(number)
        exchange = f"{number}/{self.store.add(f'{number}/count/{self.rank}', 1)}"
        self.store.set(f"{exchange}/sequence/{self.rank}", "\n".join([digest, what, *sequence]))
        if self.rank == 0:
            verdict = self._judge(exchange, number, digest, what)
            if not verdict:
                self.store.set(f"agreed/{digest}", "1")
            self.store.set(f"{exchange}/verdict", json.dumps(verdict))
        else:
            # Rank 0 itself may wait for the full time limit before it can name a missing rank.
            verdict = self._read_verdict(exchange, number, what, limit=self.timeout_seconds + 10.0)
        if verdict:
            raise AgreementError(f"before the first collective of {what}: {verdict}")

    def _judge(self, exchange: str, number: int, digest: str, what: str) -> str:
        """The first disagreement in words, or "" if there is none."""
        keys = [f"{exchange}/sequence/{rank}" for rank in range(self.num_ranks)]
        if not self.refusals.wait(self.store, keys, number, self.timeout_seconds, compiles=what):
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            return (
                f"rank(s) {missing} did not compile a graph with new collectives within "
                f"{self.timeout_seconds:.0f} s, but rank(s) {sorted(set(range(self.num_ranks)) - set(missing))} "
                "did; all ranks must run the same code on inputs of the same kind "
                "(or have stopped with an error of their own: look at their output)"
            )
        mine = self._published(keys[0])
        for rank, key in enumerate(keys):
            theirs = self._published(key)
            if theirs[0] != digest:
                return _first_difference(mine, theirs, rank)
        return ""

    def _published(self, key: str) -> list[str]:
        return self.store.get(key).decode().split("\n")

    def _read_verdict(self, exchange: str, number: int, what: str, *, limit: float) -> str:
        key = f"{exchange}/verdict"
        if not self.refusals.wait(self.store, [key], number, limit, compiles=what):
            return (
                f"rank 0 published no verdict within {limit:.0f} s: it compiled no graph with new "
                "collectives, or has stopped with an error of its own. Every rank must take the same "
                "branches of compiled code"
            )
        return str(json.loads(self.store.get(key)))


def agree_on_group(name: str, sequence: Sequence[str], *, what: str, models: str | None = None) -> None:
    """:meth:`Agreement.require` among the ranks of the process group ``name``.

    Nothing on a fake group, and on one whose ranks are threads: they run the code of one process.

    Args:
        name: the process group.
        sequence: a text for each collective.
        what: names the graph in errors.
        models: tells the texts of some models from equal ones of others; None if nothing need tell them apart.
    """
    note(Agreed(name, tuple(sequence), what, is_of_models=models is not None))
    if not can_wait_in_compilation(name):
        return
    group = group_by_name(name)
    agreement = Agreement(
        store=group_store(name),
        rank=group.rank(),
        num_ranks=group.size(),
        timeout_seconds=group_timeout_seconds(group),
        refusals=Refusals.of_group(name),
    )
    of_models = sequence if models is None else [f"{text} of model {models}" for text in sequence]
    agreement.require(of_models, what=what)


def _first_difference(mine: list[str], theirs: list[str], rank: int) -> str:
    _, my_graph, *my_sequence = mine
    _, their_graph, *their_sequence = theirs
    for index in range(max(len(my_sequence), len(their_sequence))):
        left = my_sequence[index] if index < len(my_sequence) else "nothing"
        right = their_sequence[index] if index < len(their_sequence) else "nothing"
        if left != right:
            return (
                f"the ranks would issue different collectives; the first difference is collective {index}: "
                f"rank 0 ({my_graph}) has {left}, rank {rank} ({their_graph}) has {right}. "
                "Every rank must build the same model and take the same branches"
            )
    return f"rank 0 and rank {rank} hash the same collectives differently: different graphshard versions?"
