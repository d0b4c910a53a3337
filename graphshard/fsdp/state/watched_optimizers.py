"""What steps of optimizers are told: parameters that are not the model's, and gradients that they would not see.

After each step the versions of the DTensors move (:mod:`~graphshard.fsdp.state.shard_versions`).
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...errors import ParameterStateError, StaleOptimizerError, UnsupportedShardingError
from .shard_versions import gradients_of_lost_data

#: Attribute of a parameter that ``fully_shard`` has replaced: its sharded successor and slot. A module outside of the
#: unit that is tied to the parameter finds them here.
SUCCESSOR = "_graphshard_successor"

#: Attribute of a whole parameter that ``FullyShardedDataParallel.summon_full_params`` has shown: its name.
LAST_SHOWN = "_graphshard_last_shown"


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
    lost = gradients_of_lost_data(params)
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
