"""Whether a shard or a full parameter has changed in place.

Of a shard this is asked when a backward gathers again what its forward gathered. An in-place op on a DTensor moves the
version counter of the DTensor only. One on its local tensor moves that of the local tensor only. A foreach or fused
optimizer moves neither (torch 2.13). So both counters are read, and a hook moves the second one after every optimizer
step on DTensors.

Of a full parameter it is asked at the end of an uncompiled forward, which then writes the change back to the shards
(:func:`graphshard.fsdp.eager_collectives.write_back`). A write through ``.data`` moves no counter, so a full parameter
is a :class:`FullParameter`, which notes that ``.data`` was asked for. Between a forward and its backward modules show
a tensor that :class:`StandsForShard`.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .._compat import no_torch_function, storage_id
from .._compat_autograd import without_torch_function
from ..errors import ParameterStateError, StaleOptimizerError, UnsupportedShardingError

Version = tuple[int, int]

#: Attribute of a shard: its id and its storage.
_STORAGE = "_graphshard_storage"

#: Attribute of a gradient of a shard: its id, its storage, and the name of the parameter.
_GRADIENT = "_graphshard_gradient"

#: Attribute of a parameter that ``fully_shard`` has replaced: its sharded successor and slot. A module outside of the
#: unit that is tied to the parameter finds them here.
SUCCESSOR = "_graphshard_successor"

#: Attribute of a whole parameter that ``FullyShardedDataParallel.summon_full_params`` has shown: its name.
LAST_SHOWN = "_graphshard_last_shown"


class _KeptStorage:
    """The storage of a DTensor, which has no memory. No other storage gets its number while it is kept.

    Copied or saved with its tensor it becomes an empty set, which torch.load takes.
    """

    def __init__(self, value: DTensor) -> None:
        self._storage = value.untyped_storage()

    def is_of(self, value: DTensor) -> bool:
        return self._storage._cdata == storage_id(value)

    def __reduce__(self) -> tuple[type[set[None]], tuple[()]]:
        return set, ()


def version_of(param: DTensor) -> Version:
    """A value that differs from an earlier one if the parameter was changed in place in between."""
    return param._version, param._local_tensor._version


def note_storage(param: DTensor, *, anew: bool = True) -> None:
    """Notes the storage of a shard, for :func:`refuse_lost_data`; unless ``anew``, only if it has no note."""
    # A copy of the shard gets the attribute, too: so the id.
    if anew or vars(param).get(_STORAGE, (None,))[0] != id(param):
        vars(param)[_STORAGE] = id(param), _KeptStorage(param)


def refuse_lost_data(param: DTensor, name: str) -> None:
    """Refuses a shard to whose ``.data`` something was assigned, which leaves its local tensor as it was."""
    noted = vars(param).get(_STORAGE)
    if noted is not None and noted[0] == id(param) and not noted[1].is_of(param):
        raise ParameterStateError(
            f"parameter {name or f'of shape {tuple(param.shape)}'}: its .data was assigned to outside of a forward, "
            "which changes no DTensor; write to the parameter with copy_() under torch.no_grad(), or assign a new one "
            "to the module's attribute (torch.nn.utils.vector_to_parameters assigns .data)"
        )


def note_gradient(grad: Tensor | None, name: str) -> None:
    """Notes the storage of a gradient that a backward has given to a shard, for the next step of an optimizer."""
    if type(grad) is DTensor and vars(grad).get(_GRADIENT, (None,))[0] != id(grad):
        vars(grad)[_GRADIENT] = id(grad), _KeptStorage(grad), name


def _lost_gradients(params: Sequence[Tensor]) -> list[str]:
    """Names of parameters to the ``.data`` of whose gradients something was assigned."""
    notes = [(grad, vars(grad).get(_GRADIENT)) for param in params if type(grad := param.grad) is DTensor]
    return [note[2] for grad, note in notes if note and note[0] == id(grad) and not note[1].is_of(grad)]


def optimizers_of(params: Sequence[Tensor]) -> Iterator[torch.optim.Optimizer]:
    """The optimizers that hold some of the tensors.

    Goes from a tensor to the list, the group, the list of groups and the optimizer that refer to it. It does not ask
    for all objects: their list would refer to tuples that other threads are building, which CPython then cannot finish
    (a SystemError there).
    """
    lists = [each for each in gc.get_referrers(*params) if type(each) is list and each is not params]
    groups = (
        [each for each in gc.get_referrers(*lists) if type(each) is dict and "params" in each]
        if lists
        else []
    )
    holders = (
        [each for each in gc.get_referrers(*groups) if type(each) is list and each is not groups]
        if groups
        else []
    )
    found = gc.get_referrers(*holders) if holders else []
    # The attributes of an object lie in a dict, or (Python 3.11 and later) in the object itself.
    dicts = [each for each in found if type(each) is dict and "param_groups" in each]
    found += gc.get_referrers(*dicts) if dicts else []
    optimizers = {id(each): each for each in found if issubclass(type(each), torch.optim.Optimizer)}
    yield from optimizers.values()


def refuse_stale_optimizers(
    places: Sequence[tuple[str, nn.Parameter]], function: str, *, num_holders: int
) -> None:
    """Refuses optimizers that hold parameters to be replaced: they would step those, and the model would not train.

    Args:
        places: name and parameter for each place where a module holds one.
        function: what replaces them.
        num_holders: references to the parameter for each place besides that of ``places``; with no others than those,
            no optimizer holds it.

    Raises:
        StaleOptimizerError: (a RuntimeError) it names the parameters.
    """
    names = {id(param): name for name, param in places}
    held = dict.fromkeys(names, 2)  # getrefcount's own, and that of the loop
    for key in [id(param) for _, param in places]:
        held[key] += num_holders + 1
    if all(sys.getrefcount(param) <= held[id(param)] for _, param in places):
        return
    for optimizer in optimizers_of([param for _, param in places]):
        stale = [
            names[id(param)]
            for group in optimizer.param_groups
            for param in group["params"]
            if id(param) in names
        ]
        if stale:
            raise StaleOptimizerError(
                f"{function}: this {type(optimizer).__name__} was made before sharding and holds {_some_of(stale)}, "
                "which sharding replaces: make the optimizer after fully_shard (and delete the old one)"
            )


@functools.cache
def watch_optimizers(before: Callable[..., None]) -> None:
    """From the first call on, each step of an optimizer calls ``before``, and moves the version of its DTensors.

    A step of parameters that :func:`graphshard.fully_shard` has replaced is an error, and so is one with gradients to
    whose ``.data`` something was assigned, which leaves the local tensor of a DTensor as it was.
    """
    register_optimizer_step_pre_hook(_refuse_unsuited)
    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(_move_versions)


def _refuse_unsuited(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    stale = [getattr(param, SUCCESSOR)[1].name for param in params if hasattr(param, SUCCESSOR)]
    if stale:
        raise StaleOptimizerError(
            f"this {type(optimizer).__name__} holds {_some_of(stale)} from before sharding, which fully_shard has "
            "replaced, so its step would change nothing in the model: read model.parameters() again after fully_shard, "
            "and make the optimizer from that"
        )
    shown = [getattr(param, LAST_SHOWN) for param in params if hasattr(param, LAST_SHOWN)]
    if shown:
        raise StaleOptimizerError(
            f"this {type(optimizer).__name__} holds {_some_of(shown)} as summon_full_params() has shown them, and "
            "that context has ended, so its step would change nothing in the model: make the optimizer from "
            "model.parameters() outside of the context"
        )
    lost = _lost_gradients(params)
    if lost:
        raise ParameterStateError(
            f"the .data of the gradient of {_some_of(lost)} was assigned to, which changes no DTensor, so this "
            f"{type(optimizer).__name__} would step with the old values: assign to param.grad itself, or write to it "
            "in place (param.grad.copy_(), param.grad.mul_())"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        uneven = [
            f"{tuple(param.shape)} over {param.device_mesh.size()} ranks"
            for param in params
            if isinstance(param, DTensor) and _is_uneven(param)
        ]
        if uneven:
            raise UnsupportedShardingError(
                "LBFGS makes one vector of all gradients, which DTensors that ranks share unevenly cannot become: "
                f"{_some_of(uneven)}. Choose sizes that the ranks divide, or another optimizer, or call "
                "fully_shard with ignored_params"
            )


def _is_uneven(param: DTensor) -> bool:
    return any(
        isinstance(placement, Shard) and param.shape[placement.dim] % param.device_mesh.size(axis)
        for axis, placement in enumerate(param.placements)
    )


def _some_of(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _move_versions(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    increment_version([param._local_tensor for param in params if isinstance(param, DTensor)])


class FullParameter(Tensor):
    """A full parameter as an uncompiled forward reads it. Results of ops on it are plain tensors.

    Attributes:
        before: its values when ``.data`` was first asked for; None before that.
    """

    __torch_function__ = no_torch_function

    before: Tensor | None = None

    @property
    def data(self) -> Tensor:
        """``Tensor.data``: a tensor in the same memory, without gradients and with a version counter of its own."""
        if self.before is None:
            self.before = self.detach().clone()
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        if self.before is None:
            self.before = self.detach().clone()
        Tensor.data.__set__(self, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullRead:
    """A full parameter that an uncompiled forward has read, and what it was like then.

    Attributes:
        full: the full parameter, or this rank's piece of a DTensor.
        shown: what the forward reads: ``full``, or the DTensor around it.
        versions: version counters of both.
        storages: the storages of both; an assignment to ``.data`` gives a tensor another one. They are kept, so that
            no other gets their number.
        source: the autograd node that made ``shown``.
        shard: the version of the shard that was gathered.
    """

    full: Tensor
    shown: Tensor
    versions: Version
    storages: tuple[torch.UntypedStorage, torch.UntypedStorage]
    source: Any
    shard: Version

    @staticmethod
    def of(full: Tensor, shown: Tensor, shard: Version, *, in_graph: bool = False) -> FullRead:
        """The record of a full parameter that was just gathered; one gathered in a graph stays a plain tensor."""
        if not in_graph and type(full) is Tensor and full is shown:
            full.__class__ = FullParameter
        return FullRead(
            full=full,
            shown=shown,
            versions=(full._version, shown._version),
            storages=(full.untyped_storage(), shown.untyped_storage()),
            source=shown.grad_fn,
            shard=shard,
        )

    def renewed(self, shard: Version) -> FullRead:
        """The record once the changes are written back, of which ``shard`` is the version."""
        if isinstance(self.full, FullParameter):
            self.full.before = None
        return replace(
            self,
            versions=(self.full._version, self.shown._version),
            storages=(self.full.untyped_storage(), self.shown.untyped_storage()),
            shard=shard,
        )

    @property
    def is_changed(self) -> bool:
        """Whether the forward has written to it, or has asked for ``.data``, by which it may have."""
        return self._has_moved or self.before is not None

    @property
    def _has_moved(self) -> bool:
        if (self.full._version, self.shown._version) != self.versions:
            return True
        full, shown = self.storages
        if storage_id(self.full) != full._cdata:
            return True
        return self.shown is not self.full and storage_id(self.shown) != shown._cdata

    @property
    def is_lost(self) -> bool:
        """Whether ``.data`` of a DTensor was assigned to: its local tensor has not changed."""
        return self.shown is not self.full and storage_id(self.shown) != self.storages[1]._cdata

    @property
    def before(self) -> Tensor | None:
        """Its values before ``.data`` was asked for."""
        return getattr(self.full, "before", None)

    @property
    def is_written(self) -> bool:
        """Whether the forward has written to it; compares the values if only ``.data`` was asked for."""
        before = self.before
        if (self.full._version, self.shown._version) != self.versions or (before is None and self._has_moved):
            return True
        return before is not None and not (
            before.shape == self.full.shape and torch.equal(before, self.full.detach())
        )


class StandsForShard(Tensor):
    """The values of a parameter between a forward and its backward; gradients and hooks are those of the shard.

    ``torch.autograd.grad`` takes it for the shard. An optimizer of it is refused, and ``backward(inputs=[it])`` is
    noticed by ``retains_grad``, which the engine sets.
    """

    shard: nn.Parameter
    name_in_model: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Ops treat it as what it was before."""
        with without_torch_function():
            if func is torch.autograd.grad:
                outputs, inputs, *rest = args
                inputs = tuple(each.shard if isinstance(each, StandsForShard) else each for each in inputs)
                args = (outputs, inputs, *rest)
            return func(*args, **(kwargs or {}))

    @property
    def grad(self) -> Tensor | None:
        """The gradient of the shard.

        Raises:
            ParameterStateError: ``backward(inputs=...)`` was to give this tensor one.
        """
        if self.is_asked_for:
            raise lost_gradients([self.name_in_model])
        return self.shard.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.shard.grad = value

    @property
    def requires_grad(self) -> bool:
        """Of the shard: a parameter that is frozen or thawed here is so from the next forward on."""
        return self.shard.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.shard.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """``Tensor.requires_grad_`` of the shard."""
        self.shard.requires_grad_(requires_grad)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy of the values."""
        copied = memo[id(self)] = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        return copied

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """``Tensor.register_hook`` of the shard, as the next one."""
        return self.shard.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """See above."""
        return self.shard.register_post_accumulate_grad_hook(hook)

    @property
    def retains_grad(self) -> bool:
        """Asked by optimizers of what is no leaf.

        Raises:
            ParameterStateError: always.
        """
        raise ParameterStateError(
            f"parameter {self.name_in_model} is gathered here, between a forward and its backward, so an optimizer of "
            "it would train nothing: make the optimizer before the forward or after the backward, or call reshard() "
            "on the module first"
        )

    @property
    def is_asked_for(self) -> bool:
        """Whether a backward was to accumulate a gradient in it."""
        with without_torch_function():
            retains: bool = Tensor.retains_grad.__get__(self)
        return retains


class KeptParameter(StandsForShard, nn.Parameter):
    """A plain parameter."""


class KeptDTensor(StandsForShard, DTensor):
    """A parameter of tensor parallelism."""


def stand_for(shown: Tensor, shard: nn.Parameter, name: str) -> None:
    """Makes what modules show of a parameter stand for its shard; a class of tensors of the user's stays as it is."""
    if type(shown) not in (nn.Parameter, DTensor):
        return
    shown.__class__ = KeptParameter if type(shown) is nn.Parameter else KeptDTensor
    assert isinstance(shown, StandsForShard)
    shown.shard, shown.name_in_model = shard, name


def lost_writes(names: Sequence[str]) -> ParameterStateError:
    """The error for writes to full parameters that modules show between a forward and its backward."""
    return ParameterStateError(
        f"parameter(s) {', '.join(names)} were written to between a forward and its backward, where modules show "
        "gathered parameters that the backward frees, so the write would be lost: call reshard() on the module first, "
        "or write after the backward"
    )


def lost_gradients(names: Sequence[str]) -> ParameterStateError:
    """The error for ``backward(inputs=...)`` of what modules show between a forward and its backward."""
    return ParameterStateError(
        f"backward(inputs=...) was given parameter(s) {', '.join(names)} as they are between a forward and its "
        "backward, gathered, and they got no gradient: read model.parameters() before the forward, or call reshard() "
        "on the module before that"
    )
