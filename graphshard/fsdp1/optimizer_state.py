"""Optimizer states by the names of parameters, and back: whole, sharded or local.

An optimizer numbers its parameters. A state that is saved has their clean names instead, so that it can be loaded into
another model. Values are DTensors where the parameter is one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import OptimStateKeyType, StateDictType
from torch.distributed.tensor import DTensor

from .._compat_fsdp1 import is_sharded_tensor
from ..errors import OptionError, ParameterStateError
from .meshes import Meshes
from .state_dicts import as_shard
from .whole_tensors import whole_tensor
from .wrapper_state import clean_name, plain_name, wrappers_in

State = dict[str, Any]


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """The clean name of each parameter; the first one of a tied parameter."""
    found: dict[nn.Parameter, str] = {}
    for name, param in model.named_parameters():
        found.setdefault(param, plain_name(name))
    return found


def parameters_of(model: nn.Module, optim: Any, optim_input: Any) -> list[nn.Parameter]:
    """The parameters in the order in which an optimizer numbers them."""
    if optim is not None:
        return [param for group in optim.param_groups for param in group["params"]]
    if optim_input is None:
        return list(model.parameters())
    given = list(optim_input)
    if given and isinstance(given[0], dict):
        return [param for group in given for param in group["params"]]
    return given


def by_names(
    model: nn.Module,
    params: list[nn.Parameter],
    state: State,
    kind: StateDictType,
    *,
    to_cpu: bool,
    is_kept: bool,
    group: Any,
) -> State:
    """A state of an optimizer with names as keys; all ranks take part.

    Args:
        model: holds the parameters.
        params: the parameters in the optimizer's order.
        state: the optimizer's state; its keys may be names already.
        kind: whole values, or DTensors; those of LOCAL_STATE_DICT share memory with the optimizer.
        to_cpu: move values to the CPU.
        is_kept: this rank returns the state; others return an empty dict.
        group: the ranks that gather whole values.

    Raises:
        OptionError: (a ValueError) the optimizer has a parameter that is not the model's.
        ParameterStateError: (a RuntimeError) ranks have states of different parameters, which they cannot gather.
    """
    names = _numbered_names(model, params)

    def name(key: Any) -> str:
        return clean_name(key) if isinstance(key, str) else names[key]

    # Optimizers of ranks may number parameters differently; ranks gather in the model's order.
    order = {each: place for place, each in enumerate(names_of(model).values())}
    given = {name(key): entries for key, entries in state["state"].items()}
    given = {each: given[each] for each in sorted(given, key=lambda each: order.get(each, len(order)))}
    if kind is StateDictType.FULL_STATE_DICT:
        _check_agreement(given, group)
    values: dict[str, Any] = {}
    meshes = list(dict.fromkeys(each.meshes for _, each in wrappers_in(model)))
    for key, entries in given.items():
        values[key] = {
            each: _sent(entries[each], kind, meshes, to_cpu=to_cpu) for each in sorted(entries, key=str)
        }
    result: State = {"state": values}
    if "param_groups" in state:
        groups = [{**each, "params": [name(key) for key in each["params"]]} for each in state["param_groups"]]
        result["param_groups"] = copy.deepcopy(groups)
    return result if is_kept else {}


def _check_agreement(state: State, group: Any) -> None:
    """Refuses states that ranks cannot gather together; all ranks of ``group`` take part."""
    own = {
        f"{name}.{each}"
        for name, entries in state.items()
        for each, value in entries.items()
        if isinstance(value, DTensor)
    }
    of_ranks: list[set[str]] = [set() for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(of_ranks, own, group=group)
    some = set[str]().union(*of_ranks)
    missing = [(rank, sorted(some - has)) for rank, has in enumerate(of_ranks) if some - has]
    if missing:
        rank, names = missing[0]
        raise ParameterStateError(
            f"optim_state_dict: the ranks' optimizers have states of different parameters, so whole ones cannot be "
            f"gathered: rank {rank} has no {', '.join(names[:5])}; give each rank's optimizer the same parameters, and "
            "step it on all ranks"
        )


def to_optimizer(
    model: nn.Module,
    params: list[nn.Parameter],
    groups: list[dict[str, Any]],
    state: State,
    *,
    keeps_names: bool = False,
) -> State:
    """A state by names as one that the optimizer loads, with DTensors for sharded parameters.

    Args:
        model: holds the parameters.
        params: the parameters in the optimizer's order.
        groups: the parameter groups of the optimizer's own state dict.
        state: of any kind, from this model, from FSDP1, or from an unsharded model.
        keeps_names: the optimizer's keys are names.

    Raises:
        ParameterStateError: (a RuntimeError) the state has names that the model does not have.
    """
    names = _numbered_names(model, params)
    by_name = dict(zip(names, params, strict=True))
    unknown = [key for key in state["state"] if plain_name(str(key)) not in by_name]
    if unknown:
        raise ParameterStateError(
            f"optim_state_dict_to_load: the state has {len(unknown)} name(s) that the optimizer's parameters do not "
            f"have: {', '.join(map(str, unknown[:5]))}"
        )
    saved = {plain_name(str(key)): entries for key, entries in state["state"].items()}
    keys: dict[str, Any] = {name: number for number, name in enumerate(names)}
    if keeps_names:  # its keys are names with the attributes of wrappers, perhaps
        own = {plain_name(str(key)): key for group in groups for key in group["params"]}
        keys = {name: own.get(name, name) for name in names}
    values = {
        keys[name]: {each: _received(value, by_name[name], name) for each, value in saved[name].items()}
        for name in names
        if name in saved
    }
    result: State = {"state": values}
    if "param_groups" in state:
        result["param_groups"] = _groups_to_load(names, groups, state["param_groups"], keys)
    return result


def _groups_to_load(
    names: list[str], groups: list[dict[str, Any]], saved: list[dict[str, Any]], keys: dict[str, Any]
) -> list[dict[str, Any]]:
    """The optimizer's groups, with the options of the saved groups that hold the same parameters."""
    result, start = [], 0
    for place, group in enumerate(groups):
        own = names[start : start + len(group["params"])]
        start += len(group["params"])
        match = next(
            (each for each in saved if own and own[0] in map(plain_name, map(str, each["params"]))), None
        )
        options = match if match is not None else (saved[place] if place < len(saved) else group)
        result.append({**copy.deepcopy(options), "params": [keys[name] for name in own]})
    return result


