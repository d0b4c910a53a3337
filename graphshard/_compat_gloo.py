"""All-gathers on gloo, by another way than torch's own. See ``_compat``.

Gloo gathers into a flat buffer of its own and copies out of it at the end. So a gather that runs holds its result
twice. Here each rank sends its shard to each other rank, which receives it at its place in the result, and nothing is
held twice (docs/decisions/0012). In groups of more than four ranks gloo's plain gather is asked for.

Receives start before sends. Gloo tells a sender over the same connection that it may send, so the other order would
send both ways one after the other.

Torch's kernel of ``_c10d_functional.all_gather_into_tensor`` asks the process group for a coalesced gather. With
several of them in flight, gloo's coalesced gather now and then destroys the heap (docs/reference/versions.md; checked:
2.13). The kernel here is the op's for CPU tensors in the whole process; a group of another backend gets what torch
does.
"""

from __future__ import annotations

import sys
import threading
import warnings
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # checked: 2.11, 2.13
    AllgatherOptions,
    _register_work,
    _resolve_process_group,
)

#: All-gather of one tensor, by its name in torch 2.13 or the older one (checked: 2.13).
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

#: With more ranks, gloo gathers by its own way.
MAX_RANKS_IN_PLACE = 4

#: Smaller results of :func:`start_gather` are gathered in gloo's own way: a thread has to wait for messages, if a wait
#: has a limit, which takes longer than such a gather.
LEAST_BYTES_IN_PLACE = 2**16

#: Of the messages of gathers. Users number theirs from 0.
_TAG = 2**30

_torch_gathers = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default


class GatherWork:
    """The messages of one gather: the part of ``dist.Work`` that graphshard calls.

    A wait takes no limit. A receive of gloo whose wait ends by a limit closes the connections of its group; one
    that is dropped before it has ended blocks them. So if nobody waits for a gather, a thread does.
    """

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works
        self._waiting = threading.Lock()

    def wait(self) -> None:
        """Waits for all; also while another thread does, or after a wait.

        Raises:
            RuntimeError: one has failed, and no wait has said so yet.
        """
        with self._waiting:
            _wait_for_all(self._works)

    def __del__(self) -> None:
        # A thread that starts while the interpreter ends never runs; Python 3.11 waits for it without end (checked).
        if self._works and not sys.is_finalizing():
            with suppress(RuntimeError):  # no more threads
                threading.Thread(target=_drain, args=(self._works,), daemon=True).start()

    def get_future(self) -> torch.futures.Future[None]:
        """Done when all have ended; a thread waits for them."""
        future: torch.futures.Future[None] = torch.futures.Future()

        def finish() -> None:
            try:
                self.wait()
                future.set_result(None)
            except RuntimeError as error:
                future.set_exception(error)

        threading.Thread(target=finish, daemon=True).start()
        return future


def _wait_for_all(works: list[dist.Work]) -> None:
    """Takes each out before it waits for it: a second wait would never end. After an interrupt the rest is left."""
    while works:
        works.pop(0).wait()


def _drain(works: list[dist.Work]) -> None:
    with suppress(RuntimeError):  # whoever communicates next gets the error
        _wait_for_all(works)


