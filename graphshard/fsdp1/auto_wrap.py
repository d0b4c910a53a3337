"""Auto-wrap policies: which modules below the outermost one get a wrapper of their own.

The policies are torch's own: ``ModuleWrapPolicy``, ``CustomPolicy``, and the functions of
``torch.distributed.fsdp.wrap``. The wrap of a module is a function that the caller gives.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from torch import nn

from .._compat_fsdp1 import classes_in_full_precision, is_policy_object, run_policy
from ..errors import OptionTypeError, ShardingError
from .options import Options
from .wrapper_state import state_of

#: Wraps a module with options; ``keeps_precision`` for a module that mixed precision leaves out.
Wrap = Callable[..., nn.Module]


def auto_wrap(
    root: nn.Module,
    options: Options,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    wrap: Wrap,
) -> None:
    """Replaces the modules below ``root`` that the policy chooses by ``wrap(module, options, keeps_precision)``.

    Raises:
        ShardingError: (a ValueError) a module below the root is wrapped already.
        OptionTypeError: (a TypeError) the policy cannot be called.
    """
    wrapped = [
        path or "the module itself" for path, each in root.named_modules() if state_of(each) is not None
    ]
    if wrapped:
        raise ShardingError(
            f"FullyShardedDataParallel: auto_wrap_policy is for a model without wrappers, but {', '.join(wrapped[:5])} "
            "is one already; leave out the policy, or wrap all modules by it"
        )
    policy = options.auto_wrap_policy
    inner = replace(options, auto_wrap_policy=None, ignored_modules=None, ignored_states=ignored_params)
    if is_policy_object(policy):
        arguments = {each.name: getattr(inner, each.name) for each in fields(inner)}
        chosen = {
            module: Options.of(kwargs)
            for module, kwargs in run_policy(policy, root, ignored_modules, arguments).items()
        }
    elif callable(policy):
        chosen = dict.fromkeys(_chosen_by_function(root, policy, ignored_modules, ignored_params), inner)
    else:
        raise OptionTypeError(
            f"FullyShardedDataParallel: auto_wrap_policy is a {type(policy).__name__}; give a policy of "
            "torch.distributed.fsdp.wrap, or a function (module, recurse, nonwrapped_numel) -> bool"
        )
    precise = _in_full_precision(root, options, ignored_modules)
    chosen.pop(root, None)
    for module in precise - {root}:
        chosen[module] = replace(chosen.get(module, inner), mixed_precision=None)
    _replace_all(root, chosen, precise, wrap)


def _chosen_by_function(
    root: nn.Module,
    policy: Callable[..., bool],
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
) -> Iterator[nn.Module]:
    """The modules that a function chooses.

    It is asked first whether to go below a module, with the elements of all parameters below, and then whether to wrap
    the module, with the elements that are left.
    """

    def visit(module: nn.Module) -> Iterator[tuple[nn.Module, int]]:
        total = sum(param.numel() for param in module.parameters() if param not in ignored_params)
        if not policy(module=module, recurse=True, nonwrapped_numel=total):
            return
        taken = 0
        for child in module.children():
            if child not in ignored_modules:
                for found, numel in visit(child):
                    taken += numel
                    yield found, numel
        if module is not root and policy(module=module, recurse=False, nonwrapped_numel=total - taken):
            yield module, total - taken

    yield from dict.fromkeys(module for module, _ in visit(root))


def _in_full_precision(root: nn.Module, options: Options, ignored_modules: set[nn.Module]) -> set[nn.Module]:
    """The modules that mixed precision leaves out; a warning lists their classes."""
    if options.mixed_precision is None:
        return set()
    classes = classes_in_full_precision(options.mixed_precision)
    found = {each for each in root.modules() if isinstance(each, classes) and each not in ignored_modules}
    if found:
        names = ", ".join(sorted({type(each).__name__ for each in found}))
        warnings.warn(
            f"FullyShardedDataParallel: mixed_precision with auto_wrap_policy: modules of type {names} get wrappers of "
            "their own, without mixed precision",
            stacklevel=4,
        )
    return found


def _replace_all(
    root: nn.Module, chosen: dict[nn.Module, Options], precise: set[nn.Module], wrap: Wrap
) -> None:
    """Wraps inner modules first; a module with several parents is wrapped once."""
    parents: list[tuple[nn.Module, str, nn.Module]] = []
    order: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        seen.add(module)
        for name, child in module._modules.items():
            if child is not None:
                parents.append((module, name, child))
                if child not in seen:
                    visit(child)
        order.append(module)

    visit(root)
    for module in order:
        if module in chosen:
            wrapper = wrap(module, chosen[module], module in precise)
            for parent, name, child in parents:
                if child is module:
                    setattr(parent, name, wrapper)
