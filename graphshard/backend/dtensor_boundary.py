"""The boundary between DTensor parameters and compiled code, crossed once for all parameters of a graph.

**Crossing the boundary.** Dynamo's graph takes each parameter as a DTensor and calls ``to_local()`` on it. AOTAutograd
would unwrap and wrap every DTensor in Python at each step, and ranks with fewer rows would trace another graph. So the
graph is made to take the *padded local tensors*, equal in shape on every rank. One autograd function carries all of
them: padded views on the way in, DTensor gradients on the way out.

A full parameter that the model writes to in place leaves as a further result of the graph
(:mod:`graphshard.backend.parameter_writes`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from .._compat import detect_fake_mode, is_to_local
from ..errors import ParameterStateError
from ..fsdp.state import Version, slot_of_shard, unit_of, version_of
from ..ir import UNSHARD, ExtendedInputs, UnshardCall, padded_shape, unshard_outside_transforms
from .extended_gathers import ExtendedEntrance, enter_extended, entrances, inputs_of_extended
from .padded_shards import Crossing, PaddedLocals, padded_local
from .parameter_writes import (
    HandedOn,
    ParameterWrite,
    handed_on,
    return_written,
    store_written,
    views_for_gather,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """A graph that takes padded local tensors in place of DTensor parameters.

    Attributes:
        inputs: fake inputs of the edited graph.
        crossings: the parameters that enter as padded shards.
        extended: those with a gather extension, whose shards enter as the tensors that they hold.
        writes: the parameters that the graph writes to, in the order of its last results.
        results: full parameters among the results of the graph.
        models: positions of arguments that lead to units, one for each model: handles, or the shards of one rank.
    """

    inputs: list[Any]
    crossings: tuple[Crossing, ...] = ()
    extended: tuple[ExtendedEntrance, ...] = ()
    writes: tuple[ParameterWrite, ...] = ()
    results: tuple[HandedOn, ...] = ()
    models: tuple[int, ...] = ()

    @property
    def extended_inputs(self) -> Callable[[fx.Graph], tuple[ExtendedInputs, ...]]:
        """Finds the inputs of the joint graph that stand for ``extended``; holds no tensor of the model."""
        return partial(inputs_of_extended, self.extended, len(self.inputs))

    def wrap(self, compiled: Callable[..., Any], regathered: Collection[str] = ()) -> Callable[..., Any]:
        """A function of the graph's original inputs.

        Args:
            compiled: the compiled code of the edited graph.
            regathered: names of the parameters that the backward gathers again: they must not change in between.
        """
        if not self.crossings and not self.writes:
            return compiled
        run = _at_runtime(compiled, self.crossings, self.extended, frozenset(regathered))
        gathered = {name for crossing in self.crossings for name in crossing.names}
        return store_written(run, self.writes, self.models, self.results, gathered)


def enter_boundary(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Boundary:
    """Edits a graph of Dynamo in place to take padded local tensors.

    A DTensor that the graph, or a checkpointed region of it, uses in any other way than through ``to_local()`` stays a
    DTensor. If it is gathered as well, the shard that the gathers read is an input of its own, at the end, so that
    the gradient of each is one reduction or none.

    Raises:
        ParameterStateError: a parameter is written to where that cannot be carried out.
    """
    _move_gathers_out_of_transforms(gm)
    inputs = list(example_inputs)
    extended = enter_extended(gm, inputs)
    results = handed_on(gm)
    writes = return_written(gm, example_inputs)
    crossings = []
    touched = {gm}
    sources = list(range(len(inputs)))  # those of the extended ones are not used
    for position, placeholder in enumerate(gm.graph.find_nodes(op="placeholder")):
        if isinstance(inputs[position], DTensor) and _separate_gathers(placeholder):
            sources.append(position)
            inputs.append(inputs[position])
    for position, placeholder in enumerate(gm.graph.find_nodes(op="placeholder")):
        example = inputs[position]
        placeholders = _followed(placeholder) if isinstance(example, DTensor) else None
        if placeholders is None or not _can_cross(locals_ := _locals_of(placeholders)):
            continue
        as_reals = any(map(views_for_gather, _readers(locals_)))
        if as_reals:
            locals_ = _merged_reals(locals_)
        (shape, dim), names = _padded(locals_, example), _names(locals_)
        inputs[position] = _fake_shard(example, shape, as_reals)
        for entrance in placeholders:
            entrance.meta["example_value"] = inputs[position]
            entrance.type = Tensor
            touched.add(entrance.graph.owning_module)
        for local in locals_:
            local.replace_all_uses_with(local.args[0])
            local.graph.erase_node(local)
        crossings.append(
            Crossing(
                position=position,
                source=sources[position],
                shape=shape,
                dim=dim,
                names=names,
                as_reals=as_reals,
            )
        )
    for module in touched:
        module.recompile()
    units = {position: unit_of(value) for position, value in enumerate(example_inputs)}
    models = {id(unit.tree): position for position, unit in units.items() if unit is not None}
    for crossing in crossings:
        slot = None if crossing.names else slot_of_shard(example_inputs[crossing.source])
        if slot is not None:
            models.setdefault(id(slot.unit.tree), crossing.source)
    return Boundary(
        inputs=inputs,
        crossings=(*crossings, *(_carried(entrance) for entrance in extended)),
        extended=tuple(extended),
        writes=writes,
        results=results,
        models=tuple(models.values()),
    )


def _carried(entrance: ExtendedEntrance) -> Crossing:
    return Crossing(
        position=entrance.source,
        source=entrance.source,
        shape=entrance.extension.shape,
        dim=0,
        names=(entrance.name,),
        is_carrier=True,
    )


def cross_boundary(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    compile_graph: Callable[[fx.GraphModule, list[Any]], Any],
) -> Callable[..., Any]:
    """Compiles ``gm`` on padded local tensors, and returns a function of the original inputs.

    It does not watch for parameters that change before the backward gathers them again.
    """
    boundary = enter_boundary(gm, example_inputs)
    return boundary.wrap(compile_graph(gm, boundary.inputs))


def _move_gathers_out_of_transforms(gm: fx.GraphModule) -> None:
    """Gathers parameters read inside transforms of ``torch.func`` at the top of the graph, where none is active."""
    reads = gm.graph.find_nodes(op="call_function", target=unshard_outside_transforms)
    first = next(node for node in gm.graph.nodes if node.op != "placeholder")
    for read in reads:
        param, *arguments = read.args
        with gm.graph.inserting_before(first):
            value = gm.graph.call_method("to_local", (param,))
            if arguments:
                value = gm.graph.call_function(UNSHARD, (value, *arguments))
        value.meta = dict(read.meta)
        read.replace_all_uses_with(value)
        gm.graph.erase_node(read)


def _followed(placeholder: fx.Node) -> list[fx.Node] | None:
    """``placeholder`` and those it becomes in checkpointed regions; None if anything else reads it."""
    found = [placeholder]
    for entrance in found:  # grows on the way
        for user in entrance.users:
            if is_to_local(user):
                continue
            inner = entrances(user, entrance)
            if inner is None:
                return None
            found += inner
    return found


def _separate_gathers(placeholder: fx.Node) -> bool:
    """Gives the gathers of a parameter that is read in another way, too, a placeholder of their own, the last one."""
    gathers = [user for user in placeholder.users if _is_for_gathers(user, placeholder)]
    if not gathers or len(gathers) == len(placeholder.users):
        return False
    *_, last = placeholder.graph.find_nodes(op="placeholder")
    with placeholder.graph.inserting_after(last):
        own = placeholder.graph.placeholder(f"{placeholder.target}_gathered")
    own.meta = dict(placeholder.meta)
    own._dynamo_source = None  # AOTAutograd asks each input for it
    for user in gathers:
        user.replace_input_with(placeholder, own)
    return True


def _is_for_gathers(user: fx.Node, value: fx.Node) -> bool:
    """Whether only gathers read what a node, or the region that it calls, makes of a parameter."""
    if is_to_local(user):
        return bool(user.users) and all(
            reader.target is UNSHARD or views_for_gather(reader) for reader in user.users
        )
    inner = entrances(user, value) or []
    return bool(inner) and all(_is_for_gathers(reader, each) for each in inner for reader in each.users)


def _locals_of(placeholders: list[fx.Node]) -> list[fx.Node]:
    return [user for entrance in placeholders for user in entrance.users if is_to_local(user)]


def _can_cross(uses: list[fx.Node]) -> bool:
    """Whether only gathers read the shard, or (at one rank) no gather does."""
    readers = [
        reader for user in _readers(uses) for reader in (user.users if views_for_gather(user) else [user])
    ]
    return len({reader.target is UNSHARD for reader in readers}) <= 1


def _readers(uses: list[fx.Node]) -> list[fx.Node]:
    return [reader for use in uses for reader in use.users]


def _merged_reals(uses: list[fx.Node]) -> list[fx.Node]:
    """The uses of a complex shard without the views as reals behind them: the shard itself enters as reals."""
    for view in _readers(uses):
        view.replace_all_uses_with(view.args[0])
        view.graph.erase_node(view)
    return uses


def _padded(locals_: list[fx.Node], example: DTensor) -> tuple[tuple[int, ...], int]:
    """Padded shape and cut dim, from the ``unshard`` that reads the shard; at one rank nothing is padded."""
    for local in locals_:
        for user in local.users:
            if user.target is UNSHARD:
                call = UnshardCall(*user.args)
                return tuple(padded_shape(call.shape, call.dim, call.group_size)), call.dim
    return tuple(example.to_local().shape), 0


def _names(locals_: list[fx.Node]) -> tuple[str, ...]:
    readers = [user for local in locals_ for user in local.users if user.target is UNSHARD]
    return tuple(dict.fromkeys(UnshardCall(*reader.args).name for reader in readers))


def _fake_shard(example: DTensor, shape: tuple[int, ...], as_reals: bool) -> Tensor:
    mode = detect_fake_mode([example])
    assert mode is not None, "Dynamo hands fake inputs to its backends"
    with mode:
        dtype = example.dtype.to_real() if as_reals else example.dtype
        return torch.empty(shape, dtype=dtype, device=example.device, requires_grad=example.requires_grad)


def _at_runtime(
    compiled: Callable[..., Any],
    crossings: Sequence[Crossing],
    extended: Sequence[ExtendedEntrance],
    regathered: frozenset[str],
) -> Callable[..., Any]:
    watched = [
        (crossing.source, crossing.names[0])
        for crossing in crossings
        if not regathered.isdisjoint(crossing.names)
    ]

    ends = [entrance.first + len(entrance.extension.names) for entrance in extended]
    num_inputs = max([*(1 + crossing.position for crossing in crossings), *ends], default=0)

    def run(*args: Any) -> Any:
        values = [*args, *[None] * (num_inputs - len(args))]
        for entrance in extended:
            inner = entrance.extension.inner(args[entrance.source]._local_tensor)
            values[entrance.first : entrance.first + len(inner)] = inner
        grads_wanted = torch.is_grad_enabled()
        differentiable = []
        for crossing in crossings:
            param = args[crossing.source]
            if grads_wanted and param.requires_grad:
                differentiable.append(crossing)
            else:
                values[crossing.position] = padded_local(param, crossing)
        if not differentiable:
            return compiled(*values)
        params = [args[crossing.source] for crossing in differentiable]
        shards = PaddedLocals.apply(differentiable, *params)
        for crossing, shard in zip(differentiable, shards, strict=True):
            values[crossing.position] = shard
        read = [_ReadShard(name, args[position], version_of(args[position])) for position, name in watched]
        outputs = compiled(*values)
        if read:
            _refuse_changed(outputs, shards[0].grad_fn, read)
        return outputs

    return run


class _ReadShard(NamedTuple):
    """A parameter that a backward will gather again, and its version in the forward."""

    name: str
    param: DTensor
    version: Version


def _refuse_changed(outputs: Any, entrance: Any, read: list[_ReadShard]) -> None:
    """Makes the backward of ``outputs`` raise, on every rank alike, if a shard has changed by then.

    Autograd's own check of saved tensors does not suffice. It cannot name the parameter, and it misses in-place ops on
    the DTensor and shards that were copied to be padded: some ranks would raise while others wait.
    """
    compiled = _reader_of(entrance, outputs)
    if compiled is None:
        return

    def check(_: Any) -> None:
        changed = [shard.name for shard in read if version_of(shard.param) != shard.version]
        if changed:
            raise ParameterStateError(
                f"parameter(s) {', '.join(changed)} changed in place after the forward whose backward now "
                "gathers them again, so old activations would meet new weights: run backward() before "
                "optimizer.step() or load_state_dict(), or keep the gathered parameters with "
                "fully_shard(..., reshard_after_forward=False)"
            )

    compiled.register_prehook(check)


def _reader_of(entrance: Any, outputs: Any) -> Any:
    """The autograd node of the compiled graph: it reads ``entrance``, and an output is its result or a view of it."""
    for output in outputs if isinstance(outputs, (list, tuple)) else [outputs]:
        node = output.grad_fn if isinstance(output, Tensor) else None
        for _ in range(2):
            if node is None:
                break
            sources = [source for source, _ in node.next_functions]
            if entrance in sources:
                return node
            node = sources[0] if sources else None
    return None
