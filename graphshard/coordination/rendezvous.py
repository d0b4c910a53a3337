"""Ranks meet before they communicate: if a rank's next step is another one, that is an error, not a hang.

Which units a rank uses can depend on its data (a mixture of experts). Ranks that then start different collectives would
mix up parameters of equal size, or wait until the time limit. So where no agreed graph fixes the order, each rank first
writes its next step into the store of the process group. That costs a few round trips to the store and no collective.
"""

from __future__ import annotations

from .._compat import group_by_name, group_timeout_seconds
from ..errors import AgreementError, RefusedError
from .group_store import group_store, is_fake_group
from .refusals import Refusals

_SEPARATOR = "\n"


def meet(group_name: str, step: str, *, what: str, remedy: str, here: str = "") -> None:
    """Returns once all ranks of the group have come with an equal ``step``.

    Args:
        group_name: the process group.
        step: what must be equal on all ranks.
        what: the step in words for errors, starting with a verb.
        remedy: what to do about a difference, as a sentence.
        here: name of the meeting, for ranks that look whether it is held; see ``known_steps``.

    Raises:
        AgreementError: on every rank that has come, if one of them has another step, if another rank waits for them to
            compile a graph, or if some have not come at the group's time limit.
        RefusedError: a rank has refused a graph and does not come.
    """
    group = group_by_name(group_name)
    if group.size() == 1 or is_fake_group(group_name):
        return
    refusals = Refusals.of_group(group_name)
    number = refusals.round()
    store = group_store(group_name, "meet", str(number))
    rank = group.rank()
    turn = store.add(f"turn/{rank}", 1)
    words = _SEPARATOR.join((str(rank), what, step))
    first_rank, first_what, first_step = (
        store.compare_set(f"{turn}/first", "", words).decode().split(_SEPARATOR, 2)
    )
    if first_step != step:
        verdict = f"rank {first_rank} is about to {first_what}, but rank {rank} is about to {what}. {remedy}"
        store.set(f"{turn}/verdict", verdict)
        raise AgreementError(verdict)
    if here:
        store.set(f"here/{here}", "")
    num_here = store.add(f"{turn}/count", 1)
    if num_here == group.size():
        store.set(f"{turn}/verdict", "")
        if here:
            store.delete_key(f"here/{here}")
        for key in ("first", "count", "verdict"):  # all ranks are past the previous turn
            store.delete_key(f"{turn - 1}/{key}")
        return
    seconds = group_timeout_seconds(group)
    try:
        is_here = refusals.wait(
            store, [f"{turn}/verdict"], number, seconds, meets=what, num_ranks=group.size()
        )
    except RefusedError:
        refusals.leave(number)
        raise
    if is_here:
        verdict = store.get(f"{turn}/verdict").decode()
    else:
        num_here = store.add(f"{turn}/count", 0)
        verdict = (
            f"rank {rank} is about to {what}, but within {seconds:.0f} s only {num_here} of {group.size()} "
            f"ranks came to do the same. {remedy} (Or a rank has stopped with an error of its own.)"
        )
    if verdict:
        raise AgreementError(verdict)
