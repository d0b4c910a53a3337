"""What a forward reads of a parameter: the full tensor, gathered where it is read.

Dynamo traces :func:`read_parameter` to one node. A function given to an operator such as ``torch.cond`` runs on one
rank only, perhaps, so it cannot gather: what it reads is gathered at the begin of the forward.

A parameter with a gather extension (:mod:`~graphshard.fsdp.state.gather_extensions`) is read by a function of its own,
which the backend replaces by the gathers of what the shard holds (docs/decisions/0010).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._compat import get_proxy_mode, in_backward, in_recomputation, outside_transforms, transforms_active
from .._compat_frames import HALVES_ADD_UP, operator_traced, trace_again
from ..errors import ParameterStateError, UnsupportedShardingError
from ..ir import (
    REDUCE_GRAD,
    UNSHARD,
    UnshardCall,
    gradient_call,
    part_name,
    unit_state_of,
    unshard_outside_transforms,
)
from .eager_autograd import full_parameter, show_kept
from .state import (
    SLOTS,
    STORED,
    FullParameter,
    ParameterSlot,
    TracedExtension,
    Tree,
    full_after,
    is_substitute,
    local_shard,
    owner_of,
    replaced,
    stored_parameters,
    unit_of,
    version_of,
)

#: Attribute of the function of a traced read: a weak reference to the slot.
_READ_OF = "_graphshard_read_of"


def read_parameter(module: nn.Module, name: str) -> torch.Tensor | None:
    """The value of ``module.<name>``: in a forward the full tensor, else the sharded parameter.

    A checkpointed region that runs again in a backward counts as a forward, also if it is not entered through the
    forward of a unit.
    """
    slot: ParameterSlot = module.__dict__[SLOTS][name]
    unit = slot.unit
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling:
        read = _read_again(module, name, slot)
        if read is not None:
            return read
    if slot.is_plain and is_compiling and slot.hidden is None and unit.tree.forwards:
        # The usual case, which is the rest of this function in few steps: Dynamo takes time for each.
        param = module.__dict__[STORED]._parameters[name]
        if isinstance(param, DTensor) and not operator_traced() and not transforms_active():
            local = param.to_local()
            if local.device.type != "meta":
                return UNSHARD(local, unit.handle, *slot.arguments)
    is_read = is_reading(unit.tree)
    if is_read and slot.untraceable and is_compiling:
        # Before Dynamo sees the parameter, whose class it may not know. It takes the error for a graph break, and runs
        # the code that reads the parameter uncompiled; with fullgraph=True it reports the error.
        raise UnsupportedShardingError(
            f"parameter {slot.name} has an all-gather extension (fsdp_pre_all_gather) that cannot be compiled: "
            f"{slot.untraceable}. Change its class, or compile without fullgraph=True, so that the module that holds "
            "it runs uncompiled, or leave it out of torch.compile (torch.compiler.disable on its forward), or store "
            "plain tensors and use MixedPrecisionPolicy(param_dtype=...)"
        )
    if not is_read and not is_compiling:
        show_kept(owner_of(slot))
    param = stored_parameters(module)[name]
    if param is None or not is_read:
        return param
    if is_substitute(param):
        return _substituted(slot, param)
    if not isinstance(slot.param, DTensor) or (slot.hidden is not None and param is not slot.shown):
        raise replaced(slot, param)
    if not is_compiling:
        with outside_transforms():
            _check_version(slot)
            try:
                full = full_parameter(slot)
            except (
                AttributeError
            ) as error:  # nn.Module would look for the attribute elsewhere, and find the shard
                raise ParameterStateError(
                    f"parameter {slot.name} cannot be gathered: AttributeError: {error}; correct the gather extension "
                    "or the custom all-gather that it comes from"
                ) from error
        if get_proxy_mode() is not None and type(full) is FullParameter:
            full.__class__ = torch.Tensor  # make_fx knows no other class
        return full
    operator = operator_traced()
    if operator:
        return _read_in_operator(slot, operator)
    if transforms_active():
        arguments = (unit.handle, *slot.arguments) if slot.needs_op else ()
        return slot.as_read(unshard_outside_transforms(slot.param, *arguments))
    if slot.is_extended:
        assert slot.traced_read is not None
        return slot.as_read(slot.traced_read(slot.param, unit.handle, *slot.arguments))
    local = local_shard(slot)
    return slot.as_read(
        UNSHARD(slot.as_sent(local), unit.handle, *slot.arguments) if slot.needs_op else local
    )


def empty_property(name: str) -> property:
    """Of a parameter that is None, such as the bias of a layer without one.

    Without it, Dynamo would look for the name in ``_parameters``, which reads all parameters, and that of torch 2.11
    would not find it there.
    """

    def read(self: nn.Module) -> Any:
        stored = stored_parameters(self)
        if name in stored:
            return stored[name]
        if name in self.__dict__:
            return self.__dict__[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def write(self: nn.Module, value: Any) -> None:
        self.__dict__[name] = value

    return property(read, write)


def empty_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the parameters of a module with sharded ones that are None."""
    if SLOTS not in module.__dict__:
        return ()
    return tuple(name for name, param in stored_parameters(module).items() if param is None)


