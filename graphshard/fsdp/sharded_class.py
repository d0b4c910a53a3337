"""Classes of sharded modules: reading a parameter's attribute in a forward gathers the parameter.

``_parameters`` holds DTensor shards, so optimizers, ``clip_grad_norm_``, state dicts and
``torch.distributed.checkpoint`` see the same as under FSDP2, and names do not change. While a forward of the model
runs, ``self.weight`` returns ``unshard(shard)``. Dynamo traces the property to one node.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator, MutableMapping
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._compat import is_tracing, outside_transforms, register_backend
from .._compat_composable import watch_torch_sharding
from .._compat_frames import (
    half_of_backward,
    is_counting_hook,
    leave_frame_to_python,
    leave_frames_to_python,
    misses_subclasses,
    place_run_in_python,
)
from ..errors import ParameterStateError, ShardingError, UnsupportedShardingError
from ..ir import UNIT
from ..tensor_trees import cast_tensors, move_tensors
from .compiled_block import (
    PLAIN_CLASS,
    RUNS,
    call_part,
    is_compiled_alone,
    put_around,
    run_on_full_parameters,
)
from .eager_autograd import (
    drop_prefetched,
    finish_reads,
    show_kept,
    take_part_unused,
    watch_backward,
    watch_outputs,
)
from .fsdp_module import FSDPModule, refuse_torch_sharding
from .read_parameter import (
    empty_names,
    empty_property,
    is_reading,
    leaves_for_half,
    read_ahead,
    read_parameter,
    read_shard,
)
from .regroup import find_ties, find_ties_while_tracing, slot_of_param, tie
from .state import SLOTS, STORED, ParameterSlot, Tree, Unit, owner_of, slots_of, stored_parameters


def _make_property(name: str) -> property:
    def read(self: nn.Module) -> torch.Tensor | None:
        return read_parameter(self, name)

    def write(self: nn.Module, value: Any) -> None:
        self.register_parameter(name, value)

    def delete(self: nn.Module) -> None:
        del stored_parameters(self)[name]

    return property(read, write, delete)


def _register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
    """``nn.Module.register_parameter``; replaces a sharded parameter without reading it."""
    slot = self.__dict__[SLOTS].get(name)
    other = slot_of_param(slot.unit.tree, param) if slot is not None else None
    other = None if other is slot else other
    if slot is None or (name not in stored_parameters(self) and other is None):
        nn.Module.register_parameter(self, name, param)
        return
    if param is not None and tuple(param.shape) != tuple(slot.global_shape):
        raise ShardingError(
            f"parameter {slot.name} has shape {tuple(slot.global_shape)}; it cannot be replaced by one of "
            f"shape {tuple(param.shape)} after fully_shard"
        )
    if other is not None:
        tie(self, name, slot, other)
        return
    if isinstance(param, DTensor):
        _refuse_other_placement(slot, param)
    slot.replace(self, name, param)


def _refuse_other_placement(slot: ParameterSlot, param: DTensor) -> None:
    """Refuses a DTensor whose local tensor is no shard: a gather would put together other values."""
    shard = slot.param
    if not isinstance(shard, DTensor):
        return
    is_placed = param.placements == shard.placements and torch.equal(
        param.device_mesh.mesh, shard.device_mesh.mesh
    )
    if not is_placed:
        raise ParameterStateError(
            f"parameter {slot.name} cannot be replaced by a DTensor that is {param.placements} on the ranks "
            f"{param.device_mesh.mesh.tolist()}: it is {shard.placements} on {shard.device_mesh.mesh.tolist()}; call "
            "redistribute() or distribute_tensor() on the new value with the mesh and placements of the parameter"
        )


class _ReadInForward(MutableMapping[str, Any]):
    """``module._parameters`` in an uncompiled forward: an entry is gathered when it is read."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._stored = module, stored_parameters(module)

    def __getitem__(self, name: str) -> Any:
        if name not in self._module.__dict__[SLOTS]:
            return self._stored[name]
        shard, value = self._stored[name], read_parameter(self._module, name)
        if value is not shard and value is not None:
            value._graphshard_shard = shard
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        # What was read here is put back, as torch.func.functional_call does: the shard is.
        self._stored[name] = getattr(value, "_graphshard_shard", value)

    def __delitem__(self, name: str) -> None:
        del self._stored[name]

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


