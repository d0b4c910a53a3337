"""Parameters with gather extensions in a capture: what their shards hold is gathered, as in training.

In training a forward reads such a parameter by one call, and the backend traces the two methods of its class into the
graph (docs/decisions/0010). A capture of a plain model does the same: in the copy of the model that Dynamo traces, the
parameter is a property. Its result is the full parameter made of gathers of the tensors that a shard holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from .._compat import FakeTensorMode
from .._compat_autograd import tensor_of_input
from .._compat_dtensor import give_world_to, named_mesh_without_groups
from .._compat_groups import fake_world_named
from ..errors import UnsupportedShardingError
from ..fsdp import GatherExtended
from ..fsdp.state import (
    ParameterSlot,
    PreArguments,
    TracedExtension,
    cut_extended,
    has_extension,
    refuse_wrapper,
    why_untraceable,
    without_data,
)
from ..ir import ExtendedInputs, UnshardCall, group_name, is_collective, output_values, set_group_name
from ..pipeline import PassContext, parts_behind
from .rules import ShardingRules

#: The axis over which a plain model is sharded; in its graphs, the name of the group too.
_AXIS = "shard"

#: Attributes of a module of the traced copy: what reads its parameters, and the tensors of their shards.
_READS = "_graphshard_reads"
_SHARDS = "graphshard_shards"

#: Marks the functions that read a parameter.
_READ_OF = "_graphshard_captured_read_of"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendedShard:
    """The shard of one parameter with a gather extension.

    Attributes:
        extension: how the full parameter is made of it.
        local: a shard; its data is not read.
        shape, dtype: of the parameter.
    """

    extension: TracedExtension
    local: Tensor
    shape: torch.Size
    dtype: torch.dtype

    @staticmethod
    def of(slot: ParameterSlot) -> ExtendedShard:
        """That of a parameter that ``fully_shard`` has cut."""
        local = slot.param._local_tensor
        return ExtendedShard(
            extension=TracedExtension.of(slot, local), local=local, shape=slot.shape, dtype=local.dtype
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldShard:
    """The fake tensors in the traced copy that stand for one parameter.

    Attributes:
        call: its ``unshard``, without tensors.
        carrier: takes the gradient, and has no memory of its own.
        inner: what the shard holds.
    """

    call: UnshardCall
    carrier: nn.Parameter
    inner: tuple[Tensor, ...]


def has_extended_parameters(model: nn.Module) -> bool:
    """Whether a plain model has parameters with gather extensions."""
    return any(has_extension(param, path) for path, param in model.named_parameters())


def extended_shards(model: nn.Module, rules: ShardingRules) -> dict[str, ExtendedShard]:
    """The parameters of a plain model that have extensions, by path, as ``fully_shard`` would cut them.

    Raises:
        UnsupportedShardingError: a parameter cannot be cut or traced, or its class holds its data in other tensors and
            does not say how they are gathered.
        ExtensionError: (an AssertionError) a class has only one of the two methods.
    """
    owners = {
        f"{path}.{name}".lstrip("."): part
        for path, part in model.named_modules()
        for name in part._parameters
    }
    num_ranks, found = rules.mesh["shard"], {}
    for path, param in model.named_parameters():
        if isinstance(param, DTensor) or type(param) is nn.Parameter:
            continue
        if not has_extension(param, path):
            refuse_wrapper(param, path)
            continue
        why = why_untraceable(param, num_ranks)
        if why:
            raise UnsupportedShardingError(
                f"inspect: parameter {path} has an all-gather extension (fsdp_pre_all_gather) that cannot be "
                f"captured: {why}. Change its class, or inspect the model with a plain parameter in its place"
            )
        local = cut_extended(without_data(param), path, num_ranks)[0]
        mesh = named_mesh_without_groups(_AXIS, num_ranks)
        given = PreArguments(mesh, tuple(param.stride()), owners[path], rules.mp_policy)
        extension = TracedExtension.of_shard(local, param.shape, num_ranks, given)
        found[path] = ExtendedShard(extension=extension, local=local, shape=param.shape, dtype=param.dtype)
    return found


@contextmanager
def group_for_extensions(shards: Mapping[str, ExtendedShard], rules: ShardingRules) -> Iterator[str]:
    """While extensions of a plain model are traced, the group that their mesh names exists; gives its other name.

    It communicates nothing. A process that has groups of its own keeps these, and a mesh without groups.
    """
    given = [shard.extension.given for shard in shards.values() if shard.extension.given is not None]
    if given:
        with fake_world_named(_AXIS, rules.mesh["shard"]) as name:
            for mesh in (each.mesh for each in given if name != _AXIS):
                give_world_to(mesh)
            yield name
    else:
        yield _AXIS


def name_axis(graph: fx.Graph, name: str) -> None:
    """Makes collectives that an extension has issued name the axis; edits in place.

    Args:
        graph: a joint graph.
        name: of the group of :func:`group_for_extensions`.
    """
    for node in filter(is_collective, graph.nodes):
        if group_name(node) == name:
            set_group_name(node, _AXIS)


def carrier_of(shard: ExtendedShard, requires_grad: bool) -> nn.Parameter:
    """A parameter with shape and dtype of a padded shard and no memory, on the CPU, in the fake mode that is on."""
    value = torch.empty(1, dtype=shard.dtype, device="cpu").expand(shard.extension.shape)
    return nn.Parameter(value, requires_grad=requires_grad)


def read_extended(
    model: nn.Module, shards: Mapping[str, ExtendedShard], rules: ShardingRules, mode: FakeTensorMode
) -> dict[str, HeldShard]:
    """Makes a fake copy of a model read these parameters through their gathers.

    Args:
        model: the copy; its parameters of these names are carriers.
        shards: by path.
        rules: give the arguments of the gathers.
        mode: the fake mode of the copy.
    """
    held: dict[str, HeldShard] = {}
    handles: dict[str, Tensor] = {}
    reads: dict[int, tuple[Callable[..., Tensor], nn.Module]] = {}
    for path, shard in shards.items():
        carrier = model.get_parameter(path)
        with mode:
            inner = tuple(shard.extension.like_inner(shard.local, "cpu"))
            call = rules.call_of(path, shard.shape, shard.dtype.is_floating_point)
            if call.unit not in handles:
                handles[call.unit] = torch.empty(0, dtype=torch.int8, device="cpu")
        held[path] = HeldShard(call=call, carrier=carrier, inner=inner)
        reads[id(carrier)] = (_read(shard, call), _tensors(carrier, handles[call.unit], inner))
    for part in list(model.modules()):
        names = [name for name, param in part._parameters.items() if id(param) in reads]
        if names:
            _show(part, {name: reads[id(part._parameters.pop(name))] for name in names})
    return held


def _tensors(carrier: nn.Parameter, handle: Tensor, inner: Sequence[Tensor]) -> nn.Module:
    module = nn.Module()
    module.carrier = carrier
    for name, value in (("handle", handle), *((f"inner_{index}", each) for index, each in enumerate(inner))):
        module.register_buffer(name, value)
    return module


def _read(shard: ExtendedShard, call: UnshardCall) -> Callable[..., Tensor]:
    """A function that Dynamo writes into its graph: from carrier, handle and what a shard holds to the parameter."""
    extension, arguments = shard.extension, tuple(call[2:])

    @torch.compiler.allow_in_graph
    def read(carrier: Tensor, handle: Tensor, *inner: Tensor) -> Tensor:
        full: Tensor = GatherExtended.apply(extension, arguments, carrier, handle, *inner)
        return full

    setattr(read, _READ_OF, call.name)
    return read


def _show(module: nn.Module, reads: Mapping[str, tuple[Callable[..., Tensor], nn.Module]]) -> None:
    """Gives a module a class in which these names are properties."""
    module.__dict__[_READS] = {name: read for name, (read, _) in reads.items()}
    module.add_module(_SHARDS, nn.ModuleDict({name: tensors for name, (_, tensors) in reads.items()}))
    kind = type(module)
    shown = {name: property(partial(_value, name=name)) for name in reads}
    module.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **shown})


def _value(module: nn.Module, name: str) -> Tensor:
    shard = getattr(module, _SHARDS)[name]
    full: Tensor = module.__dict__[_READS][name](shard.carrier, *shard.buffers())
    return full


def merge_reads(gm: fx.GraphModule) -> None:
    """Makes a graph of Dynamo read each parameter once; edits in place. A checkpointed region reads its own."""
    for part in gm.modules():
        if isinstance(part, fx.GraphModule):
            first: dict[Any, fx.Node] = {}
            for node in list(part.graph.nodes):
                if node.op == "call_function" and hasattr(node.target, _READ_OF):
                    read = first.setdefault(node.target, node)
                    if read is not node:
                        node.replace_all_uses_with(read)
                        part.graph.erase_node(node)
            part.recompile()


def inputs_of_held(
    primals: Sequence[fx.Node], traced: fx.GraphModule, held: Mapping[str, HeldShard]
) -> tuple[ExtendedInputs, ...]:
    """The inputs of a joint graph that stand for shards with extensions.

    Args:
        primals: the inputs of the joint graph.
        traced: the graph of Dynamo.
        held: the parameters; those that nothing reads are left out.
    """
    names = {id(tensor_of_input(node, traced)): node.name for node in primals}
    return tuple(
        ExtendedInputs(
            name=shard.call.name,
            shape=tuple(shard.call.shape),
            carrier=names[id(shard.carrier)],
            inner=tuple(names[id(value)] for value in shard.inner if id(value) in names),
        )
        for shard in held.values()
        if id(shard.carrier) in names
    )


def with_saved_parts(context: PassContext, forward: fx.GraphModule) -> PassContext:
    """The context, where the values that a forward half saves and makes of shards alone count as held too."""
    saved: dict[str, list[str]] = {}
    for value in output_values(forward.graph) if context.held else ():
        behind = parts_behind(value, context) if isinstance(value, fx.Node) else []
        if len(behind) == 1 and value.op != "placeholder":
            saved.setdefault(behind[0].name, []).append(value.name)
    parameters = (replace(each, held=(*each.held, *saved.get(each.name, ()))) for each in context.parameters)
    return replace(context, parameters=tuple(parameters)) if saved else context
