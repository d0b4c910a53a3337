"""The weights of a model whose placements a search chooses, and what a choice states.

Weights whose products read the same value and that have one shape are chosen together: queries, keys and values, or the
two expanding layers of a gated MLP. So are those of equal blocks. A bias lies as the output of its weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from ..ir import aten, is_view
from .styles import Stated, folded

#: Ops that multiply with a weight or select from one.
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.embedding.default)
_CASTS = (aten._to_copy.default, aten.clone.default)

#: The most groups of one part whose choices are tried in all combinations.
_MOST_TOGETHER = 3

Choice = tuple[Placement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """Weights of one block, or outside of all blocks, that are chosen together.

    Attributes:
        part: path of the module around their layers, with "*" for numbers.
        names: their names, with "*" for numbers.
        options: the placements to choose from.
    """

    part: str
    names: tuple[str, ...]
    options: tuple[Placement, ...]


def weight_groups(model: nn.Module, inputs: Mapping[str, fx.Node], num_ranks: int) -> tuple[WeightGroup, ...]:
    """The groups of a model, in the order of the graph.

    Args:
        model: the model.
        inputs: its parameters by name, in a graph that computes with whole ones.
        num_ranks: ranks of the axis. A dim with fewer rows is not cut.
    """
    found: dict[Any, list[str]] = {}
    for name, node in inputs.items():
        weight = model.get_parameter(name)
        if weight.ndim == 2:
            read = _reads_with(node)
            key = (_part(name), tuple(weight.shape), name if read is None else read)
            found.setdefault(key, []).append(folded(name))
    groups: dict[tuple[str, tuple[str, ...]], WeightGroup] = {}
    for (part, shape, _), names in found.items():
        cuts = [Shard(dim) for dim in (0, 1) if shape[dim] >= num_ranks]
        own = tuple(dict.fromkeys(names))
        groups[part, own] = WeightGroup(part=part, names=own, options=(Replicate(), *cuts))
    return tuple(groups.values())


def parts_of(groups: Sequence[WeightGroup]) -> list[list[int]]:
    """Indices of the groups that are tried in all combinations: those of one part, a few at a time."""
    by_part: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        by_part.setdefault(group.part, []).append(index)
    return [
        indices[start : start + _MOST_TOGETHER]
        for indices in by_part.values()
        for start in range(0, len(indices), _MOST_TOGETHER)
    ]


def choice_of(groups: Sequence[WeightGroup], stated: Stated) -> Choice:
    """The choice that a plan makes for each group, by its first weight."""
    by_name = {folded(name): placement for name, placement in stated.parameters.items()}
    return tuple(by_name.get(group.names[0], Replicate()) for group in groups)


def parameters_of(model: nn.Module, groups: Sequence[WeightGroup], choice: Choice) -> dict[str, Placement]:
    """The placements of a model's parameters for a choice, without those that are replicated."""
    chosen = {
        name: placement for group, placement in zip(groups, choice, strict=True) for name in group.names
    }
    parameters = dict(model.named_parameters())
    found: dict[str, Placement] = {}
    for name, weight in parameters.items():
        placement = chosen.get(folded(name))
        if not isinstance(placement, Shard):
            continue
        found[name] = placement
        bias = parameters.get(f"{name.removesuffix('weight')}bias") if name.endswith("weight") else None
        if bias is not None and bias.shape == weight.shape[placement.dim : placement.dim + 1]:
            owner = model.get_submodule(name.rpartition(".")[0])
            if placement.dim == (1 if type(owner).__name__ == "Conv1D" else 0):
                found[f"{name.removesuffix('weight')}bias"] = Shard(0)
    return found


def described(groups: Sequence[WeightGroup], choice: Choice) -> Mapping[str, str]:
    """The choice as text, by the names of each group."""
    return {", ".join(group.names): repr(each) for group, each in zip(groups, choice, strict=True)}


def _part(name: str) -> str:
    """The module around the layer of a weight; outside of all blocks, the layer itself."""
    path = folded(name)
    layer = path.rpartition(".")[0]
    return layer.rpartition(".")[0] if "*" in path else layer


def _reads_with(weight: fx.Node) -> str | None:
    """The name of the value that the first product with a weight reads; None without such a product."""
    order = {node: index for index, node in enumerate(weight.graph.nodes)}
    reached, products = [weight], []
    for node in reached:  # grows on the way
        for user in node.users:
            if user.target in _PRODUCTS:
                products.append((order[user], user, node))
            elif user not in reached and (is_view(user) or user.target in _CASTS):
                reached.append(user)
    if not products:
        return None
    _, product, own = min(products, key=lambda found: found[0])
    (other, *_) = [each for each in reversed(product.all_input_nodes) if each is not own] or [own]
    if product.target is aten.addmm.default:
        other = product.args[1] if product.args[2] is own else product.args[2]
    while is_view(other) or other.target in _CASTS:
        other = other.args[0]
    return str(other.name)
