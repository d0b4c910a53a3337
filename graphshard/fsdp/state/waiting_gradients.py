"""The gradients of a unit that wait for a reduction, and the reduction of an uncompiled unit.

Autograd visits the leaf of each shard that a gather has read. It calls the leaf's hooks also if the gather gives no
gradient, because that waits for a reduction or the forward has not used the parameter. Hooks of a module that is not
sharded are not called then. So :func:`expect_no_gradient` puts a function in the place of each hook that asks first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...errors import UnsupportedShardingError
from ...ir import ReduceGradCall, UnshardCall, gradient_call, parameter_of
from .eager_collectives import are_started_here, reduce_together
from .parameter_slot import ParameterSlot, shard_data, stored_parameters
from .tree import REDUCE, ROOT, SLOTS, Tree

_REDUCE_REMEDY = (
    "Parameters without a gradient on some ranks need set_reduce_scatter_unused_params(True) on their module"
)

#: Attribute of a parameter: its gradient, and the version of that, when a backward had none for it.
_BEFORE = "_graphshard_gradient_before"


@dataclass(eq=False, kw_only=True)
class WaitingGradients:
    """Gradients by parameter name, in the dtype of the reduction.

    Attributes:
        unreduced: full gradients of this rank, the sum over micro-batches.
        partial: this rank's padded pieces, summed over the shard axis but not over the replicate axis.
    """

    unreduced: dict[str, Tensor] = field(default_factory=dict)
    partial: dict[str, Tensor] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.unreduced or self.partial)

    def tensors(self) -> Iterator[Tensor]:
        """All gradients that wait."""
        yield from self.unreduced.values()
        yield from self.partial.values()

    def add_unreduced(self, name: str, grad: Tensor) -> None:
        """Adds a full gradient."""
        _add(self.unreduced, name, grad)

    def add_partial(self, name: str, grad: Tensor) -> None:
        """Adds a piece that was reduce-scattered and not all-reduced."""
        _add(self.partial, name, grad)

    def call_of(self, slot: ParameterSlot) -> ReduceGradCall:
        """The reduction of a full gradient that waits, which waits no longer; of zeros, if none does."""
        local = slot.as_sent(shard_data(slot))
        call = UnshardCall(local, slot.unit.handle, *slot.arguments)
        grad = self.unreduced.pop(slot.name, None)
        if grad is None:
            dtype = call.reduce_dtype or call.dtype or local.dtype
            grad = torch.zeros(call.shape, dtype=dtype, device=call.device or local.device)
        return gradient_call(call, grad, local.shape, local.dtype, local.device)

    def clear(self) -> None:
        """Drops all gradients."""
        self.unreduced.clear()
        self.partial.clear()

    def reduce(
        self, calls: list[ReduceGradCall], *, tree: Tree, unit: str, all_reduce: bool
    ) -> list[Tensor | None]:
        """Reduces gradients together with those that wait, after the ranks have met.

        Args:
            calls: the gradients, on real tensors. They are taken out of the list.
            tree: the units of the model.
            unit: label of the unit.
            all_reduce: also sum over the replicate axis.

        Returns:
            The gradient of each shard; None for those that wait for the all-reduce from now on.
        """
        for index, call in enumerate(calls):
            is_reduced = all_reduce or call.replicate_size == 1
            if self or call.all_reduce != is_reduced:
                calls[index] = call._replace(
                    unreduced=self.unreduced.pop(call.name, None),
                    partial=self.partial.pop(call.name, None) if call.replicate_size > 1 else None,
                    all_reduce=is_reduced,
                )
            del call
        names = [call.name for call in calls]
        can_skip = all(are_started_here(call, call.grad) for call in calls)
        for group_name in _groups_of(calls):
            tree.come(group_name, REDUCE, unit, names, _REDUCE_REMEDY, can_skip=can_skip)
        result: list[Tensor | None] = []
        for call, reduced in zip(calls, reduce_together(calls), strict=True):
            if call.all_reduce:
                result.append(reduced)
            else:
                self.add_partial(call.name, reduced)
                result.append(None)
        return result


@dataclass(eq=False, kw_only=True)
class UnitGradients:
    """The part of a unit that reduces gradients, or has them wait; see :class:`graphshard.fsdp.state.unit.Unit`.

    Attributes:
        steps_optimizers: backwards step the optimizers that ``_apply_optimizer_in_backward`` has made, as FSDP1's do.
        gives_zeros: a pipeline schedule asks ``torch.autograd.grad`` for the gradients of shards, which must return
            some: it gives zeros for a gradient that waits for the reduction at the end of the schedule.
        owes_reduction: the running backward has added up gradients that it reduces once it leaves the unit.
        graphs: the nodes by which uncompiled forwards read the unit's parameters, in graphs that autograd still holds.
    """

    tree: Tree
    label: str = ROOT
    slots: list[ParameterSlot] = field(default_factory=list)
    reduce_grads: bool = True
    all_reduce_grads: bool = True
    reduces_unused: bool = False
    steps_optimizers: bool = False
    gives_zeros: bool = False
    owes_reduction: bool = False
    gradients: WaitingGradients = field(default_factory=WaitingGradients)
    graphs: WeakSet[Any] = field(default_factory=WeakSet)
    _has_run: bool = False

    @property
    def unreduced(self) -> dict[str, Tensor]:
        """Full gradients that wait, by parameter name."""
        return self.gradients.unreduced

    @property
    def partial(self) -> dict[str, Tensor]:
        """Reduce-scattered gradients that wait, by parameter name."""
        return self.gradients.partial

    @property
    def is_waiting(self) -> bool:
        """Whether gradients of the unit wait for a reduction."""
        return bool(self.gradients)

    def mark_run(self) -> None:
        """Notes that a forward with gradients has run: the unit takes part in the reductions of its backward."""
        self._has_run = True

    def drop_gradients(self) -> None:
        """Forgets gradients that wait, and that a forward has run."""
        self.gradients.clear()
        self._has_run = self.owes_reduction = self.gives_zeros = False

    def drop_gradient(self, name: str) -> None:
        """Forgets the gradient of a parameter that waits for a reduction."""
        self.gradients.unreduced.pop(name, None)
        self.gradients.partial.pop(name, None)

    def finish_gradients(self) -> None:
        """Notes the gradients that shards have at the end of a backward, or steps the optimizers of parameters."""
        for slot in self.slots:
            slot.finish_gradient(steps_optimizers=self.steps_optimizers)

    def slot_of(self, name: str) -> ParameterSlot:
        """The slot of the parameter of this name, or of a part of it."""
        return next(slot for slot in self.slots if slot.name == parameter_of(name))

    def add_unreduced(self, name: str, grad: Tensor) -> None:
        """Adds a full gradient to those that wait for a reduction."""
        self.gradients.add_unreduced(name, grad)
        self.tree.waiting = True

    def add_partial(self, name: str, grad: Tensor) -> None:
        """Adds a reduce-scattered gradient to those that wait for an all-reduce."""
        self.gradients.add_partial(name, grad)
        self.tree.waiting = True

    def take_unreduced(self, name: str) -> Tensor | None:
        """The full gradient of a parameter that waits, which the next reduction takes along; None without one."""
        if not self.reduce_grads or self.reduces_unused:
            return None
        return self.gradients.unreduced.pop(name, None)

    def reduce(self, calls: list[ReduceGradCall], *, waits: bool = False) -> list[Tensor | None]:
        """Reduces gradients in an uncompiled backward, and takes them out of the list; None for each that waits.

        Args:
            calls: the gradients.
            waits: all wait for a later reduction in this backward.
        """
        self.tree.queue_end_of_backward()
        if self.reduce_grads and not self.reduces_unused and not waits:
            return self._reduce_now(calls)
        for call in calls:
            self.add_unreduced(call.name, call.grad.to(call.reduce_dtype or call.grad.dtype, copy=True))
        return [None] * len(calls)

    def reduce_unplanned(self, call: ReduceGradCall) -> Tensor:
        """Reduces one gradient in a graph of another compiler.

        Returns:
            The gradient of the shard; zeros if it waits, because a graph cannot return "no gradient".

        Raises:
            UnsupportedShardingError: it waits, and a hook of the parameter would get the zeros.
        """
        waits = not self.reduce_grads or self.reduces_unused
        waits |= call.replicate_size > 1 and not self.all_reduce_grads
        if waits and getattr(self.slot_of(call.name).param, "_post_accumulate_grad_hooks", None):
            refuse_early_hook(call.name)
        (reduced,) = self.reduce([call])
        if reduced is not None:
            return reduced
        return torch.zeros(call.shard_shape, dtype=call.dtype, device=call.device or call.grad.device)

    def warn_unplanned(self) -> None:
        """Warns, once for each model, that another compiler runs its gathers and reductions one by one."""
        self.tree.warn_unplanned()

    def _reduce_now(self, calls: list[ReduceGradCall]) -> list[Tensor | None]:
        result = self.gradients.reduce(
            calls, tree=self.tree, unit=self.label, all_reduce=self.all_reduce_grads
        )
        self.tree.waiting |= any(reduced is None for reduced in result)
        return result

    def reduce_left_over(self) -> None:
        """Reduces gradients that wait, and zeros for unused parameters, at the end of a backward."""
        self.owes_reduction = self.gives_zeros = False
        if not self.reduce_grads:
            return
        waiting = set(self.unreduced) | (set(self.partial) if self.all_reduce_grads else set())
        if self.reduces_unused:
            trainable = [slot for slot in self.slots if slot.param.requires_grad]
            if self._has_run:
                waiting.update(slot.name for slot in trainable)
            else:
                for slot in trainable:
                    if slot.name not in waiting:
                        slot.fill_gradient()
            self._has_run = False
        slots = [slot for slot in self.slots if slot.name in waiting]
        calls = [self.gradients.call_of(slot) for slot in slots]
        for slot, reduced in zip(slots, self._reduce_now(calls) if calls else (), strict=True):
            if reduced is not None:
                slot.add_gradient(reduced)


def zero_gradients(module: nn.Module, set_to_none: bool) -> None:
    """``nn.Module.zero_grad``, on the shards: also of parameters that are shown gathered.

    Gradients that wait for a reduction are dropped.
    """
    for each in module.modules():
        slots = each.__dict__.get(SLOTS, {})
        for name, stored in (stored_parameters(each) if slots else each._parameters).items():
            param, slot = stored, slots.get(name)
            if slot is not None:
                param = slot.param if stored is slot.shown else stored
                if slot.unit.is_waiting:
                    slot.unit.drop_gradient(slot.name)
            if param is None:
                continue
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.requires_grad_(False).zero_()


class GradientReductionHandle:
    """The result of ``finalize_backward(async_op=True)``."""

    def wait(self) -> None:
        """Does nothing: the gradients are reduced."""


def refuse_early_hook(name: str) -> NoReturn:
    """Refuses a post-accumulate-grad hook that a graph would call before the gradient is reduced."""
    raise UnsupportedShardingError(
        f"parameter {name} has a post-accumulate-grad hook, and its gradient waits for a reduction: a "
        "compiler other than graphshard would call the hook without a gradient; use "
        'torch.compile(backend="graphshard"), or leave the gradient sync on and '
        "set_reduce_scatter_unused_params off"
    )


def _add(grads: dict[str, Tensor], name: str, grad: Tensor) -> None:
    if name in grads:
        grads[name].add_(grad)
    else:
        grads[name] = grad


def _groups_of(calls: Sequence[ReduceGradCall]) -> list[str]:
    """The process groups that reductions run on."""
    groups = [call.group_name for call in calls if call.group_size > 1]
    groups += [call.replicate_group for call in calls if call.replicate_size > 1 and call.all_reduce]
    return list(dict.fromkeys(groups))


class HookOfGradient:
    """A hook of ``Tensor.register_hook`` that is called with gradients, and not with None."""

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        self._hook = hook

    def __call__(self, grad: Tensor | None) -> Any:
        """Calls the hook, if there is a gradient."""
        return None if grad is None else self._hook(grad)


class _HookOfAddition:
    """A hook of ``register_post_accumulate_grad_hook`` that is called only if a gradient was added."""

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        self._hook = hook

    def __call__(self, param: Tensor) -> None:
        before = vars(param).get(_BEFORE)
        if before is not None:
            grad, version = before
            if param.grad is grad() and _version_of(param.grad) == version:
                return
            del vars(param)[_BEFORE]
        self._hook(param)


def expect_no_gradient(param: Tensor) -> None:
    """Keeps the hooks of a leaf from being called in the running backward, unless it gets a gradient from elsewhere."""
    hooks: Any = param._backward_hooks
    for key, hook in (hooks or {}).items():
        if type(hook) is not HookOfGradient:
            hooks[key] = HookOfGradient(hook)
    hooks = getattr(param, "_post_accumulate_grad_hooks", None)
    for key, hook in (hooks or {}).items():
        if type(hook) is not _HookOfAddition:
            hooks[key] = _HookOfAddition(hook)
    if hooks:
        grad = param.grad
        vars(param)[_BEFORE] = (ref(grad) if grad is not None else lambda: None), _version_of(grad)


def _version_of(grad: Tensor | None) -> tuple[int, int]:
    if grad is None:
        return 0, 0
    return grad._version, grad._local_tensor._version if isinstance(grad, DTensor) else 0
