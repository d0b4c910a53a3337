"""One sharded parameter: the modules that hold it, and what its gathers are traced with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..._compat import storage_id
from ...errors import ParameterStateError
from ...ir import NO_AXIS, MeshAxis, ReduceGradCall, UnshardCall, axis_of, gradient_call
from .placements import OuterLayout
from .shard_versions import Version, note_gradient, refuse_lost_data
from .stand_ins import KeptParameter, StandsForShard, lost_gradients, lost_writes, stand_for
from .tree import SLOTS, STORED, TreeUnit

#: Attribute of a whole parameter that ``FullyShardedDataParallel.summon_full_params`` shows; a forward reads it as is.
SUMMONED = "_graphshard_summoned"

#: Attribute by which ``torch.distributed.optim._apply_optimizer_in_backward`` gives a parameter its optimizers.
_OPTIMIZERS = "_in_backward_optimizers"

#: Attribute of a shard: a :class:`_Link` to its slot.
_SLOT = "_graphshard_slot"


@dataclass(eq=False, kw_only=True)
class ParameterSlot:
    """One sharded parameter.

    Attributes:
        unit: the unit that gathers and reduces it.
        name: its name as seen from the outermost module.
        shape: shape of the gathered tensor: the whole parameter, or this rank's piece of a DTensor.
        dim: the dim that is cut.
        axis, replicate: the axis over which it is cut, and the axis over which shards are copied.
        outer: layout of the DTensor that it is while gathered (tensor or expert parallelism); None for a plain tensor.
        owners: the modules that hold it, with its name in each; several if it is tied.
        arguments: the arguments after shard and handle in a call of ``graphshard::unshard``; Dynamo guards on them.
        needs_op: a forward reads the result of ``graphshard::unshard``; if False, the shard itself.
        is_plain: that result is the full parameter, and nothing is asked of the shard but its values.
        hidden: the sharded parameter while the owners show the gathered one; else None.
        shown: the gathered parameter that they show then.
        shown_state: its version and storage when they began to.
        version: its version when an uncompiled forward last read it.
        is_extended: the shard is a tensor subclass with a gather extension.
        untraceable: why that extension cannot be compiled; "" if it can.
        traced_read: what Dynamo calls to read it if it is extended (:mod:`graphshard.fsdp.state.gather_extensions`).
        is_complex: it is complex; it travels as reals, with a last dim of 2, and so does its gradient.
        row_offset: first element of the shard in the unit's row; see ``UnshardCall``.
        bucket: what gathers that begin with this parameter keep for the next one (``plain_gathers``).
    """

    unit: TreeUnit
    name: str
    shape: torch.Size
    dim: int
    axis: MeshAxis
    replicate: MeshAxis = NO_AXIS
    outer: OuterLayout | None = None
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    arguments: tuple[Any, ...] = ()
    needs_op: bool = True
    is_plain: bool = False
    hidden: nn.Parameter | None = None
    shown: nn.Parameter | None = None
    shown_state: tuple[int, int] = (0, 0)
    version: Version | None = None
    is_extended: bool = False
    untraceable: str = ""
    traced_read: Callable[..., Tensor] | None = None
    is_complex: bool = False
    row_offset: int = -1
    bucket: object = None
    _reduction: tuple[torch.Size, torch.dtype, torch.device, ReduceGradCall] | None = None

    @property
    def other_axes(self) -> tuple[MeshAxis, ...]:
        """The axes of tensor or expert parallelism that the parameter lies on."""
        if self.outer is None:
            return ()
        return tuple(axis_of(self.outer.mesh, dim) for dim in range(self.outer.mesh.ndim))

    @property
    def param(self) -> nn.Parameter:
        """The sharded parameter."""
        if self.hidden is not None:
            return self.hidden
        owner, name = self.owners[0]
        stored = owner.__dict__[STORED]  # stored_parameters(), without the call: this runs often
        param: nn.Parameter = stored._parameters[name]
        return param

    @property
    def global_shape(self) -> torch.Size:
        """Shape of the whole parameter over all ranks."""
        return self.shape if self.outer is None else self.outer.shape

    def as_read(self, piece: Tensor) -> Tensor:
        """The value that a forward reads: the gathered tensor, or the DTensor around it."""
        piece = self.as_held(piece)
        return piece if self.outer is None else self.outer.wrap(piece)

    def as_held(self, piece: Tensor) -> Tensor:
        """The gathered tensor: of a complex parameter, complex numbers again."""
        return torch.view_as_complex(piece) if self.is_complex and not piece.is_complex() else piece

    def as_sent(self, local: Tensor) -> Tensor:
        """The argument ``shard`` of the shard ops, from this rank's piece."""
        return torch.view_as_real(local) if self.is_complex else local

    def reduction_of(self, local: Tensor) -> ReduceGradCall:
        """The reduction of a gradient of the shard ``local``, without gradient and handle."""
        known = self._reduction
        if known is None or local.shape != known[0] or local.dtype != known[1] or local.device != known[2]:
            sent = self.as_sent(local)
            call = UnshardCall(None, None, *self.arguments)
            made = gradient_call(call, None, sent.shape, sent.dtype, sent.device)
            known = self._reduction = (local.shape, local.dtype, local.device, made)
        return known[3]

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterSlot:
        """The slot of a copied parameter; the copied modules are added to ``owners`` later."""
        return replace(
            self, unit=copy.deepcopy(self.unit, memo), owners=[], hidden=None, shown=None, bucket=None
        )

    def refresh(self) -> None:
        """Rebuilds ``arguments``; call it after the name, the unit's label or a setting has changed."""
        unit, settings = self.unit, self.unit.settings
        policy = settings.mp_policy
        is_float = self.param.dtype.is_floating_point
        self.is_complex = self.param.is_complex() and not self.is_extended
        ranks = unit.reshard_ranks(self.axis.size)
        call = UnshardCall(
            shard=None,
            handle=None,
            name=self.name,
            unit=unit.label,
            shape=[*self.shape, 2] if self.is_complex else list(self.shape),
            dim=self.dim,
            dtype=policy.param_dtype if is_float else None,
            reshard=ranks,
            reshard_group=settings.regather.group_name if 1 < ranks < self.axis.size else "",
            axis=self.axis.label,
            group_size=self.axis.size,
            group_name=self.axis.group_name,
            replicate_axis=self.replicate.label,
            replicate_size=self.replicate.size,
            replicate_group=self.replicate.group_name,
            reduce_dtype=policy.reduce_dtype,
            divide_factor=settings.divide_factor,
            force_sum=settings.force_sum,
            device=settings.compute_device,
            reduce_group=settings.reduce_group,
            custom=settings.comms.names(),
            forward_prefetch=_labels(unit.forward_prefetch),
            backward_prefetch=_labels(unit.backward_prefetch),
            max_reductions=unit.tree.max_reductions,
            reshard_fixed=settings.reshard_after_forward is not None,
            row_offset=self.row_offset,
        )
        self.arguments = tuple(call[2:])
        self._reduction = None
        is_alone = self.axis.size == 1 and self.replicate.size == 1
        self.needs_op = (
            not is_alone
            or self.is_extended
            or any(
                setting is not None
                for setting in (call.dtype, call.reduce_dtype, call.divide_factor, call.device)
            )
        )
        is_special = self.is_extended or self.is_complex or self.outer is not None
        self.is_plain = self.needs_op and not is_special and settings.compute_device is None

    def replace(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        """Replaces the parameter in all modules that share it; None removes it from ``module`` only."""
        self.unit.reshard()
        for owner, each in self.owners if param is not None else [(module, name)]:
            stored_parameters(owner)[each] = param

    @property
    def valid_shown(self) -> nn.Parameter | None:
        """What the owners show, if the shard has not changed or been frozen since; else None."""
        shown = self.shown
        if shown is None or self.unit.gathered_value(self.name) is None:
            return None
        return shown if shown.requires_grad == self.param.requires_grad else None

    @property
    def is_shown_changed(self) -> bool:
        """Whether what the owners show was changed in place, or something was assigned to its ``.data``."""
        return self.shown is not None and _state_of(self.shown) != self.shown_state

    @property
    def is_substituted(self) -> bool:
        """Whether ``torch.func.functional_call`` has put another value in the parameter's place."""
        if self.hidden is None and len(self.owners) == 1:  # the usual case, in few steps
            return type(self.param) is not DTensor and is_substitute(self.param)
        entries = [stored_parameters(owner)[name] for owner, name in self.owners]
        if self.hidden is not None:
            return any(entry is not self.shown for entry in entries)
        return any(map(is_substitute, entries))

    def show(self, full: Tensor, *, stands_for_shard: bool = False) -> None:
        """Makes the owners show the gathered parameter instead of the shard.

        Args:
            full: the gathered tensor, whose gradient autograd takes to the shard.
            stands_for_shard: a forward has read another tensor, of which this one shows the values.
        """
        if self.hidden is None:
            self.hidden = self.param
        self.shown = _as_parameter(self.as_read(full))
        if stands_for_shard:
            stand_for(self.shown, self.param, self.name)
        self.shown_state = _state_of(self.shown)
        for owner, name in self.owners:
            stored_parameters(owner)[name] = self.shown

    def add_gradient(self, reduced: Tensor) -> None:
        """Adds the reduced gradient of the shard to ``.grad``, and calls the parameter's hooks."""
        param = self.param
        reduced = as_complex(reduced) if self.is_complex else reduced
        grad = DTensor(reduced, param._spec, requires_grad=False)
        for hook in (param._backward_hooks or {}).values():
            changed = hook(grad)
            grad = grad if changed is None else changed
        add_to_grad(param, grad)
        for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(param)

    def fill_gradient(self) -> None:
        """Makes ``.grad`` zeros if it is None."""
        if self.param.grad is None:
            self.param.grad = torch.zeros_like(self.param)

    def finish_gradient(self, *, steps_optimizers: bool) -> None:
        """Called once a backward of the model has ended, and what waits is reduced.

        Args:
            steps_optimizers: step the optimizers that ``_apply_optimizer_in_backward`` has made for the parameter; from
                now on as soon as its gradient is there.
        """
        owner, name = self.owners[0]
        param = self.hidden if self.hidden is not None else stored_parameters(owner).get(name)
        if param is None or param.grad is None:
            return
        if steps_optimizers and hasattr(param, _OPTIMIZERS):
            step_in_backward(param)
            param.register_post_accumulate_grad_hook(step_in_backward)
        else:
            note_gradient(param.grad, self.name)

    def hide(self) -> None:
        """Makes the owners show the shard again; while the parameter is substituted, it stays as it is."""
        if self.hidden is not None and not self.is_substituted:
            for owner, name in self.owners:
                stored_parameters(owner)[name] = self.hidden
            self.hidden = self.shown = None


def add_to_grad(param: Tensor, grad: Tensor) -> None:
    """Accumulates a gradient in ``.grad``, in place if there is one; of two DTensors alike without their dispatch."""
    present, dtype = param.grad, param.grad_dtype
    if dtype is not None and dtype != grad.dtype:
        grad = grad.to(dtype)
    if present is None:
        param.grad = grad
        return
    with torch.no_grad():
        if type(present) is type(grad) is DTensor and present._spec == grad._spec:
            present._local_tensor.add_(grad._local_tensor)
        else:
            present += grad


def step_in_backward(param: Tensor) -> None:
    """Steps the optimizers that ``_apply_optimizer_in_backward`` has made for a parameter, and drops its gradient."""
    if param.grad is not None:
        for optimizer in getattr(param, _OPTIMIZERS):
            optimizer.step()
        param.grad = None


class _Link:
    """Leads from a shard to its slot. Copied or saved with a shard it becomes an empty set, which torch.load takes."""

    def __init__(self, slot: ParameterSlot) -> None:
        self.slot = ref(slot)

    def __reduce__(self) -> tuple[type[set[None]], tuple[()]]:
        return set, ()


def link_shard(slot: ParameterSlot) -> None:
    """Lets :func:`slot_of_shard` find the slot."""
    vars(slot.param)[_SLOT] = _Link(slot)


def slot_of_shard(param: DTensor) -> ParameterSlot | None:
    """The slot of a sharded parameter that its model shows; None for another tensor."""
    link = vars(param).get(_SLOT)
    slot = link.slot() if isinstance(link, _Link) else None
    if slot is None or not any(stored_parameters(owner).get(name) is param for owner, name in slot.owners):
        return None
    return slot


def local_shard(slot: ParameterSlot) -> Tensor:
    """This rank's piece of a parameter.

    Raises:
        ParameterStateError: the parameter was replaced by a plain tensor, ``.data`` was assigned to, it is on the meta
            device, or it is offloaded and not on the CPU.
    """
    param = slot.param
    if not isinstance(param, DTensor):
        raise replaced(slot, param)
    if not torch.compiler.is_compiling():
        refuse_lost_data(param, slot.name)
    return _checked(slot, param.to_local())


def shard_data(slot: ParameterSlot) -> Tensor:
    """:func:`local_shard` without autograd, for code that is not traced."""
    param = slot.param
    if not isinstance(param, DTensor):
        raise replaced(slot, param)
    refuse_lost_data(param, slot.name)
    return _checked(slot, param._local_tensor)


def _checked(slot: ParameterSlot, local: Tensor) -> Tensor:
    if slot.unit.settings.compute_device is not None and local.device.type not in ("cpu", "meta"):
        found = [
            f"({each.name}, {each.param.to_local().device})"
            for unit in slot.unit.tree.units()
            for each in unit.slots
            if unit.compute_device is not None and each.param.to_local().device.type != "cpu"
        ]
        raise ParameterStateError(
            f"with CPUOffloadPolicy parameters stay on the CPU, but these do not: {', '.join(found)}; load them "
            'there, or call model.to_empty(device="cpu") and initialise them'
        )
    if local.device.type == "meta":
        modules = [module for root in slot.unit.tree.roots for module in root.modules()]
        slots = [each for module in modules for _, each in slots_of(module)]
        names = list(dict.fromkeys(each.name for each in slots if each.param.is_meta))
        raise ParameterStateError(
            f"{len(names)} parameter(s) are still on the meta device: {', '.join(names)}; "
            "call model.to_empty(device=...) and initialise them before the first forward"
        )
    return local


def is_substitute(value: Tensor | None) -> bool:
    """Whether an entry of ``_parameters`` is a full value: of ``torch.func.functional_call``, or a summoned parameter.

    All other entries are parameters, or shards.
    """
    if value is None or isinstance(value, DTensor):
        return False
    return not isinstance(value, nn.Parameter) or hasattr(value, SUMMONED)


def _as_parameter(value: Tensor) -> nn.Parameter:
    """An ``nn.Parameter`` that shares the memory of ``value``; unlike a new one, it keeps the autograd graph."""
    if not value.requires_grad:
        return nn.Parameter(value.detach(), requires_grad=False)
    if type(value) is Tensor:
        return value.as_subclass(nn.Parameter)
    value._is_param = True  # how torch itself makes parameters of other subclasses
    return value


def replaced(slot: ParameterSlot, value: Tensor) -> ParameterStateError:
    """The error for a parameter in whose place stands something else."""
    return ParameterStateError(
        f"parameter {slot.name} was replaced by a {type(value).__name__} of shape {tuple(value.shape)}; "
        "a sharded parameter must stay a DTensor: use distribute_tensor() on the new value. Values for "
        "torch.func.functional_call must be tensors that are no nn.Parameter"
    )


def _state_of(shown: Tensor) -> tuple[int, int]:
    local = shown._local_tensor if isinstance(shown, DTensor) else shown
    has_memory = type(local) in (Tensor, nn.Parameter, KeptParameter)  # a tensor subclass may have none
    return shown._version, storage_id(local) if has_memory else 0


def refuse_kept(slots: Sequence[ParameterSlot]) -> ParameterStateError | None:
    """What was done to parameters that modules show between a forward and its backward, and would be lost."""
    written = [slot.name for slot in slots if slot.is_shown_changed]
    if written:
        return lost_writes(written)
    asked = [
        slot.name for slot in slots if isinstance(slot.shown, StandsForShard) and slot.shown.is_asked_for
    ]
    return lost_gradients(asked) if asked else None


def store_parameters(module: nn.Module) -> None:
    """Prepares a module to hold sharded parameters, for :func:`stored_parameters`."""
    if STORED not in module.__dict__:
        module.__dict__[STORED] = nn.Module()
        module.__dict__[STORED].__dict__["_parameters"] = module.__dict__["_parameters"]


def stored_parameters(module: nn.Module) -> dict[str, Any]:
    """The dict of parameters that a module with sharded ones holds: the shards, or what ``unshard()`` shows.

    ``module._parameters`` is a property, which gathers in a forward. Dynamo takes for parameters what it finds in the
    attribute of this name of a module, so another module has the same dict as its attribute.
    """
    return module.__dict__[STORED]._parameters


def as_complex(reals: Tensor) -> Tensor:
    """A tensor with a last dim of 2 as complex numbers; a copy where its place in memory does not allow a view."""
    return torch.view_as_complex(even_offset(reals.contiguous()))


def even_offset(reals: Tensor) -> Tensor:
    """``reals``, copied if an odd number of elements lies before it in its storage: complex views need an even one."""
    return reals.clone() if reals.storage_offset() % 2 else reals


def slots_of(module: nn.Module) -> Iterator[tuple[str, ParameterSlot]]:
    """The sharded parameters that a module itself holds, by attribute name."""
    yield from module.__dict__.get(SLOTS, {}).items()


def _labels(units: Sequence[TreeUnit]) -> str:
    return ",".join(unit.label for unit in units)