def _read_again(module: nn.Module, name: str, slot: ParameterSlot) -> torch.Tensor | None:
    """The usual case of an uncompiled forward in few steps: what its unit has gathered; None in any other case."""
    in_use = owner_of(slot).in_use
    if in_use is None or slot.hidden is not None or slot.name not in in_use or in_backward():
        return None
    param = module.__dict__[STORED]._parameters[name]
    if type(param) is not DTensor or transforms_active() or get_proxy_mode() is not None:
        return None
    slot.version = version_of(param)
    return in_use[slot.name].shown


def _read_in_operator(slot: ParameterSlot, operator: str) -> torch.Tensor:
    """The full parameter in a function that an operator traces: the forward gathers it before the operator."""
    full = slot.unit.tree.ahead.get(slot.name)
    if full is None:
        _read_ahead_from_now_on(owner_of(slot).marker, slot.name)
        raise UnsupportedShardingError(
            f"parameter {slot.name} of unit {slot.unit.label} is read in a function given to {operator}, which takes "
            "plain tensors only, and it is a DTensor in a forward or has an all-gather extension: call the module that "
            f"holds it outside of {operator}, and choose between results with torch.where"
        )
    return full


@torch.compiler.assume_constant_result
def _read_ahead_from_now_on(marker: torch.Tensor, name: str) -> None:
    """Has forwards of the model gather a parameter at their begin; Dynamo calls it when it traces a call of it.

    Args:
        marker: of its unit.
        name: of the parameter.
    """
    unit = unit_of(marker)
    if unit is None:
        return
    slot = unit.slot_of(name)
    tree, owner = slot.unit.tree, slot.owners[0]
    if owner in tree.reads_ahead or slot.outer is not None or slot.is_extended:
        return
    tree.reads_ahead.append(owner)
    if tree.in_forward:  # it runs uncompiled
        _gather_ahead(slot)
    trace_again()


def read_ahead(tree: Tree) -> None:
    for owner, name in tree.reads_ahead:
        slot = owner.__dict__[SLOTS][name]
        if torch.compiler.is_compiling():
            tree.ahead[slot.name] = read_parameter(owner, name)
        else:
            _gather_ahead(slot)


def _gather_ahead(slot: ParameterSlot) -> None:
    full = full_parameter(slot)
    with torch.enable_grad():  # where it is read first may need no gradients
        slot.unit.tree.ahead[slot.name] = full.view_as(full)  # a plain tensor: Dynamo does not know the class


def _substituted(slot: ParameterSlot, value: torch.Tensor) -> torch.Tensor:
    """What a forward reads of a full value that ``torch.func.functional_call`` has put in a parameter's place."""
    dtype = slot.unit.settings.mp_policy.param_dtype
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def read_shard(module: nn.Module, name: str) -> Any:
    """The sharded parameter, also in a forward."""
    return stored_parameters(module)[name]


