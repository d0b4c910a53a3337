"""Runs all ranks of a mesh in one process, in milliseconds: the first test of parity for every pass.

The graph of each rank runs as a coroutine that stops at each collective (or shard op). When every rank has stopped, the
collectives are compared and computed exactly (sums in rank order), and the coroutines continue. Ranks may have
different graphs. If they would issue different collectives, the first difference is an error, where real ranks would
hang.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..errors import CollectiveMismatchError, OptionError
from ..ir import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    KEEP_PIECE,
    REDUCE_GRAD,
    REDUCE_SCATTER,
    RESHARD,
    SPREAD,
    UNSHARD,
    WAIT,
    EagerEmitter,
    MeshAxis,
    MeshLayout,
    ReduceGradCall,
    ReshardCall,
    UnshardCall,
    c10d,
    call_arguments,
    emit_reduce_grad,
    emit_reshard,
    emit_unshard,
    functional_form,
    is_collective,
    piece_of,
    tensors_of,
    value_text,
    written_operands,
)


@dataclass(frozen=True, slots=True)
class _Request:
    """A collective that one rank has reached."""

    target: Any
    args: tuple[Any, ...]

    def text(self) -> str:
        inputs = ", ".join(value_text(arg) if tensors_of(arg) else repr(arg) for arg in self.args)
        return f"{self.target}({inputs})"

    def key(self) -> str:
        """The part that must be equal on all ranks of the group (rows of an all-to-all may differ)."""
        if self.target is ALL_TO_ALL:
            value, *_, group = self.args
            return f"{self.target} of {value.dtype} rows of shape {tuple(value.shape[1:])} on {group}"
        return self.text()


_Rank = Generator[_Request, Any, Any]

#: The collective that a coalesced one runs on each of its tensors.
_COALESCED = {
    c10d.all_gather_into_tensor_coalesced.default: ALL_GATHER,
    c10d.reduce_scatter_tensor_coalesced.default: REDUCE_SCATTER,
    c10d.all_reduce_coalesced.default: ALL_REDUCE,
}


def run_on_all_ranks(
    graphs: fx.GraphModule | Sequence[fx.GraphModule], inputs: Sequence[Sequence[Any]], mesh: MeshLayout
) -> list[Any]:
    """Runs a captured graph, at either level, on every rank of ``mesh`` in this process.

    Args:
        graphs: one graph for all ranks, or one per rank.
        inputs: for each rank, the values of the graph's placeholders in order.
        mesh: axes whose group names appear in the graph; ranks are numbered row-major.

    Returns:
        The output of each rank, in rank order.

    Raises:
        CollectiveMismatchError: ranks of one group reach different collectives, or some ranks end while others still
            wait for one; names the first difference. Or a collective cannot run here.
        OptionError: the number of ``inputs`` is not the number of ranks.
    """
    num_ranks = mesh.num_ranks
    if len(inputs) != num_ranks:
        raise OptionError(
            f"the mesh has {num_ranks} ranks, but inputs are given for {len(inputs)}: give one list for each rank"
        )
    per_rank = [graphs] * num_ranks if isinstance(graphs, fx.GraphModule) else list(graphs)
    ranks = [
        _run_rank(graph, values, rank, mesh)
        for rank, (graph, values) in enumerate(zip(per_rank, inputs, strict=True))
    ]
    results: dict[int, Any] = {}
    pending: dict[int, _Request] = {}
    for rank in range(num_ranks):
        _advance(ranks, rank, None, pending, results)
    while pending:
        for rank, answer in _serve(pending, mesh).items():
            del pending[rank]
            _advance(ranks, rank, answer, pending, results)
    return [results[rank] for rank in range(num_ranks)]


def _advance(
    ranks: list[_Rank], rank: int, answer: Any, pending: dict[int, _Request], results: dict[int, Any]
) -> None:
    try:
        pending[rank] = ranks[rank].send(answer)
    except StopIteration as stop:
        results[rank] = stop.value


def _serve(pending: dict[int, _Request], mesh: MeshLayout) -> dict[int, Any]:
    """The results for every group whose members all wait; raises an error if there is no such group."""
    answers: dict[int, Any] = {}
    for rank in sorted(pending):
        peers = mesh.peers(rank, _axis_of(pending[rank], mesh))
        if rank != peers[0] or any(peer not in pending for peer in peers):
            continue
        group = [pending[peer] for peer in peers]
        if any(_axis_of(request, mesh) != _axis_of(group[0], mesh) for request in group):
            continue
        _check_same(peers, group)
        answers.update(zip(peers, _compute(group), strict=True))
    if not answers:
        waiting = "; ".join(
            f"rank {rank} waits in {request.text()}" for rank, request in sorted(pending.items())
        )
        raise CollectiveMismatchError(
            f"no collective has all its ranks: {waiting}; every other rank has ended"
        )
    return answers


def _axis_of(request: _Request, mesh: MeshLayout) -> MeshAxis:
    names = [axis.group_name for axis in mesh.axes]
    name = next((arg for arg in reversed(request.args) if isinstance(arg, str) and arg in names), None)
    axis = mesh.find(name) if name is not None else None
    if axis is None:
        raise CollectiveMismatchError(
            f"{request.text()} runs on a group that is not of the mesh ({names}); add its axis"
        )
    return axis


def _check_same(peers: list[int], group: list[_Request]) -> None:
    for peer, request in zip(peers, group, strict=True):
        if request.key() != group[0].key():
            raise CollectiveMismatchError(
                f"rank {peers[0]} reaches {group[0].text()} where rank {peer} reaches {request.text()}"
            )


def _compute(group: list[_Request]) -> list[Any]:
    """The result of one collective on each of its ranks: a tensor, or a list of tensors of a coalesced one."""
    values = [request.args[0] for request in group]
    target = group[0].target
    if target in _COALESCED:
        of_items = [
            _compute([_Request(_COALESCED[target], (item, *group[0].args[1:])) for item in items])
            for items in zip(*values, strict=True)
        ]
        return [list(results) for results in zip(*of_items, strict=True)]
    if target is ALL_GATHER:
        return [torch.cat(values) for _ in values]
    if target is ALL_REDUCE:
        return [_reduce(values, group[0].args[1]) for _ in values]
    if target is REDUCE_SCATTER:
        return list(_reduce(values, group[0].args[1]).chunk(len(values)))
    if target is ALL_TO_ALL:
        _check_rows(group)
        split = [value.split(request.args[2]) for value, request in zip(values, group, strict=True)]
        return [torch.cat([pieces[rank] for pieces in split]) for rank in range(len(values))]
    raise CollectiveMismatchError(f"{target} is not among the collectives that run in one process")


def _check_rows(group: list[_Request]) -> None:
    for rank, request in enumerate(group):
        sent = [other.args[2][rank] for other in group]
        if list(request.args[1]) != sent:
            raise CollectiveMismatchError(
                f"rank {rank} of the group expects {request.args[1]} rows in an all-to-all, but is sent {sent}"
            )


def _reduce(values: list[Tensor], op: str) -> Tensor:
    if op in ("max", "min"):
        stacked = torch.stack(values)
        return stacked.amax(0) if op == "max" else stacked.amin(0)
    if op == "product":
        return torch.stack(values).prod(0)
    total = values[0].clone()
    for value in values[1:]:
        total += value
    if op == "avg":
        return total / len(values)
    if op != "sum":
        raise CollectiveMismatchError(f"reduction {op!r} is not among sum, avg, max, min, product")
    return total


class _ReplayingEmitter(EagerEmitter):
    """Runs the lowering of a shard op up to its first collective without a result."""

    def __init__(self, answers: Sequence[Tensor]) -> None:
        self._answers = iter(answers)
        self.request: _Request | None = None

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        if target in (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL):
            answer = next(self._answers, None)
            if answer is None:
                self.request = _Request(target, args)
                raise _Stopped
            return answer
        return args[0] if target is WAIT else target(*args, **kwargs)


class _Stopped(Exception):  # noqa: N818 - control flow, not an error
    pass


def _lower(node: fx.Node, args: tuple[Any, ...], emit: _ReplayingEmitter) -> Tensor:
    if node.target is UNSHARD:
        return emit_unshard(emit, UnshardCall(*args))
    if node.target is RESHARD:
        return emit_reshard(emit, ReshardCall(*args))
    return emit_reduce_grad(emit, ReduceGradCall(*args))


def _run_shard_op(node: fx.Node, args: tuple[Any, ...]) -> _Rank:
    answers: list[Tensor] = []
    while True:
        emit = _ReplayingEmitter(answers)
        try:
            return _lower(node, args, emit)
        except _Stopped:
            assert emit.request is not None
            answers.append((yield emit.request))


def _run_piece_op(node: fx.Node, args: tuple[Any, ...], rank: int, mesh: MeshLayout) -> Any:
    """Runs ``spread`` or ``keep_piece``, which do not communicate but depend on the rank."""
    full, dim, group_size, _ = args
    peers = mesh.peers(rank, _axis_of(_Request(node.target, args), mesh))
    piece = piece_of(full, dim, group_size, peers.index(rank))
    return (full.clone(), piece) if node.target is KEEP_PIECE else piece


def _for_rank(call: ReshardCall, rank: int, mesh: MeshLayout) -> ReshardCall:
    """The reshard of a graph that was captured on another rank."""
    axis = _axis_of(_Request(RESHARD, call), mesh)
    return call._replace(rank=mesh.peers(rank, axis).index(rank))


def _run_collective(node: fx.Node, environment: dict[fx.Node, Any]) -> _Rank:
    """Runs a collective; one that writes into a given tensor returns that tensor."""
    given = tuple(value for name, value in call_arguments(node).items() if name != "out")
    memory = [environment[source] for source in written_operands(node)]
    arguments = fx.node.map_arg(given, lambda source: environment[source])
    result = yield _Request(functional_form(node.target), arguments)
    for target, value in zip(memory, tensors_of(result), strict=False):
        target.copy_(value)
    if not memory:
        return result
    return memory if isinstance(result, list) else memory[0]


def _run_rank(gm: fx.GraphModule, values: Sequence[Any], rank: int, mesh: MeshLayout) -> _Rank:
    """Runs one rank as a coroutine: yields each collective that it reaches, and receives its result."""
    interpreter = fx.Interpreter(gm)
    environment: dict[fx.Node, Any] = {}
    inputs = iter(values)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            environment[node] = next(inputs)
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: environment[source])
        if node.op == "output":
            return args[0]
        if node.target is RESHARD:
            args = _for_rank(ReshardCall(*args), rank, mesh)
        if node.target in (UNSHARD, REDUCE_GRAD, RESHARD):
            environment[node] = yield from _run_shard_op(node, args)
        elif node.target in (SPREAD, KEEP_PIECE):
            environment[node] = _run_piece_op(node, args, rank, mesh)
        elif is_collective(node):
            environment[node] = yield from _run_collective(node, environment)
        else:
            environment[node] = getattr(interpreter, node.op)(node.target, args, kwargs)
    return None