class _TracedInForward(dict[str, Any]):
    """``module._parameters`` in a compiled forward."""

    def __setitem__(self, name: str, value: Any) -> None:
        raise UnsupportedShardingError(
            f"parameter {name} is replaced in a compiled forward, as by torch.func.functional_call, which is not "
            "supported for a sharded module: call the function that uses the parameters with the new value, or leave "
            "the module out of torch.compile"
        )


def _read_parameters(self: nn.Module) -> Any:
    """The property ``_parameters``, which ``parameters()`` and the like read."""
    stored, slots = stored_parameters(self), self.__dict__[SLOTS]
    if not torch.compiler.is_compiling() and misses_subclasses(sys._getframe(1)):
        # Dynamo of torch 2.11 and 2.12 does not look into what the property gives in a forward (_TracedInForward).
        is_mixed = any(name not in slots and param is not None for name, param in stored.items())
        return types.MappingProxyType(stored) if is_mixed else stored
    if not any(is_reading(slot.unit.tree) for slot in slots.values()):
        if not torch.compiler.is_compiling():
            for slot in slots.values():
                slot.unit.tree.may_be_tied = True  # whoever has the dict may write to it
                show_kept(owner_of(slot))
        return stored
    if not torch.compiler.is_compiling():
        # While Dynamo traces another frame, Dynamo itself looks at the module: no forward reads.
        return stored if is_tracing() else _ReadInForward(self)
    if not torch.compiler.is_dynamo_compiling():  # Dynamo itself looks at the module, and does not trace this
        return stored
    return _TracedInForward(
        {name: read_parameter(self, name) if name in slots else param for name, param in stored.items()}
    )


def _write_parameters(self: nn.Module, parameters: dict[str, Any]) -> None:
    self.__dict__["_parameters"] = self.__dict__[STORED].__dict__["_parameters"] = parameters


def _named_parameters(
    self: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, Any]]:
    """``nn.Module.named_parameters``, which gathers in a forward.

    It compares names in a tree: in a compiled forward, two reads of a tied parameter are different tensors. Units that
    were added after the outermost one have trees of their own. A hook of torch's CommDebugMode gets the shards: it
    cannot count a gather that it causes itself. So does a pipeline schedule that splits a backward: it looks for the
    parameters as leaves of the graph, which shards are.
    """
    read: Callable[[nn.Module, str], Any] = read_parameter
    if not torch.compiler.is_compiling():
        below = (slot.unit.tree for each in self.modules() for _, slot in slots_of(each))
        for tree in itertools.islice(below, 1):
            find_ties(tree)
        if is_counting_hook(sys._getframe(1)):
            read = read_shard
        elif half := half_of_backward(sys._getframe(1)):
            read = leaves_for_half(half)
    modules = (
        self.named_modules(prefix=prefix, remove_duplicate=remove_duplicate) if recurse else [(prefix, self)]
    )
    seen: set[Any] = set()
    trees: list[Tree] = []
    for path, module in modules:
        slots = module.__dict__.get(SLOTS, {})
        for name, param in (stored_parameters(module) if slots else module._parameters).items():
            key = (_number(slots[name].unit.tree, trees), slots[name].name) if name in slots else param
            if param is None or key in seen:
                continue
            if remove_duplicate:
                seen.add(key)
            yield f"{path}.{name}" if path else name, read(module, name) if name in slots else param


def _number(tree: Tree, trees: list[Tree]) -> int:
    """The position of a tree in a list, to which it is appended if it is new; Dynamo traces this."""
    for number, other in enumerate(trees):
        if other is tree:
            return number
    trees.append(tree)
    return len(trees) - 1


