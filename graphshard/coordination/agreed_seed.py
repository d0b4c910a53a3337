"""Ranks that share a batch must draw the same random numbers: they compare seeds when they compile a graph that draws.

Each rank writes the seed of its first, second, ... compilation of a graph, and compares it with those of the others
that are there. Whoever comes last sees a difference; the others are told at once. A rank waits for the others for some
seconds only: one that compiles alone (its code takes another branch) goes on. A seed on which the ranks have not
agreed before is waited for until the time limit of the group (:func:`agree_on_group`).
"""

from __future__ import annotations

from collections.abc import Sequence

from .._compat import group_by_name
from ..errors import AgreementError
from ..ir import text_fingerprint
from .agreement import agree_on_group
from .group_store import can_wait_in_compilation, group_store
from .refusals import Refusals
from .transcript import SeedCompared, note, recording

#: How long a rank with a seed that is agreed waits for ranks that compile the same graph.
_SECONDS = 5.0


def agree_on_seed(name: str, seed: int, graph: Sequence[str], *, what: str) -> None:
    """Returns when no rank of a process group is known to draw from another seed.

    Args:
        name: the process group.
        seed: of this rank.
        graph: describes the graph; equal on all ranks that compile the same one.
        what: names the graph in errors.

    Raises:
        AgreementError: another rank has compiled this graph with another seed; names both.
        RefusedError: (an AgreementError) another rank has seen that, or has stopped with an error of its own.
    """
    note(SeedCompared(name, tuple(graph), what))
    if not can_wait_in_compilation(name) or group_by_name(name).size() == 1:
        return
    group = group_by_name(name)
    rank, peers = group.rank(), range(group.size())
    store, refusals = group_store(name, "seeds"), Refusals.of_group(name)
    number = refusals.round()
    refusals.check(number)
    graph_key = text_fingerprint("\n".join(graph))
    turn = store.add(f"{number}/{graph_key}/turns/{rank}", 1)
    keys = [f"{number}/{graph_key}/{turn}/{peer}" for peer in peers]
    store.set(keys[rank], str(seed))
    refusals.wait(store, keys, number, _SECONDS, compiles=what)
    for peer in peers:
        if store.check([keys[peer]]) and (other := store.get(keys[peer]).decode()) != str(seed):
            text = (
                f"before the first collective of {what}: rank {rank} draws random numbers of seed {seed}, rank {peer} "
                f"of seed {other}. Ranks of the axis share a batch and must draw the same: call torch.manual_seed "
                "with the same number on all of them"
            )
            refusals.refuse(number, text)
            raise AgreementError(text)
    with recording():  # a later process has a seed of its own
        agree_on_group(name, [f"random numbers of seed {seed}"], what=what)
