"""Full parameters that a graph of Dynamo writes to in place: they leave the graph, and are written back to the shards.

Each read of a parameter is a gather of its own, a new value. So a write to one of them would reach no other read, and
no shard. Here the graph gathers a parameter that it writes to once, at its start, and returns the changed value as a
further result. Behind the graph all ranks write it back. The backward does not gather such a parameter again, since its
shard is another one by then.

Dynamo runs each op on fake tensors. An in-place op moves their version counters, through views, ``detach`` and
``.data`` too, so nothing here needs to know which ops write.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from .._compat import FakeTensor, is_to_local, storage_id
from ..errors import ParameterStateError
from ..fsdp import Writable
from ..fsdp.state import Unit, owner_of, slot_of_shard, unit_of
from ..ir import UNSHARD, UnshardCall

#: Functions that write to an argument, though their names do not end in an underscore.
_WRITING = {"setitem"} | {
    name for name in dir(operator) if name.startswith("i") and f"__{name}__" in dir(operator)
}

#: Where the frames of libraries are.
_PACKAGES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))

#: The frames of a stack trace: file, line number, source line.
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in \S+\n\s*(.*)')


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterWrite:
    """One parameter that a graph writes to.

    Attributes:
        name: of the parameter; "" if it is the shard itself, at one rank.
        position: of the argument that leads to its shard: the handle of its unit, or the parameter itself.
        line: the line of the model that writes.
    """

    name: str
    position: int
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOn:
    """A full parameter among a graph's results: code behind a graph break may write to it.

    Attributes:
        name: of the parameter; "" if it is the shard itself, at one rank.
        position: of the argument that leads to its shard, as in :class:`ParameterWrite`.
        index: of the result.
    """

    name: str
    position: int
    index: int


def handed_on(gm: fx.GraphModule) -> tuple[HandedOn, ...]:
    """The full parameters among a graph's results."""
    positions = {node: index for index, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    (output,) = gm.graph.find_nodes(op="output")
    found = []
    for index, value in enumerate(output.args[0]):
        while isinstance(value, fx.Node) and _shows_a_read(value):
            value = value.args[0]
        if isinstance(value, fx.Node) and value.target is UNSHARD:
            call = UnshardCall(*value.args)
            if call.handle in positions:
                found.append(HandedOn(name=call.name, position=positions[call.handle], index=index))
        elif isinstance(value, fx.Node) and _is_read(value) and value.args[0] in positions:
            found.append(HandedOn(name="", position=positions[value.args[0]], index=index))
    return tuple(found)


def _shows_a_read(node: fx.Node) -> bool:
    """Whether a node makes of a gathered tensor what the model reads: complex numbers, or a DTensor."""
    name = getattr(node.target, "__name__", str(node.target))
    return node.target is torch.view_as_complex or name in ("from_local", "prim_from_local")


def return_written(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[ParameterWrite, ...]:
    """Edits a graph in place to gather each parameter that it writes to once, and to return its last value.

    Raises:
        ParameterStateError: the write, or another read of the parameter, is in a checkpointed region or a branch; or
            autograd records the write.
    """
    for module in gm.modules():
        if module is not gm and isinstance(module, fx.GraphModule):
            for read, line in _written_reads(module):
                raise _refusal(_key_of(read), line, "in a checkpointed region or a branch")
    found: dict[str, str] = {}
    for read, line in _written_reads(gm):
        if _is_recorded(read):
            raise ParameterStateError(
                f"parameter {_key_of(read)} is written in place where gradients are enabled, at {line}: write to it "
                "under torch.no_grad(), as to any parameter"
            )
        found.setdefault(_key_of(read), line)
    if not found:
        return ()
    positions = {node: index for index, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    writes, values = [], []
    for key, line in found.items():
        value, entrance = _read_once(gm, key, line)
        values.append(value)
        is_shard = isinstance(example_inputs[positions[entrance]], DTensor)
        writes.append(ParameterWrite(name="" if is_shard else key, position=positions[entrance], line=line))
    (output,) = gm.graph.find_nodes(op="output")
    with gm.graph.inserting_before(output):
        returned = [gm.graph.call_method("detach", (value,)) for value in values]
    output.args = ((*output.args[0], *returned),)
    gm.graph.lint()
    gm.recompile()
    return tuple(writes)


def store_written(
    run: Callable[..., Any],
    writes: Sequence[ParameterWrite],
    models: Sequence[int],
    results: Sequence[HandedOn] = (),
    gathered: Collection[str] = (),
) -> Callable[..., Any]:
    """A function that runs a graph and writes what it has changed back to the shards.

    Before, it writes back what uncompiled parts of the same forward have changed.

    Args:
        run: the graph; its last results are the changed values.
        writes: the parameters.
        models: positions of arguments that lead to units, one for each model: handles, or the shards of one rank.
        results: full parameters among the results of the graph, without those of ``writes``.
        gathered: names of the parameters that the graph gathers.

    Raises:
        ParameterStateError: the graph has written to a full parameter that an earlier part of the forward has read, and
            has itself gathered the old values.
    """

    def run_and_store(*args: Any) -> Any:
        units = [_read_of("", args[position])[1] for position in models]
        trees = [unit.tree for unit in units if unit is not None]
        for tree in trees:
            tree.write_back()
        outputs = run(*args)
        for tree in trees:
            reads = [entry for _, each in tree.handed_on for entry in each.items()]
            changed = [name for name, read in reads if name in gathered and read.is_changed]
            if changed:
                raise ParameterStateError(
                    f"parameter(s) {', '.join(changed)}, read before a graph break, are written in place behind it, "
                    "where the forward reads them again: that read got the old values. Write to the parameter before "
                    "the graph break, or read it anew behind it"
                )
        if writes:
            for write, value in zip(writes, outputs[-len(writes) :], strict=True):
                _store(write, args[write.position], value)
            outputs = outputs[: -len(writes)]
        return _hand_on(outputs, results, args) if results else outputs

    return run_and_store


def _hand_on(outputs: Sequence[Any], results: Sequence[HandedOn], args: Sequence[Any]) -> Sequence[Any]:
    """The results of a graph, with full parameters that the rest of the forward may write to."""
    handed = list(outputs)
    for result in results:
        name, unit = _read_of(result.name, args[result.position])
        if unit is None or not unit.tree.in_forward:
            continue
        shown = handed[result.index]
        if isinstance(shown, DTensor):
            unit.note_read(name, shown._local_tensor, shown)
        else:
            handed[result.index] = shown = Writable.apply(shown)
            unit.note_read(name, shown, shown)
    return handed


def _read_of(name: str, holder: Any) -> tuple[str, Unit | None]:
    """The name and the unit of a parameter; ``holder`` is the handle of its unit or, at one rank, its shard."""
    slot = slot_of_shard(holder) if isinstance(holder, DTensor) else None
    return (name, unit_of(holder)) if slot is None else (slot.name, owner_of(slot))


def _store(write: ParameterWrite, holder: Any, value: Tensor) -> None:
    unit = unit_of(holder)
    if unit is not None:
        unit.store(write.name, value, write.line)
    elif isinstance(holder, DTensor):
        holder._local_tensor.detach().copy_(value)


def _written_reads(gm: fx.GraphModule) -> list[tuple[fx.Node, str]]:
    """The reads of parameters whose values a graph writes to, not its regions; each with the line that writes."""
    memory = {}
    for node in gm.graph.nodes:
        value = _local(node.meta.get("example_value"))
        if value is not None and _is_read(node):
            memory[storage_id(value)] = node
    written: dict[fx.Node, str] = {}
    for node in gm.graph.nodes if memory else ():
        value = _local(node.meta.get("example_value"))
        read = memory.get(storage_id(value)) if value is not None else None
        if read is not None and read not in written and _version(node.meta["example_value"]) > 0:
            written[read] = _line_of_write(gm, read)
    for node in gm.graph.nodes if memory else ():
        for value in _written_lists(node):
            local = _local(value.meta.get("example_value"))
            read = memory.get(storage_id(local)) if local is not None else None
            if read is not None and read not in written:
                written[read] = _line_of(node)
    return list(written.items())


def _written_lists(node: fx.Node) -> list[fx.Node]:
    """The tensors that an op on lists writes to; on fake tensors it does not move their version counters."""
    name = getattr(node.target, "__name__", "")
    if not (name.startswith(("_foreach_", "_fused_")) and name.endswith("_")):
        return []
    return [value for value in node.args[0] if isinstance(value, fx.Node)]


def _is_read(node: fx.Node) -> bool:
    """Whether a node reads a parameter: a gather, or at one rank the shard itself."""
    if node.target is UNSHARD:
        return True
    return is_to_local(node) and not any(
        user.target is UNSHARD or views_for_gather(user) for user in node.users
    )


def views_for_gather(node: fx.Node) -> bool:
    """Whether a node views a complex shard as reals for the gather that reads it."""
    return node.target is torch.view_as_real and any(user.target is UNSHARD for user in node.users)


def _key_of(read: fx.Node) -> str:
    """The parameter's name; of a shard that is not gathered, that of its input."""
    return UnshardCall(*read.args).name if read.target is UNSHARD else read.args[0].name


def _local(value: Any) -> Tensor | None:
    if isinstance(value, DTensor):
        value = value._local_tensor
    return value if type(value) is FakeTensor else None


def _version(value: Tensor) -> int:
    versions = [
        each._version for each in (value, _local(value)) if each is not None and not each.is_inference()
    ]
    return max(versions, default=0)


def _is_recorded(read: fx.Node) -> bool:
    source = read.meta["example_value"].grad_fn
    return source is not None and "unshard" not in type(source).__name__ and read.target is UNSHARD


def _line_of_write(gm: fx.GraphModule, read: fx.Node) -> str:
    """The line of the model that writes to the value of ``read``, as far as names of ops tell."""
    memory = storage_id(_local(read.meta["example_value"]))
    readers = []
    for node in gm.graph.nodes:
        values = map(_local, (each.meta.get("example_value") for each in node.all_input_nodes))
        if any(value is not None and storage_id(value) == memory for value in values):
            readers.append(node)
    writers = [node for node in readers if _names_a_write(node)] or readers
    return _line_of(writers[0]) if writers else "an unknown line"


def _names_a_write(node: fx.Node) -> bool:
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    is_option = any(node.kwargs.get(option) for option in ("out", "inplace", "max_norm"))
    return is_in_place or is_option or name in _WRITING


def _line_of(node: fx.Node) -> str:
    """The innermost line outside of torch and of graphshard that a node was traced from."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not frame[0].startswith(_PACKAGES)]
    if not frames:
        return "an unknown line"
    file, number, text = (own or frames)[-1]
    return f"{file}:{number} ({text.strip()})"


def _read_once(gm: fx.GraphModule, key: str, line: str) -> tuple[fx.Node, fx.Node]:
    """Makes all reads of a parameter one, at the start of the graph.

    Returns:
        The read, and the input that leads to the shard: the handle of the unit, or the parameter itself.
    """
    reads = [node for node in gm.graph.nodes if _is_read(node) and _key_of(node) == key]
    first = reads[0]
    local = first.args[0] if first.target is UNSHARD else first
    assert isinstance(local, fx.Node)
    view = local if views_for_gather(local) else None
    local = view.args[0] if view is not None else local
    assert isinstance(local, fx.Node)
    param = local.args[0]
    assert isinstance(param, fx.Node)
    if not all(is_to_local(user) for user in param.users):
        raise _refusal(key, line, "while a checkpointed region or a branch reads it")
    start = next(node for node in gm.graph.nodes if node.op != "placeholder")
    with gm.graph.inserting_before(start):
        shard = gm.graph.node_copy(local)
        shard = shard if view is None else gm.graph.node_copy(view, {local: shard}.__getitem__)
        if first.target is UNSHARD:
            call = UnshardCall(*first.args)._replace(
                shard=shard, reshard=1, reshard_group="", reshard_fixed=True
            )
            value, entrance = gm.graph.call_function(UNSHARD, tuple(call)), call.handle
        else:
            value, entrance = gm.graph.call_method("clone", (shard,)), param
    value.meta = dict(first.meta)
    for read in reads:
        source = read.args[0]
        read.replace_all_uses_with(value)
        gm.graph.erase_node(read)
        while read.target is UNSHARD and not source.users and source.op != "placeholder":
            erased, source = source, source.args[0]
            gm.graph.erase_node(erased)
    return value, entrance


def _refusal(key: str, line: str, where: str) -> ParameterStateError:
    return ParameterStateError(
        f"parameter {key} is written in place {where}, at {line}, which cannot be compiled: write to it outside of "
        "torch.utils.checkpoint and torch.cond, or leave the module out of torch.compile"
    )
