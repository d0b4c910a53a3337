"""The class swap: modules whose parameter attributes gather on read, and the state they share.

``_parameters`` keeps DTensor shards, so optimizers, ``clip_grad_norm_``, state dicts and
``torch.distributed.checkpoint`` see what they see under FSDP2 and names never change. While a forward
of the model runs, reading ``self.weight`` returns ``unshard(shard)`` instead; Dynamo traces the
property to one node.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ._compat import in_recomputation
from .errors import AlreadyShardedError, ParameterStateError, ShardingError
from .ops import UNSHARD
from .versions import Version, version_of

#: Where a module keeps the slots of its sharded parameters, and a unit root its unit.
SLOTS = "_graphshard_slots"
UNIT = "_graphshard_unit"

#: Attributes under which ``checkpoint_wrapper`` and ``torch.compile`` keep the module they wrap.
_WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})


@dataclass(eq=False)
class Tree:
    """What all units of one model share: whether a forward is running, and the outermost modules."""

    in_forward: bool = False
    roots: list[nn.Module] = field(default_factory=list)


@dataclass(eq=False)
class Unit:
    """The parameters claimed by one ``fully_shard`` call."""

    tree: Tree
    modules: list[nn.Module]
    reshard_after_forward: bool | None
    label: str = "root"
    is_root: bool = True

    @property
    def reshards(self) -> bool:
        """Whether the backward gathers again: what the user said, else all but the root."""
        return not self.is_root if self.reshard_after_forward is None else self.reshard_after_forward


@dataclass(eq=False)
class ParameterSlot:
    """One sharded parameter: where it lives and how it is gathered and reduced.

    ``arguments`` are the arguments of ``graphshard::unshard`` after the shard; ``version`` is the
    its version when an uncompiled forward last read it.
    """

    unit: Unit
    name: str
    shape: torch.Size
    dim: int
    axis: str
    group_size: int
    group_name: str
    reduce_op: str
    grad_scale: float
    arguments: tuple[Any, ...] = ()
    version: Version | None = None

    def refresh(self) -> None:
        """Rebuilds ``arguments`` after the name, the unit's label or its place changed."""
        self.arguments = (
            self.name,
            self.unit.label,
            list(self.shape),
            self.dim,
            self.axis,
            self.group_size,
            self.group_name,
            self.unit.reshards,
            self.reduce_op,
            self.grad_scale,
        )


