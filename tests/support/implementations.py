"""The implementations a distributed test runs against, behind two functions.

"fsdp2" is torch's own `fully_shard`, uncompiled: it proves that the test asks for what torch does. "sharded"
is graphshard uncompiled, "compiled" is graphshard through `torch.compile(backend="graphshard")`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

UNCOMPILED = ("fsdp2", "sharded")
EVERY = ("fsdp2", "sharded", "compiled")
GRAPHSHARD = ("sharded", "compiled")


def world_mesh() -> DeviceMesh:
    """All ranks on one mesh axis."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))


def pick_fully_shard(implementation: str) -> Callable[..., nn.Module]:
    """The `fully_shard` of the named implementation."""
    if implementation == "fsdp2":
        from torch.distributed.fsdp import fully_shard
    else:
        from graphshard import fully_shard
    return fully_shard


def pick_fsdp_module(implementation: str) -> type:
    """The class a sharded module is an instance of."""
    if implementation == "fsdp2":
        from torch.distributed.fsdp import FSDPModule
    else:
        from graphshard import FSDPModule
    return FSDPModule


def shard_units(
    implementation: str,
    model: nn.Module,
    units: list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> nn.Module:
    """Shard each unit, then the model itself, over all ranks or those of a mesh; returns the model."""
    fully_shard = pick_fully_shard(implementation)
    mesh = mesh or world_mesh()
    for module in [*units, model]:
        fully_shard(module, mesh=mesh, **options)
    return model


def compile_if_asked(
    implementation: str, model: nn.Module, *, fullgraph: bool = True, **options: Any
) -> Callable[..., Any]:
    """What to call in place of the model: itself, or compiled with the backend's `options`."""
    if implementation != "compiled":
        return model
    return torch.compile(model, backend="graphshard", fullgraph=fullgraph, options=options or None)
