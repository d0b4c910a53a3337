"""``patch_torch``: torch's functions of FSDP2 are graphshard's for a while.

A trainer that shards a model itself imports ``fully_shard`` from torch. Inside ``with patch_torch():`` it gets
graphshard's function.

Torch's classes are not replaced. A sharded module is an instance of ``torch.distributed.fsdp.FSDPModule`` anyway, and
graphshard's policies are torch's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import torch.distributed.fsdp

from . import fsdp

#: The names in ``torch.distributed.fsdp`` that are replaced; in ``graphshard.fsdp`` they are the same.
REPLACED = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")


@contextmanager
def patch_torch() -> Iterator[tuple[str, ...]]:
    """Replaces ``fully_shard`` and two helpers of ``torch.distributed.fsdp`` by graphshard's, until the block ends.

    Replaces them in every loaded module that has imported them, under whatever name, except in graphshard's own. A
    module that is imported inside the block gets graphshard's functions. The end of the block, also by an exception,
    puts torch's functions back in all of these modules. A reference that was kept elsewhere, in a closure for
    instance, calls torch's function after the block.

    Models that were sharded inside the block stay graphshard's. Blocks may be nested.

    Yields:
        What was replaced, sorted, as ``"module.name"``.

    Example::

        with graphshard.patch_torch() as replaced:
            model, optimizer = accelerator.prepare(model, optimizer)
    """
    is_active = [True]
    pairs = []
    for name in REPLACED:
        theirs = getattr(torch.distributed.fsdp, name)
        pairs.append((theirs, _substitute(theirs, getattr(fsdp, name), is_active)))
    replaced = {place for theirs, ours in pairs for place in _replace_everywhere(theirs, ours)}
    try:
        yield tuple(sorted(replaced))
    finally:
        is_active.clear()
        for theirs, ours in pairs:
            _replace_everywhere(ours, theirs)


def _substitute(
    theirs: Callable[..., Any], ours: Callable[..., Any], is_active: list[bool]
) -> Callable[..., Any]:
    """A function of its own, so that modules which import graphshard's inside the block keep it afterwards."""

    @wraps(theirs)  # with its attributes: torch asks ``fully_shard.state``
    def call(*args: Any, **kwargs: Any) -> Any:
        return (ours if is_active else theirs)(*args, **kwargs)

    return call


def _replace_everywhere(old: Callable[..., Any], new: Callable[..., Any]) -> list[str]:
    """Replaces ``old`` by ``new`` in the loaded modules; returns where."""
    places = []
    for module_name, module in list(sys.modules.items()):
        # Not by getattr: it would import what packages import when it is asked for.
        if not isinstance(module, ModuleType) or module_name.partition(".")[0] == "graphshard":
            continue
        for name in [name for name, value in list(vars(module).items()) if value is old]:
            setattr(module, name, new)
            places.append(f"{module_name}.{name}")
    return places
