"""``parallelize``: known placements of a plain model's parameters on one axis of a mesh.

The model's code stays as it is. Each parameter becomes a DTensor on the axis; ``fully_shard`` cuts it over its axes
too. In a forward the parameter's attribute is the whole tensor: ``reshard`` of this rank's piece. Compiled, the pass
``propagate_sharding`` computes on pieces instead. Uncompiled, every rank of the axis gathers the parameter and computes
the whole, with the same result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from .._compat_dtensor import drop_foreign_results
from ..errors import ShardingError
from ..ir import READ_WHOLE, axis_of
from .held_values import Axis, Held, argument_names, hold_inputs, hold_outputs
from .names import resolve
from .ready_plans import ready_plan
from .styles import Stated, is_style, read_styles

ModuleT = TypeVar("ModuleT", bound=nn.Module)

#: Also the answer to placements on several axes: a list, or a dict by axis.
_ALLOWED = "Shard(dim) or Replicate(), on the one axis of the mesh"


def parallelize(
    module: ModuleT,
    mesh: DeviceMesh,
    placements: Mapping[str, Placement | ParallelStyle | str] | str | Stated,
    *,
    inputs: Mapping[str, Held] | None = None,
    outputs: Mapping[str, Placement] | None = None,
    src_data_rank: int | None = 0,
) -> ModuleT:
    """:func:`graphshard.parallelize` with placements that are known: no "auto"."""
    problems: list[str] = []
    if mesh.ndim != 1 or mesh.mesh_dim_names is None:
        problems.append(
            f"the mesh must be one named axis, such as mesh['tp'], not {mesh.ndim} dimensions named "
            f"{mesh.mesh_dim_names}"
        )
    stated = state_placements(module, placements, inputs, outputs, problems)
    by_param = {
        id(param): stated.parameters[name]
        for name, param in module.named_parameters(remove_duplicate=False)
        if name in stated.parameters
    }
    drop_foreign_results(mesh)
    _distribute(module, mesh, by_param, src_data_rank)
    label = axis_of(mesh)
    hold_values(module, stated, (label.label, label.size, label.group_name, mesh.get_local_rank()))
    return module


def state_placements(
    module: nn.Module,
    placements: Mapping[str, Placement | ParallelStyle | str] | str | Stated,
    inputs: Mapping[str, Held] | None = None,
    outputs: Mapping[str, Placement] | None = None,
    already: Sequence[str] = (),
) -> Stated:
    """The placements that the arguments of ``parallelize`` state, by name of a parameter or a module.

    Args:
        module, placements, inputs, outputs: of ``parallelize``.
        already: what is wrong besides.

    Raises:
        ShardingError: as :func:`graphshard.parallelize` does.
    """
    problems = list(already)
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    modules = dict(module.named_modules())
    of_parameters: dict[str, Placement] = {}
    if isinstance(placements, Stated):
        plan = placements
    elif isinstance(placements, str):
        plan = ready_plan(placements, module)
    else:
        of_modules = {pattern: each for pattern, each in placements.items() if is_style(each)}
        of_parameters = {pattern: each for pattern, each in placements.items() if pattern not in of_modules}
        plan = read_styles(resolve(of_modules, modules, "module", problems), modules, problems)
    stated = Stated(
        parameters={**plan.parameters, **resolve(of_parameters, names, "parameter", problems)},
        inputs={**plan.inputs, **resolve(inputs or {}, modules, "module", problems)},
        outputs={**plan.outputs, **resolve(outputs or {}, modules, "module", problems)},
    )
    _check_tied(module, stated.parameters, problems)
    _check_parameters(module, stated.parameters, problems)
    _check_arguments(modules, stated.inputs, stated.outputs, problems)
    if problems:
        raise ShardingError("parallelize: " + "; ".join(problems))
    return stated


def hold_values(module: nn.Module, stated: Stated, axis: Axis) -> None:
    """Has compiled code hold the stated inputs and outputs of modules in their placements."""
    modules = dict(module.named_modules())
    for name, held in stated.inputs.items():
        hold_inputs(modules[name], name, held, axis)
    for name, placement in stated.outputs.items():
        hold_outputs(modules[name], name, placement, axis)


def _check_tied(module: nn.Module, chosen: Mapping[str, Placement], problems: list[str]) -> None:
    """A tied parameter has one placement, whichever of its names has it."""
    found: dict[int, tuple[str, Placement]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if name not in chosen:
            continue
        other, placement = found.setdefault(id(param), (name, chosen[name]))
        if placement != chosen[name]:
            problems.append(
                f"{other!r} and {name!r} are one tied parameter, with {placement} and {chosen[name]}: give it one "
                "placement"
            )


def _check_parameters(module: nn.Module, chosen: Mapping[str, Placement], problems: list[str]) -> None:
    placed: list[str] = []
    for name, param in module.named_parameters(remove_duplicate=False):
        if isinstance(param, DTensor) and hasattr(param, READ_WHOLE):
            placed.append(name)
            continue
        if isinstance(param, DTensor):
            problems.append(
                f"parameter {name!r} is a DTensor on {param.device_mesh} already: call parallelize on a plain model, "
                "before fully_shard"
            )
            continue
        placement = chosen.get(name, Replicate())
        if type(placement) not in (Shard, Replicate):
            problems.append(f"parameter {name!r}: {placement!r} must be {_ALLOWED}")
        elif isinstance(placement, Shard) and not -param.ndim <= placement.dim < param.ndim:
            problems.append(
                f"parameter {name!r} of shape {list(param.shape)} has no dim {placement.dim}: give Shard of a dim that "
                "it has, or Replicate()"
            )
    if placed:
        problems.append(
            f"parameter(s) {', '.join(map(repr, placed))} have placements on an axis already, and a graph has them on "
            "one axis beside those of fully_shard: call parallelize once on a plain model, before fully_shard, on one "
            "axis of all the ranks that share a batch"
        )


def _check_arguments(
    modules: Mapping[str, nn.Module],
    taken: Mapping[str, Held],
    returned: Mapping[str, Placement],
    problems: list[str],
) -> None:
    for name, held in taken.items():
        known = argument_names(modules[name])
        by_name = held if isinstance(held, Mapping) else {known[0] if known else "": held}
        if missing := [each for each in by_name if each not in known]:
            problems.append(
                f"inputs: module {name!r} has no argument {', '.join(map(repr, missing)) if known else 'at all'}; "
                f"it takes {', '.join(known) or 'nothing'}: {'name one of these' if known else 'leave it out'}"
            )
        problems += _odd_placements("inputs", name, by_name.values())
    for name, placement in returned.items():
        problems += _odd_placements("outputs", name, [placement])


def _odd_placements(what: str, name: str, placements: object) -> list[str]:
    assert hasattr(placements, "__iter__")
    return [
        f"{what}: module {name!r}: {each!r} must be {_ALLOWED}"
        for each in placements
        if type(each) not in (Shard, Replicate)
    ]


def _distribute(
    module: nn.Module, mesh: DeviceMesh, by_param: Mapping[int, Placement], src_data_rank: int | None
) -> None:
    replaced: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if param is None:
                continue
            if id(param) not in replaced:
                placement = by_param.get(id(param), Replicate())
                if isinstance(placement, Shard):
                    placement = Shard(placement.dim % param.ndim)
                placed = distribute_tensor(param.detach(), mesh, [placement], src_data_rank=src_data_rank)
                replaced[id(param)] = nn.Parameter(placed, requires_grad=param.requires_grad)
                _take_over(replaced[id(param)], param)
                setattr(replaced[id(param)], READ_WHOLE, True)
            owner._parameters[name] = replaced[id(param)]
            # Conversions and copies of the model drop attributes of parameters.
            owner.__dict__.setdefault(READ_WHOLE, set()).add(name)


def _take_over(placed: nn.Parameter, param: nn.Parameter) -> None:
    """Gives a parameter the attributes and hooks that were set on the one that it replaces."""
    if type(param) is nn.Parameter:  # attributes of another class may be its own
        for key, value in vars(param).items():
            vars(placed).setdefault(key, value)
    if param._backward_hooks is not None:
        placed._backward_hooks = param._backward_hooks
    if param._post_accumulate_grad_hooks is not None:
        placed._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
