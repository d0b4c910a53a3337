"""The key-value stores of process groups: the only place that makes them, or tells a fake group from a real one.

Each use has a prefix of its own: ``graphshard/GROUP`` for agreements, and ``graphshard/GROUP/USE`` with ``USE`` one of
``refusals``, ``meet/ROUND``, ``plans/MODELS``, ``cards`` and ``models``.
"""

from __future__ import annotations

import torch.distributed as dist

from .._compat import group_by_name, store_of


def group_store(name: str, *uses: str) -> dist.Store:
    """The store of the process group ``name``, under the prefix of one use."""
    return dist.PrefixStore("/".join(("graphshard", name, *uses)), store_of(group_by_name(name)))


def is_fake_group(name: str) -> bool:
    """Whether a process group is a fake one: it has no other ranks to wait for."""
    return dist.get_backend(group_by_name(name)) == "fake"


def can_wait_in_compilation(name: str) -> bool:
    """Whether a rank of a process group may wait for the others while it compiles.

    On a fake group there are no others. Ranks that are threads of one process (torch's "threaded" groups, for tests)
    compile one after the other, under a lock of Dynamo: one that waits would wait for ranks that wait for the lock.
    """
    return dist.get_backend(group_by_name(name)) not in ("fake", "threaded")


def count_in_group(name: str, what: str) -> int:
    """How often this rank has counted ``what`` in a process group, this time included.

    Ranks that count in the same order get the same numbers.
    """
    return int(group_store(name, what).add(str(group_by_name(name).rank()), 1))


def has_threads_as_ranks(name: str) -> bool:
    """Whether the ranks of a process group are threads of this process (torch's "threaded" groups, for tests)."""
    return dist.get_backend(group_by_name(name)) == "threaded"