def _get_parameter(self: nn.Module, target: str) -> Any:
    """``nn.Module.get_parameter``: what a forward gets is no ``nn.Parameter``."""
    path, _, name = target.rpartition(".")
    owner = self.get_submodule(path)
    if name in owner.__dict__.get(SLOTS, {}):
        return read_parameter(owner, name)
    return nn.Module.get_parameter(self, target)


def _flat_weights(self: nn.RNNBase) -> list[torch.Tensor | None]:
    """The list of weights that RNNs keep, read from the attributes."""
    return [getattr(self, name) if hasattr(self, name) else None for name in self._flat_weights_names]


def _ignore(self: nn.Module, value: Any) -> None:
    """The setter of ``_flat_weights``, which is computed: does nothing."""


def _set_class(self: nn.Module, cls: type[nn.Module]) -> None:
    """The setter of ``__class__``: a class that the user gives is made one of a sharded module."""
    plain = vars(cls).get(PLAIN_CLASS, cls)
    if plain is not cls or not hasattr(cls, PLAIN_CLASS):
        cls = sharded_class(
            plain, tuple(self.__dict__.get(SLOTS, {})), empty_names(self), UNIT in self.__dict__
        )
    vars(object)["__class__"].__set__(self, cls)


@functools.cache
def sharded_class(
    cls: type[nn.Module], names: tuple[str, ...], empty: tuple[str, ...], is_unit: bool
) -> type[nn.Module]:
    """The subclass of ``cls`` whose attributes ``names`` gather; memoised, so that equal blocks share one.

    ``empty`` are the names of parameters that are None.

    The class of a unit's module is named ``FSDP<Class>`` and mixes in :class:`FSDPModule`. The class of another module
    with sharded parameters keeps its name.
    """
    body: dict[str, Any] = {name: _make_property(name) for name in names}
    body.update({name: empty_property(name) for name in empty})
    body["__module__"] = cls.__module__
    body[PLAIN_CLASS] = cls
    body["__class__"] = property(type, _set_class)
    body["compile"] = _compile
    for method in (_named_parameters, _get_parameter):
        attribute = method.__name__.removeprefix("_")
        # One of the user's own reads ``_parameters``.
        if getattr(cls, attribute) is getattr(nn.Module, attribute):
            body[attribute] = method
    if names:
        body["register_parameter"] = _register_parameter
        body["_parameters"] = property(_read_parameters, _write_parameters)
        if issubclass(cls, nn.RNNBase):
            body["_flat_weights"] = property(_flat_weights, _ignore)
    if is_unit:
        body["forward"] = _forward_inside_tree(cls)
        body["__setstate__"] = _set_state
    body.update([watch_torch_sharding(refuse_torch_sharding)])
    name = f"FSDP{cls.__name__}" if is_unit else cls.__name__
    body["__qualname__"] = name if is_unit else cls.__qualname__
    return type(name, (FSDPModule, cls) if is_unit else (cls,), body)