def leaves_for_half(half: str) -> Callable[[nn.Module, str], Any]:
    """Reads shards, shown or not, for a pipeline schedule that splits a backward; see ``UnitGradients.gives_zeros``.

    Args:
        half: "input" or "weight", the half that the schedule runs.

    Raises:
        UnsupportedShardingError: torch gets the gradients of such a backward wrong.
    """
    if not HALVES_ADD_UP:
        raise UnsupportedShardingError(
            f"a pipeline schedule splits the backward, and torch {torch.__version__} then adds some gradients of a "
            "unit more than once: use torch 2.13 or later, or a schedule that does not split, as "
            "ScheduleInterleaved1F1B"
        )

    def leaf(module: nn.Module, name: str) -> Any:
        slot: ParameterSlot = module.__dict__[SLOTS][name]
        owner_of(slot).gives_zeros = half == "weight"
        return slot.param

    return leaf


def is_reading(tree: Tree) -> bool:
    """Whether a forward of the model runs, or a checkpointed region runs again."""
    # Dynamo cannot trace the second question. It need not: what it traces is entered through a unit's forward.
    return tree.in_forward or (not torch.compiler.is_compiling() and in_recomputation())


def _check_version(slot: ParameterSlot) -> None:
    """Refuses a recomputation whose parameter has changed since the forward."""
    version = version_of(slot.param)
    if not in_backward():  # a region of the older kind of checkpoint runs without gradients
        slot.version = version
    elif torch.is_grad_enabled() and slot.version not in (None, version):
        raise ParameterStateError(
            f"parameter {slot.name} changed in place after the forward that a checkpointed region now runs "
            "again, so old activations would meet new weights: run backward() before optimizer.step() "
            "or load_state_dict()"
        )


class GatherExtended(torch.autograd.Function):
    """From the tensors of a shard to the full parameter; backward: the reduction of its gradient.

    ``carrier`` takes the gradient. It has shape and dtype of the shard, and its values are not read.
    """

    @staticmethod
    def forward(
        ctx: Any,
        extension: TracedExtension,
        arguments: tuple[Any, ...],
        carrier: Tensor,
        handle: Tensor,
        *inner: Tensor,
    ) -> Tensor:
        call = UnshardCall(extension.rebuilt(inner), handle, *arguments)
        calls, metadata = extension.calls(call)
        parts = []
        for index, each in enumerate(calls):
            parts.append(UNSHARD(*each._replace(name=part_name(call.name, index))))
        full = full_after(call.shard, parts, metadata, call)
        ctx.save_for_backward(handle)
        plain = call._replace(shard=None, handle=None)
        ctx.call = gradient_call(plain, None, carrier.shape, carrier.dtype, carrier.device)
        return full

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (handle,) = ctx.saved_tensors
        call = ctx.call.with_gradient(grad, handle)
        state = unit_state_of(handle)
        reduced = REDUCE_GRAD(*call) if state is None else state.reduce([call])[0]
        return (None, None, reduced, None, *[None] * (len(ctx.needs_input_grad) - 4))


def traced_read(slot: ParameterSlot) -> Callable[..., Tensor]:
    """A function that Dynamo writes into its graph: from a sharded parameter, handle and arguments to the full one.

    The arguments are those of ``graphshard::unshard`` after the shard. :func:`slot_of_read` gives the slot back.
    """
    held = ref(slot)

    @torch.compiler.allow_in_graph
    def read_extended(param: DTensor, handle: Tensor, *arguments: Any) -> Tensor:
        local = param.to_local()
        extension = TracedExtension.of(_alive(held), local)
        full: Tensor = GatherExtended.apply(extension, arguments, local, handle, *extension.inner(local))
        return full

    setattr(read_extended, _READ_OF, held)
    return read_extended


def slot_of_read(target: Any) -> ParameterSlot | None:
    """The parameter that a call of this target in a graph reads; None for another target than of a traced read."""
    held = getattr(target, _READ_OF, None)
    return _alive(held) if held is not None else None


def _alive(held: ref[ParameterSlot]) -> ParameterSlot:
    slot = held()
    assert slot is not None, "a graph is traced while its model is alive"
    return slot
