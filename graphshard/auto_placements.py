"""``graphshard.parallelize``: states placements of a model, or has them chosen by cost.

The choice is that of ``graphshard.inspect(placements="auto")``. Every rank makes it from the same arguments. Then the
ranks compare it through the stores of their process groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor.parallel import ParallelStyle

from ._compat_groups import root_mesh
from .coordination import agree_on_group, can_wait_in_compilation, count_in_group, refusing
from .errors import OptionError, ShardingError
from .fsdp.state import refuse_stale_optimizers
from .ir import axis_of
from .parallel import Held, Stated
from .parallel import parallelize as parallelize_as_stated

ModuleT = TypeVar("ModuleT", bound=nn.Module)

#: What ``placements="auto"`` has to know of the machine and the batch.
_NEEDED = ("args", "hardware")


def parallelize(
    module: ModuleT,
    mesh: DeviceMesh,
    placements: Mapping[str, Placement | ParallelStyle | str] | str,
    *,
    inputs: Mapping[str, Held] | None = None,
    outputs: Mapping[str, Placement] | None = None,
    src_data_rank: int | None = 0,
    inspect: Mapping[str, Any] | None = None,
) -> ModuleT:
    """States how a model lies on one mesh axis, in place; call ``fully_shard`` on the other axes afterwards.

    In a pattern "*" stands for one part of a name, and "[qkv]" for one of these letters. Parameters that no pattern
    matches are ``Replicate()``.

    Args:
        module: a plain model, with the code for one device. All ranks of the axis call it with the same batch.
        mesh: the axis, a 1-D mesh with a name: ``mesh["tp"]``.
        placements: ``Shard(dim)`` or ``Replicate()`` by pattern of parameter names; or, by pattern of module names, a
            style of torch (``ColwiseParallel()``) or a word of Hugging Face ("colwise"). So the plan for
            ``parallelize_module`` can be given, and ``model.tp_plan`` of a Hugging Face model. Or the name of a ready
            plan: "llama", "gpt", "vit", and along the sequence "llama-sequence", "gpt-sequence". Or "auto": the
            cheapest by the cost model, chosen with ``inspect``.
        inputs: by pattern of module names ("" for ``module``), how compiled code holds the first argument, or
            placements by argument name. ``Shard(1)`` cuts it along the sequence; ``Replicate()`` gathers it.
        outputs: by pattern of module names, how compiled code holds what the module returns.
        src_data_rank: the rank of the axis whose weights all take; None if they hold the same weights already.
        inspect: with "auto", arguments of :func:`graphshard.inspect` by name, equal on all ranks: ``args`` (inputs of
            one rank) and ``hardware`` at least; ``units``, ``loss``, ``mp_policy`` and ``memory_budget``, say. Without
            ``mesh`` it is that of ``mesh`` and the mesh around it, whose innermost other axis counts as "shard".

    Returns:
        ``module`` itself.

    Raises:
        ShardingError: (a ValueError) lists all: patterns that match nothing or match what another matches, dims that a
            parameter lacks, arguments that a module lacks, parameters that are sharded already, a mesh without a name;
            or a ready plan does not fit the model.
        OptionError: "auto" without what it needs, or with placements of values; ``inspect`` without "auto".
        StaleOptimizerError: (a RuntimeError) an optimizer holds parameters that would be replaced.
        AgreementError: the ranks have chosen differently, or one could not choose.
    """
    stated: Mapping[str, Any] | str | Stated = placements
    if isinstance(placements, str) and placements == "auto":
        if inputs is not None or outputs is not None:
            raise OptionError(
                'parallelize: "auto" chooses inputs and outputs too; leave them out, or name a plan'
            )
        stated = _chosen(module, mesh, inspect or {})
    elif inspect is not None:
        raise OptionError(
            f'parallelize: inspect=... is for placements="auto", not for {placements!r}; leave it out'
        )
    places = list(module.named_parameters(remove_duplicate=False))
    refuse_stale_optimizers(places, "parallelize", num_holders=1)
    return parallelize_as_stated(
        module, mesh, stated, inputs=inputs, outputs=outputs, src_data_rank=src_data_rank
    )


def _chosen(module: nn.Module, mesh: DeviceMesh, given: Mapping[str, Any]) -> Stated:
    from .inspection import choose_placements  # the rooms of inspection take time to import

    if missing := [name for name in _NEEDED if name not in given]:
        raise OptionError(
            f'parallelize: placements="auto" is chosen by prediction and needs {", ".join(missing)}: '
            'inspect={"args": (tokens,), "hardware": "h100-sxm", "units": ["layers.*"]}'
        )
    root = root_mesh(mesh)
    sizes = given.get("mesh") or _sizes(root, mesh)
    groups = [axis_of(root, dim).group_name for dim in range(root.ndim)]
    turns = [count_in_group(group, "placements") for group in groups if can_wait_in_compilation(group)]
    options = {name: value for name, value in given.items() if name not in ("args", "kwargs", "mesh")}
    with refusing(groups, "choose placements"):
        stated = choose_placements(module, given["args"], given.get("kwargs"), mesh=sizes, **options).stated
        for group in groups:
            agree_on_group(group, [f"{turns}: {stated!r}"], what='parallelize(placements="auto")')
    return stated


def _sizes(root: DeviceMesh, mesh: DeviceMesh) -> dict[str, int]:
    """The mesh of a training step: the axes around ``mesh`` are those of ``fully_shard``."""
    assert mesh.mesh_dim_names is not None, "parallelize names its axis"
    (label,) = mesh.mesh_dim_names
    others = [root.size(dim) for dim, name in enumerate(root.mesh_dim_names or ()) if name != label]
    if len(others) > 2 or label in ("shard", "replicate"):
        raise ShardingError(
            f"parallelize: the mesh with axes {', '.join(root.mesh_dim_names or ())} cannot be read as replicate, "
            f"shard and {label}: say it with inspect={{'mesh': {{'shard': 8, 'tp': 8}}, ...}}"
        )
    of_data = (
        dict(zip(("replicate", "shard")[-len(others) :], others, strict=True)) if others else {"shard": 1}
    )
    return {**of_data, label: mesh.size()}
