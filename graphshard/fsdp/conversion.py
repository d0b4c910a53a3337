"""``.to()`` and the like, on shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .parameter_slot import stored_parameters
from .shard_parameter import lay_out
from .unit import Unit


@contextmanager
def changed_only(unit: Unit, fn: Callable[[Tensor], Tensor]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Keeps shards that ``fn`` returns as they are from ``nn.Module._apply``; yields what to give it instead of ``fn``.

    ``_apply`` swaps each DTensor for its result, which torch refuses while a graph of autograd holds it: a model that
    is moved to the device where it is could not be moved between a forward and its backward. Changed shards are laid
    out anew at the end.
    """
    applied: dict[int, Tensor] = {}
    unchanged = []
    for slot in unit.slots:
        for params, name in [(stored_parameters(owner), name) for owner, name in slot.owners]:
            param = params[name]
            if not isinstance(param, Tensor):
                continue
            if id(param) not in applied:
                with torch.no_grad():
                    applied[id(param)] = fn(param)
                    if applied[id(param)] is param and param.grad is not None:
                        param.grad = fn(param.grad)
            if applied[id(param)] is param:
                unchanged.append((params, name, param))
    for params, name, _ in unchanged:
        params[name] = None
    try:
        yield lambda value: applied.pop(id(value)) if id(value) in applied else fn(value)
    finally:
        for params, name, param in unchanged:
            params[name] = param
    lay_out(unit)
