"""Ranks agree on their collectives over a store, or all of them learn why not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest
import torch.distributed as dist

from graphshard.coordination.agreement import Agreement
from graphshard.coordination.refusals import Refusals
from graphshard.errors import AgreementError, GraphShardError

GATHERS = ["all_gather(f32[2]) over shard", "all_gather(f32[4]) over shard"]
LIMIT = timedelta(seconds=20)


@pytest.fixture(params=["hash", "tcp"])
def stores(request) -> Callable[[int], list[dist.Store]]:
    """`stores(n)`: for each of n ranks its handle on one store."""

    def make(num_ranks: int) -> list[dist.Store]:
        if request.param == "hash":
            return [dist.HashStore()] * num_ranks
        server = dist.TCPStore("localhost", 0, None, is_master=True, wait_for_workers=False, timeout=LIMIT)
        others = [
            dist.TCPStore("localhost", server.port, None, False, timeout=LIMIT) for _ in range(num_ranks - 1)
        ]
        return [server, *others]

    return make


def _agreements(stores: Sequence[dist.Store], timeout_seconds: float = 10.0) -> list[Agreement]:
    return [
        Agreement(
            store=store,
            rank=rank,
            num_ranks=len(stores),
            timeout_seconds=timeout_seconds,
            refusals=Refusals(store=dist.PrefixStore("refusals", store), rank=rank),
        )
        for rank, store in enumerate(stores)
    ]


def _require_all(
    agreements: Sequence[Agreement], sequences: Sequence[Sequence[str] | None]
) -> list[str | None]:
    """Every rank with a sequence asks in a thread of its own; returns each rank's error, or None."""
    errors: list[str | None] = [None] * len(agreements)

    def ask(rank: int) -> None:
        try:
            agreements[rank].require(sequences[rank], what=f"graph of rank {rank}")
        except AgreementError as error:
            errors[rank] = str(error)

    present = [rank for rank, sequence in enumerate(sequences) if sequence is not None]
    threads = [threading.Thread(target=ask, args=(rank,)) for rank in present]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    return errors


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_equal_sequences_pass(stores, num_ranks):
    assert _require_all(_agreements(stores(num_ranks)), [GATHERS] * num_ranks) == [None] * num_ranks


def test_one_rank_has_nobody_to_ask():
    (alone,) = _agreements([dist.HashStore()], timeout_seconds=0.01)
    alone.require(GATHERS, what="graph")


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_mismatch_raises_on_every_rank(stores, odd):
    sequences = [GATHERS, GATHERS, GATHERS]
    sequences[odd] = [GATHERS[0], "all_gather(f32[8]) over shard"]
    errors = _require_all(_agreements(stores(3)), sequences)
    other = 1 if odd == 0 else odd
    for rank, error in enumerate(errors):
        assert error.startswith(f"before the first collective of graph of rank {rank}: ")
        assert "the first difference is collective 1: " in error
        assert f"rank 0 (graph of rank 0) has {sequences[0][1]}, " in error
        assert f"rank {other} (graph of rank {other}) has {sequences[other][1]}" in error


@pytest.mark.parametrize("shorter", [0, 1])
def test_a_missing_collective_is_named(stores, shorter):
    sequences = [list(GATHERS), list(GATHERS)]
    del sequences[shorter][1]
    for error in _require_all(_agreements(stores(2)), sequences):
        assert (
            f"collective 1: rank 0 (graph of rank 0) has {'nothing' if shorter == 0 else GATHERS[1]}" in error
        )
        assert f"rank 1 (graph of rank 1) has {'nothing' if shorter == 1 else GATHERS[1]}" in error


def test_another_order_is_a_mismatch(stores):
    errors = _require_all(_agreements(stores(2)), [GATHERS, GATHERS[::-1]])
    assert all("the first difference is collective 0" in error for error in errors)


def test_ranks_go_on_agreeing(stores):
    agreements = _agreements(stores(2))
    for round_ in range(3):
        assert _require_all(agreements, [[*GATHERS, str(round_)]] * 2) == [None, None]
    assert None not in _require_all(agreements, [GATHERS, ["something else"]])
    assert _require_all(agreements, [["after the error"]] * 2) == [None, None]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_alone_with_an_agreed_sequence_returns_at_once(stores, rank):
    """Its last batch was smaller: it compiles again, the others do not. Waiting for them would end in an error."""
    agreements = _agreements(stores(2), timeout_seconds=30.0)
    assert _require_all(agreements, [GATHERS] * 2) == [None, None]
    agreements[rank].require(GATHERS, what="smaller batch")
    assert _require_all(agreements, [["next"]] * 2) == [None, None]


def test_a_mismatched_sequence_is_not_taken_for_agreed(stores):
    agreements = _agreements(stores(2))
    assert None not in _require_all(agreements, [GATHERS, ["other"]])
    assert None not in _require_all(agreements, [GATHERS, ["other"]])


def test_missing_ranks_are_named_within_the_limit(stores):
    agreements = _agreements(stores(4), timeout_seconds=1.0)
    errors = _require_all(agreements, [GATHERS, None, GATHERS, None])
    assert errors[1] is errors[3] is None
    for error in (errors[0], errors[2]):
        assert "rank(s) [1, 3] did not compile a graph with new collectives within 1 s" in error
        assert "but rank(s) [0, 2] did" in error


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_refusal_ends_the_waiting_and_leaves_nothing_behind(stores, refusing):
    """The rank that refuses has taken part in fewer exchanges than the others, whose limit has an error of its own."""
    agreements = _agreements(stores(3), timeout_seconds=30.0)
    assert _require_all(agreements, [["first"]] * 3) == [None] * 3
    sequences = [GATHERS if rank != refusing else None for rank in range(3)]
    timer = threading.Timer(0.2, agreements[refusing].refusals.refuse, (0, "the budget is too small"))
    timer.start()
    errors = _require_all(agreements, sequences)
    assert [error for error in errors if error] == ["the budget is too small"] * 2
    for rank in range(3):
        agreements[rank].refusals.leave(0)
    assert _require_all(agreements, [["a smaller batch"]] * 3) == [None] * 3


@pytest.mark.slow
def test_a_missing_first_rank_is_named(stores):
    """The first rank judges; the others wait ten seconds longer than it may."""
    errors = _require_all(_agreements(stores(2), timeout_seconds=1.0), [None, GATHERS])
    assert "rank 0 published no verdict within 11 s" in errors[1]


def test_groups_on_one_store_do_not_mix(stores):
    """The backend gives each process group a prefix of its own."""
    handles = stores(2)
    shard, replicate = (
        _agreements([dist.PrefixStore(f"graphshard/{name}", store) for store in handles])
        for name in ("shard", "replicate")
    )
    assert _require_all(shard, [GATHERS] * 2) == [None, None]
    assert None not in _require_all(replicate, [GATHERS, ["other"]])


def test_errors_are_runtime_errors_of_ours():
    assert issubclass(AgreementError, RuntimeError) and issubclass(AgreementError, GraphShardError)