def rekey(state: State, kind: OptimStateKeyType, model: nn.Module, params: list[nn.Parameter]) -> State:
    """The state of an unsharded model's optimizer with names instead of numbers as keys, or the reverse.

    Raises:
        OptionError: (a ValueError) the keys are neither, or name other parameters.
    """
    names: list[Any] = list(_numbered_names(model, params))
    numbers: list[Any] = list(range(len(names)))
    is_to_names = kind is OptimStateKeyType.PARAM_NAME
    change = dict(zip(numbers, names, strict=True) if is_to_names else zip(names, numbers, strict=True))
    given = [*state["state"], *(key for group in state["param_groups"] for key in group["params"])]
    if set(given) <= set(change.values()):
        return state  # keyed so already
    if unknown := [key for key in given if key not in change]:
        raise OptionError(
            f"rekey_optim_state_dict: keys {unknown[:5]} are not of the {len(names)} parameters of this optimizer"
        )
    return {
        "state": {change[key]: entries for key, entries in state["state"].items()},
        "param_groups": [
            {**group, "params": sorted(change[key] for key in group["params"])}
            for group in state["param_groups"]
        ],
    }


def from_first_rank(state: State | None, groups: Iterable[Any]) -> State:
    """The state that the first rank has, on all ranks: sent along one axis of the mesh, then along the next."""
    holder = [state]
    for group in groups:
        dist.broadcast_object_list(holder, group=group, group_src=0)
    assert holder[0] is not None, "the first rank has no state"
    return holder[0]


def _numbered_names(model: nn.Module, params: list[nn.Parameter]) -> list[str]:
    names = names_of(model)
    foreign = [tuple(param.shape) for param in params if param not in names]
    if foreign:
        raise OptionError(
            f"FullyShardedDataParallel: the optimizer has {len(foreign)} parameter(s) that the model does not have, of "
            f"shapes {foreign[:5]}; pass the model whose parameters() the optimizer got"
        )
    return [names[param] for param in params]


def _sent(value: Any, kind: StateDictType, meshes: Iterable[Meshes], *, to_cpu: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor):
        if kind is StateDictType.FULL_STATE_DICT:
            value = whole_tensor(value)
            return value.cpu() if to_cpu else value
        for each in meshes:
            value = each.as_given(value)
    if kind is not StateDictType.LOCAL_STATE_DICT:  # values that do not follow the training, nor do steps
        value = value.detach().clone()
    return value.cpu() if to_cpu else value


def _received(value: Any, param: nn.Parameter, name: str) -> Any:
    if not isinstance(value, Tensor) or not isinstance(param, DTensor):
        return value.clone() if isinstance(value, Tensor) else value
    is_like = is_sharded_tensor(value) or isinstance(value, DTensor)
    local = param.to_local()
    if is_like or tuple(value.shape) == tuple(param.shape) or (value.ndim and value.shape == local.shape):
        shard = as_shard(value, param, f"the optimizer state of {name}")
        return shard.to(local.device) if shard.to_local().device != local.device else shard.clone()
    return value.clone()
