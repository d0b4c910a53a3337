"""A model with fewer of its repeated blocks, for predictions that grow by the same amount with each block.

A repeated block is a child of a ``ModuleList``, ``Sequential`` or ``ModuleDict`` with number names, all of one class
and with equal parameters. Experts inside a block are no blocks of their own.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

#: Fewer blocks are predicted as they are.
_LEAST_BLOCKS = 4


def num_repeated_blocks(model: nn.Module) -> int:
    """The number of blocks in each stack of equal blocks; 0 without a stack, or if stacks differ."""
    lengths = {len(stack._modules) for stack in _stacks(model).values()}
    return lengths.pop() if len(lengths) == 1 else 0


def stack_paths(model: nn.Module) -> tuple[str, ...]:
    """The paths of the stacks of equal blocks; () where :func:`num_repeated_blocks` is 0."""
    return tuple(_stacks(model)) if num_repeated_blocks(model) else ()


def with_blocks(model: nn.Module, num_blocks: int) -> nn.Module:
    """A copy of the model that has only the first blocks of each stack; its parameters are those of the model."""
    stacks = _stacks(model)
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for stack in stacks.values():
        dropped = list(stack._modules.values())[num_blocks:]
        memo.update((id(block), block) for block in dropped)
    short = copy.deepcopy(model, memo)
    for path in stacks:
        own = short.get_submodule(path)
        own._modules = type(own._modules)(list(own._modules.items())[:num_blocks])
    return short


def _stacks(model: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        is_inside = any(not other or path.startswith(f"{other}.") for other in found)
        if (
            isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
            and not is_inside
            and _is_stack(module)
        ):
            found[path] = module
    return found


def _is_stack(module: nn.Module) -> bool:
    names = list(module._modules)
    kinds = {_kind(block) for block in module._modules.values() if block is not None}
    is_long = len(names) >= _LEAST_BLOCKS and names == [str(number) for number in range(len(names))]
    return is_long and len(kinds) == 1 and any(True for _ in module.parameters())


def _kind(block: nn.Module) -> Any:
    parameters = [
        (name, param.shape, param.dtype, param.requires_grad) for name, param in block.named_parameters()
    ]
    return type(block), tuple(parameters)
