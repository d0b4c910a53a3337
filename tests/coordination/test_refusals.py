"""A rank that stops tells the others, once, and nothing of it is left for what comes after."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._inductor.exc import InductorError

from graphshard._compat import TorchDynamoException
from graphshard.coordination import group_store, refusals, rendezvous
from graphshard.coordination.refusals import Refusals, refusing
from graphshard.errors import AgreementError, RefusedError


def _boards(num_ranks=2, store=None):
    store = store or dist.HashStore()
    return [Refusals(store=store, rank=rank) for rank in range(num_ranks)]


def test_a_refusal_ends_a_round_for_all():
    first, second = _boards()
    second.check(0)
    first.refuse(0, "too small")
    assert (first.round(), second.round()) == (1, 0)
    with pytest.raises(RefusedError, match=r"^too small$"):
        second.check(0)
    second.leave(0)
    second.leave(0)
    assert second.round() == 1
    second.check(1)


def test_of_two_refusals_in_a_round_the_first_counts():
    """Each rank has stopped, with an error of its own; the next attempt begins with none."""
    first, second, third = _boards(3)
    second.refuse(0, "second")
    first.refuse(0, "first")
    with pytest.raises(RefusedError, match=r"^second$"):
        third.check(0)
    third.leave(0)
    assert [board.round() for board in (first, second, third)] == [1, 1, 1]
    for board in (first, second, third):
        board.check(1)


def test_waiting_ends_with_the_key_the_limit_or_a_refusal():
    store = dist.HashStore()
    first, second = _boards(store=dist.PrefixStore("refusals", store))
    started = time.monotonic()
    assert not second.wait(store, ["key"], 0, 0.3)
    assert time.monotonic() - started >= 0.3
    timer = threading.Timer(0.2, store.set, ("key", "1"))
    timer.start()
    assert second.wait(store, ["key"], 0, 30.0)
    first.refuse(0, "too small")
    assert second.wait(store, ["key"], 0, 30.0)  # what is there is there
    with pytest.raises(RefusedError, match="too small"):
        second.wait(store, ["key", "another"], 0, 30.0)
    timer.join()


class ComesLate(dist.Store):
    """A store whose first key, and a refusal after it, come right after the first look."""

    def __init__(self, refusing_board):
        super().__init__()
        self.looks, self.refusing_board = 0, refusing_board

    def check(self, keys):
        self.looks += 1
        if self.looks == 1:
            self.refusing_board.refuse(0, "the verdict")
        return self.looks > 1


def test_a_key_written_before_a_refusal_counts():
    first, second = _boards()
    assert second.wait(ComesLate(first), ["key"], 0, 30.0)
    with pytest.raises(RefusedError, match="the verdict"):
        second.check(0)


def test_waiting_on_a_store_that_is_gone_ends():
    limit = timedelta(seconds=5)
    server = dist.TCPStore("localhost", 0, None, is_master=True, wait_for_workers=False, timeout=limit)
    client = dist.TCPStore("localhost", server.port, None, False, timeout=limit)
    (board,) = _boards(1, store=dist.PrefixStore("refusals", client))
    del server
    assert not board.wait(client, ["key"], 0, 30.0)


@pytest.fixture
def groups(monkeypatch):
    """Boards of this rank and of another in groups "a" and "b", and a group that is not real."""
    boards = {name: _boards() for name in ("a", "b")}
    monkeypatch.setattr(group_store, "group_by_name", lambda name: name)
    monkeypatch.setattr(dist, "get_backend", lambda name: "gloo" if name in boards else "fake")
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(Refusals, "of_group", staticmethod(lambda name: boards[name][0]))
    return boards


def test_what_stops_a_rank_reaches_all_its_groups(groups):
    with pytest.raises(ZeroDivisionError), refusing(["a", "b", "fake"], "compile graph 0"):
        1 / 0  # noqa: B018
    for mine, other in groups.values():
        assert mine.round() == 1
        with pytest.raises(RefusedError, match=r"^rank 5 could not compile graph 0: division by zero$"):
            other.check(0)


def test_the_refusal_of_another_passes_on_as_it_came(groups):
    (mine, other), (_, beyond) = groups["a"], groups["b"]
    with pytest.raises(RefusedError), refusing(["a", "b"], "compile graph 0"):
        other.refuse(0, "rank 7 could not")
        mine.check(0)
    assert mine.round() == 1
    with pytest.raises(RefusedError, match=r"^rank 7 could not$"):
        beyond.check(0)


def test_a_refusal_inside_another_counts_once(groups):
    with pytest.raises(ValueError), refusing(["a"], "compile graph 0"), refusing(["a"], "compile its forward"):
        raise ValueError("no")
    mine, other = groups["a"]
    assert mine.round() == 1
    with pytest.raises(RefusedError, match="could not compile its forward: no"):
        other.check(0)


def test_what_dynamo_does_about_a_graph_is_no_refusal(groups):
    with pytest.raises(TorchDynamoException), refusing(["a"], "compile graph 0"):
        raise TorchDynamoException
    assert groups["a"][0].round() == 0


def test_an_error_of_inductor_is_one(groups):
    """To torch it is an exception of Dynamo, too; it reaches the user."""
    with pytest.raises(InductorError), refusing(["a"], "compile graph 0"):
        raise InductorError(RuntimeError("no C++ compiler"), None)
    mine, other = groups["a"]
    assert mine.round() == 1
    with pytest.raises(RefusedError, match=r"rank 5 could not compile graph 0: RuntimeError: no C\+\+ compiler"):
        other.check(0)


def test_a_refusal_ends_a_meeting_and_the_next_one_begins_anew(monkeypatch):
    """The rank that refused has not counted the meeting that the other came to."""
    store = dist.HashStore()

    class Group:
        def __init__(self, rank):
            self.rank = lambda: rank
            self.size = lambda: 2

    here = threading.local()
    for module in (group_store, rendezvous, refusals):
        monkeypatch.setattr(module, "group_by_name", lambda _: Group(here.rank))
    monkeypatch.setattr(dist, "get_backend", lambda _: "gloo")
    monkeypatch.setattr(group_store, "store_of", lambda _: store)
    monkeypatch.setattr(rendezvous, "group_timeout_seconds", lambda _: 30.0)
    errors = {0: [], 1: []}

    def meet(rank):
        here.rank = rank
        try:
            rendezvous.meet("group", "step", what="step", remedy="Do.")
        except AgreementError as error:
            errors[rank].append(str(error))

    waiting = threading.Thread(target=meet, args=(0,))
    waiting.start()
    here.rank = 1
    Refusals.of_group("group").refuse(0, "rank 1 could not")
    waiting.join(timeout=30)
    assert errors == {0: ["rank 1 could not"], 1: []}
    both = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 1)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(timeout=30)
    assert errors == {0: ["rank 1 could not"], 1: []} and not any(thread.is_alive() for thread in both)