def start_gather(gathered: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Starts ``dist.all_gather_into_tensor``; larger ones in place on gloo. To dispatch modes it is one all-gather.

    Args:
        gathered: contiguous, of shape ``(n * group_size, ...)``. No one else may read or write it before the wait.
        shard: of shape ``(n, ...)``; it may be this rank's part of ``gathered``.
        group: the process group.

    Returns:
        What to wait for: a ``dist.Work`` or a :class:`GatherWork`.
    """
    # Gloo copies what it gathers from a GPU through the host's memory; messages of a GPU's memory it cannot read.
    is_in_place = (
        shard.device.type == "cpu"
        and 1 < group.size() <= MAX_RANKS_IN_PLACE
        and gathered.nbytes >= LEAST_BYTES_IN_PLACE
    )
    backend = _gloo_backend(group, shard.device) if is_in_place else None
    if backend is None:
        return gather_single(gathered, shard, group=group, async_op=True)
    if not torch._C._len_torch_dispatch_stack():
        return GatherWork(_messages(gathered, shard, backend))
    # The same messages, so that ranks may differ in their modes.
    _serve_plain_gathers()
    _asked.works = []
    try:
        gather_single(gathered, shard, group=group, async_op=True)
        return GatherWork(_asked.works)
    finally:
        _asked.works = None


class _Asked(threading.local):
    """Where the kernel of a plain gather leaves its messages; None if it is not this file that asks."""

    works: list[dist.Work] | None = None


_asked = _Asked()


def _messages(gathered: torch.Tensor, shard: torch.Tensor, backend: Any) -> list[dist.Work]:
    """Messages between all ranks, started, each received at its place in ``gathered``."""
    if not shard.numel():
        return []
    gathered, shard = gathered.detach(), shard.detach()
    size, rank = backend.size(), backend.rank()
    if shard.data_ptr() != gathered.data_ptr() + rank * shard.nbytes:
        gathered.view(size, *shard.shape)[rank].copy_(shard)
    places = _as_bytes(gathered).chunk(size)
    # Each rank begins with the next one, so that not all send to the same.
    ahead = [(rank + step) % size for step in range(1, size)]
    received = [backend.recv([places[other]], other, _TAG) for other in reversed(ahead)]
    return [*received, *(backend.send([places[rank]], other, _TAG) for other in ahead)]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """For gloo, which does not know all dtypes."""
    return tensor.view(-1).view(torch.uint8)


def _all_gather_on_cpu(
    shard: torch.Tensor, group_size: int, group_or_name: str | dist.ProcessGroup
) -> torch.Tensor:
    """``shard``, of shape ``(n, ...)``, of all ranks: shape ``(n * group_size, ...)``, complete after a wait."""
    is_name = isinstance(group_or_name, str)
    group = _resolve_process_group(group_or_name) if is_name else group_or_name
    backend = _gloo_backend(group, shard.device)
    if backend is None or not shard.dim():
        return _torch_gathers([shard], group_size, group_or_name)[0]
    full = shard.new_empty((shard.shape[0] * group_size, *shard.shape[1:]))
    if group_size <= MAX_RANKS_IN_PLACE:
        for work in _messages(full, shard, backend):
            _register_work(full, work)
        return full
    own = shard.detach().resolve_conj().contiguous()
    _register_work(full, backend._allgather_base(_as_bytes(full), _as_bytes(own), AllgatherOptions()))
    return full


def _plain_gather_on_cpu(
    gathered: torch.Tensor, shard: torch.Tensor, boxed: Any, async_op: bool = True, timeout: int = -1
) -> tuple[torch.Tensor, Any]:
    """``c10d::_allgather_base_``, as torch's kernel does it unless :func:`start_gather` has asked."""
    backend: Any = dist.ProcessGroup.unbox(boxed)._get_backend(shard.device)
    if _asked.works is not None:
        _asked.works += (works := _messages(gathered, shard, backend))
        return gathered, works[-1].boxed()
    options = AllgatherOptions()
    options.timeout, options.asyncOp = timedelta(milliseconds=timeout), async_op
    return gathered, backend._allgather_base(gathered, shard, options).boxed()


def _gloo_backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The group's backend for tensors on the device, if that is gloo."""
    try:
        backend = group._get_backend(device)
    except RuntimeError:  # a group with no backend of torch's
        return None
    return backend if backend.name() == "gloo" else None


#: Holds the kernels for as long as the process runs.
gather_library = torch.library.Library("_c10d_functional", "IMPL")
gather_library.impl("all_gather_into_tensor", _all_gather_on_cpu, "CPU")
_plain_library = torch.library.Library("c10d", "IMPL")


@cache
def _serve_plain_gathers() -> None:
    with warnings.catch_warnings():  # of a kernel that is replaced
        warnings.simplefilter("ignore")
        _plain_library.impl("_allgather_base_", _plain_gather_on_cpu, "CPU")
