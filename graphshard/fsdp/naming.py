"""Names of parameters and units, as seen from the outermost module of a model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from .unit import SLOTS, UNIT, Unit

#: Attributes under which ``checkpoint_wrapper`` and ``torch.compile`` keep the module they wrap.
_WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})


def relabel(roots: Iterable[nn.Module]) -> None:
    """Names parameters and units as seen from ``roots`` and puts all units below into one tree."""
    roots = list(roots)
    outer: Unit = roots[0].__dict__[UNIT]
    outer.tree.roots = roots
    seen: set[int] = set()
    named: set[int] = set()
    for index, root in enumerate(roots):
        prefix = f"{index}." if len(roots) > 1 else ""
        for wrapped_path, module in root.named_modules():
            path = _without_wrappers(wrapped_path)
            unit = module.__dict__.get(UNIT)
            if unit is not None and unit is not outer and id(unit) not in seen:
                seen.add(id(unit))
                unit.tree, unit.is_root, unit.input_device = outer.tree, False, None
            if unit is not None and unit is not outer:
                unit.label = _label(unit, path, module)
            for name, slot in module.__dict__.get(SLOTS, {}).items():
                if id(slot) not in named:  # tied parameters: the first name, as in named_parameters()
                    named.add(id(slot))
                    slot.name = f"{prefix}{path}.{name}" if path else f"{prefix}{name}"
    outer.tree.max_reductions = max(unit.max_reductions for unit in outer.tree.units())
    for root in roots:
        for module in root.modules():
            for slot in module.__dict__.get(SLOTS, {}).values():
                slot.refresh()


def _without_wrappers(path: str) -> str:
    """The path in the state dict: wrappers that checkpoint or compile a module are no part of it."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def _label(unit: Unit, path: str, module: nn.Module) -> str:
    """The path of the unit's module; the paths of all its modules, joined, for a list unit."""
    if len(unit.modules) == 1 or module is unit.modules[0]:
        return path
    return unit.label if path in unit.label.split("+") else f"{unit.label}+{path}"