def _forward_inside_tree(cls: type[nn.Module]) -> Any:
    original = cls.forward

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run_inside_tree(self, functools.partial(original, self), args, kwargs)

    return _with_own_code(forward)


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, as one that Dynamo starts at.

    Dynamo counts what it compiles, and marks what it skips, for each code object. All classes would share that of the
    closure, which :func:`watch_frames` has it skip.
    """
    assert isinstance(function, types.FunctionType)
    function.__code__ = function.__code__.replace()
    return function


@functools.cache
def watch_frames() -> None:
    """From the first call on, Dynamo starts at no frame of ours but the forwards of units."""
    leave_frames_to_python(__name__.partition(".")[0])
    leave_frame_to_python(run_inside_tree.__code__)


@functools.cache
def offer_backend() -> None:
    """From the first call on, Dynamo knows the backend ``graphshard``, in threads that ask for it at once too."""
    package = __name__.partition(".")[0]
    register_backend(package, lambda: import_module(f"{package}.backend").graphshard)


def wrap_own_forward(module: nn.Module) -> None:
    """Makes a forward that is set on the module itself, as trainers patch it, run as a forward of the unit.

    It hides the forward of the class. ``del module.forward`` still shows that one.
    """
    own = module.__dict__.get("forward")
    if own is not None and not hasattr(own, RUNS):
        put_around(module, _own_forward_runner(), own)


def _compile(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """``nn.Module.compile``."""
    plain: type[nn.Module] = getattr(self, PLAIN_CLASS)
    plain.compile(self, *args, **kwargs)
    wrap_compiled_call(self)


def wrap_compiled_call(module: nn.Module) -> None:
    """Makes what ``module.compile()`` has compiled take full parameters (:mod:`graphshard.fsdp.compiled_block`)."""
    compiled = module._compiled_call_impl
    if compiled is not None and not isinstance(compiled, functools.partial):
        module._compiled_call_impl = functools.partial(_call_compiled, module, compiled)


def _call_compiled(module: nn.Module, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return compiled(*args, **kwargs)
    unit: Unit | None = module.__dict__.get(UNIT)
    if unit is None:
        return call_part(module, compiled, *args, **kwargs)
    if is_compiled_alone(unit, module, compiled):
        on_full = functools.partial(run_on_full_parameters, module, compiled)
        return run_inside_tree(module, on_full, args, kwargs)
    return compiled(*args, **kwargs)


def _set_state(self: nn.Module, state: dict[str, Any]) -> None:
    """``nn.Module.__setstate__``. The wrapper that ``torch.compile`` returns sets a forward of its own there."""
    plain: type[nn.Module] = getattr(self, PLAIN_CLASS)
    plain.__setstate__(self, state)
    wrap_own_forward(self)


def _own_forward_runner() -> Callable[..., Any]:
    def run_own_forward(module: nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return run_inside_tree(module, own, args, kwargs)

    return _with_own_code(run_own_forward)


def run_inside_tree(
    module: nn.Module, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Runs a method of a unit's module as a forward: moves and casts inputs, and lets parameters gather."""
    unit: Unit = module.__dict__[UNIT]
    tree, policy = unit.tree, unit.settings.mp_policy
    if unit.settings.input_device is not None:
        args, kwargs = move_tensors((args, kwargs), unit.settings.input_device)
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        args, kwargs = cast_tensors((args, kwargs), policy.param_dtype)
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and is_compiled_alone(unit, module, method):
        method = functools.partial(run_on_full_parameters, module, method)
    was_in_forward = tree.in_forward
    if not was_in_forward:
        find_ties_while_tracing(unit.marker) if is_compiling else find_ties(tree)
    outer = None if is_compiling else unit.begin_forward()  # which may refuse the forward
    if not was_in_forward:  # Dynamo of torch 2.11 cannot trace a write in a checkpointed region
        tree.forwards.append(True)
    try:
        if not is_compiling and unit.reduces_unused:
            with outside_transforms():
                take_part_unused(unit)
        if not was_in_forward and tree.reads_ahead:
            read_ahead(tree)
        outputs = method(*args, **kwargs)
        if not is_compiling:
            with outside_transforms():
                finish_reads(unit)
            watch_backward(unit, outputs)
            if not was_in_forward:
                watch_outputs(tree, outputs)
    finally:
        if not was_in_forward:
            tree.forwards.clear()
            if tree.reads_ahead:
                tree.ahead.clear()
        if not is_compiling:
            unit.end_forward(outer, module)
            if not was_in_forward:
                drop_prefetched(tree)
    if policy.output_dtype is not None:
        outputs = cast_tensors(outputs, policy.output_dtype)
    return outputs


def place_of_forward_in_python() -> str | None:
    """Where Python runs a forward of a unit inside of a compiled function, called as Dynamo compiles a part of it."""
    return place_run_in_python(run_inside_tree.__code__)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes another method of a unit's module gather parameters and cast inputs as ``forward`` does.

    Does nothing if the module is no unit, so a model can call it before it is sharded, too.

    Raises:
        ShardingError: (a ValueError) the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    original = getattr(module, method_name, None)
    if not callable(original):
        name = type(module).__name__
        raise ShardingError(f"register_fsdp_forward_method: {name} has no method {method_name!r}")

    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run_inside_tree(self, original, args, kwargs)

    setattr(module, method_name, types.MethodType(_with_own_code(method), module))