class FSDPModule:
    """Mixed into the class of each module given to :func:`graphshard.fully_shard`.

    The class of ``module`` becomes ``FSDP<Class>``, a subclass of both; the object stays the same.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise AlreadyShardedError(
            "a sharded module cannot be deep-copied: build the copy from the original class and shard it, "
            "then load_state_dict()"
        )


def read_parameter(module: nn.Module, name: str) -> torch.Tensor | None:
    """What ``module.<name>`` is: the DTensor outside of a forward, the full tensor inside.

    A checkpointed region that runs again in a backward counts as inside, whether it is entered
    through a unit's forward or not.
    """
    param = module._parameters[name]
    slot: ParameterSlot = module.__dict__[SLOTS][name]
    if param is None or not (slot.unit.tree.in_forward or _in_recomputation()):
        return param
    if not isinstance(param, DTensor):
        raise ParameterStateError(
            f"parameter {slot.name} was replaced by a {type(param).__name__} of shape {tuple(param.shape)}; "
            f"a sharded parameter must stay a DTensor: use distribute_tensor() on the new value"
        )
    local = param.to_local()
    if local.device.type == "meta":
        raise_for_meta(slot.unit.tree)
    if not torch.compiler.is_compiling():
        _check_version(slot, param)
    if slot.group_size == 1:
        return local
    return UNSHARD(local, *slot.arguments)


def _in_recomputation() -> bool:
    # Dynamo cannot trace the question; what it traces is entered through a unit's forward.
    return not torch.compiler.is_compiling() and in_recomputation()


def _check_version(slot: ParameterSlot, param: DTensor) -> None:
    """A recomputation must gather what the forward gathered."""
    if not torch.is_grad_enabled():
        return
    version = version_of(param)
    if not in_recomputation():
        slot.version = version
    elif slot.version not in (None, version):
        raise ParameterStateError(
            f"parameter {slot.name} changed in place after the forward that a checkpointed region now runs "
            "again, so old activations would meet new weights: run backward() before optimizer.step() "
            "or load_state_dict()"
        )


def raise_for_meta(tree: Tree) -> NoReturn:
    """Lists every parameter of the model that has no storage yet."""
    names = [name for name, param in _parameters_of(tree) if param.is_meta]
    raise ParameterStateError(
        f"{len(names)} parameter(s) are still on the meta device: {', '.join(names)}; "
        "call model.to_empty(device=...) and initialise them before the first forward"
    )


def _parameters_of(tree: Tree) -> Iterator[tuple[str, nn.Parameter]]:
    for module in tree.roots:
        for owner in module.modules():
            for name, slot in owner.__dict__.get(SLOTS, {}).items():
                param = owner._parameters[name]
                if param is not None:
                    yield slot.name, param


def _make_property(name: str) -> property:
    def read(self: nn.Module) -> torch.Tensor | None:
        return read_parameter(self, name)

    def write(self: nn.Module, value: Any) -> None:
        self.register_parameter(name, value)

    def delete(self: nn.Module) -> None:
        del self._parameters[name]

    return property(read, write, delete)


def _register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
    """``nn.Module.register_parameter`` that replaces a sharded parameter without reading it."""
    slot = self.__dict__[SLOTS].get(name)
    if slot is None or name not in self._parameters:
        nn.Module.register_parameter(self, name, param)
        return
    if param is not None and tuple(param.shape) != tuple(slot.shape):
        raise ShardingError(
            f"parameter {slot.name} has shape {tuple(slot.shape)}; it cannot be replaced by one of "
            f"shape {tuple(param.shape)} after fully_shard"
        )
    self._parameters[name] = param


def _flat_weights(self: nn.RNNBase) -> list[torch.Tensor | None]:
    """RNNs keep a list of their weights beside the attributes: read it from the attributes."""
    return [getattr(self, name) if hasattr(self, name) else None for name in self._flat_weights_names]


def _ignore(self: nn.Module, value: Any) -> None:
    """Writes to ``_flat_weights`` have nothing to keep up to date."""


@functools.cache
def sharded_class(cls: type[nn.Module], names: tuple[str, ...], is_unit: bool) -> type[nn.Module]:
    """The subclass of ``cls`` whose attributes ``names`` gather; memoised so that blocks share one.

    A unit's class is named ``FSDP<Class>`` and mixes in :class:`FSDPModule`; another module that owns
    sharded parameters keeps its class name.
    """
    body: dict[str, Any] = {name: _make_property(name) for name in names}
    body["__module__"] = cls.__module__
    body["_graphshard_plain_class"] = cls
    if names:
        body["register_parameter"] = _register_parameter
        if issubclass(cls, nn.RNNBase):
            body["_flat_weights"] = property(_flat_weights, _ignore)
    if is_unit:
        body["forward"] = _forward_inside_tree(cls)
    name = f"FSDP{cls.__name__}" if is_unit else cls.__name__
    body["__qualname__"] = name if is_unit else cls.__qualname__
    return type(name, (FSDPModule, cls) if is_unit else (cls,), body)


def _forward_inside_tree(cls: type[nn.Module]) -> Any:
    original = cls.forward

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tree = self.__dict__[UNIT].tree
        was_in_forward = tree.in_forward
        tree.in_forward = True
        try:
            return original(self, *args, **kwargs)
        finally:
            tree.in_forward = was_in_forward

    return forward


def relabel(roots: Iterable[nn.Module]) -> None:
    """Names parameters and units as seen from ``roots`` and puts all units below into one tree."""
    roots = list(roots)
    outer: Unit = roots[0].__dict__[UNIT]
    outer.tree.roots = roots
    seen: set[int] = set()
    for index, root in enumerate(roots):
        prefix = f"{index}." if len(roots) > 1 else ""
        for wrapped_path, module in root.named_modules():
            path = _without_wrappers(wrapped_path)
            unit = module.__dict__.get(UNIT)
            if unit is not None and unit is not outer and id(unit) not in seen:
                seen.add(id(unit))
                unit.tree, unit.is_root = outer.tree, False
            if unit is not None and unit is not outer:
                unit.label = _label(unit, path, module)
            for name, slot in module.__dict__.get(SLOTS, {}).items():
                slot.name = f"{prefix}{path}.{name}" if path else f"{prefix}{name}"
    for root in roots:
        for module in root.modules():
            for slot in module.__dict__.get(SLOTS, {}).values():
                slot.refresh()


def _without_wrappers(path: str) -> str:
    """The path in the state dict: wrappers that checkpoint or compile a module are no part of it."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def _label(unit: Unit, path: str, module: nn.Module) -> str:
    """The path of the unit's module; the paths of all its modules, joined, for a list unit."""
    if len(unit.modules) == 1 or module is unit.modules[0]:
        return path
    return unit.label if path in unit.label.split("+") else f"{unit.label}+{path}"
