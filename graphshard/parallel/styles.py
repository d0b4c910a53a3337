"""Plans of others as placements: torch's ``ParallelStyle`` objects, and the words of Hugging Face's ``tp_plan``.

A style names a module. What its hooks would do to the module's values is stated as placements of these values; the
module itself, and the model around it, stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from .held_values import Held, argument_names

#: Hugging Face's words, and the styles that they stand for.
_WORDS: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel(),
    "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
    "sequence_parallel": SequenceParallel(),
}


@dataclass(slots=True, kw_only=True)
class Stated:
    """What a plan says: placements by name of a parameter, or of a module."""

    parameters: dict[str, Placement] = field(default_factory=dict)
    inputs: dict[str, Held] = field(default_factory=dict)
    outputs: dict[str, Placement] = field(default_factory=dict)

    def texts(self) -> list[str]:
        """A line for each statement, with "*" for numbers in names."""
        named = (("", self.parameters), ("inputs of ", self.inputs), ("outputs of ", self.outputs))
        lines = (f"{what}{folded(name)}: {each!r}" for what, stated in named for name, each in stated.items())
        return list(dict.fromkeys(lines))


def folded(path: str) -> str:
    """A path with "*" for numbers."""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def read_styles(styles: Mapping[str, Any], modules: Mapping[str, nn.Module], problems: list[str]) -> Stated:
    """The placements that styles stand for.

    Args:
        styles: a style, or a word of Hugging Face, by name of a module.
        modules: the modules of the model by name.
        problems: gets a sentence for each style that cannot be read.
    """
    stated = Stated()
    for name, given in styles.items():
        style = _WORDS.get(given) if isinstance(given, str) else given
        taken = argument_names(modules[name])
        if (number := _num_inputs(style)) > len(taken):
            problems.append(
                f"module {name!r} ({type(modules[name]).__name__}): {type(style).__name__} has layouts for {number} "
                f"arguments, but its forward takes {', '.join(taken) or 'nothing'}"
            )
        elif not _read(style, name, modules[name], stated):
            words = ", ".join(_WORDS)
            problems.append(
                f"module {name!r} ({type(modules[name]).__name__}): {given!r} is no style for it; give "
                "ColwiseParallel, RowwiseParallel (linear layers, embeddings), SequenceParallel, PrepareModuleInput or "
                f"PrepareModuleOutput, or a word: {words}; or name its parameters"
            )
    return stated


def _num_inputs(style: Any) -> int:
    """How many arguments of its module a style names by position."""
    if type(style) is PrepareModuleInputOutput:
        return _num_inputs(style.prepare_module_input)
    if type(style) is PrepareModuleInput:
        return len(style.desired_input_layouts or ())
    return int(type(style) is SequenceParallel)


def _read(style: Any, name: str, module: nn.Module, stated: Stated) -> bool:
    """Adds what one style says; False if it is none for the module."""
    if type(style) in (ColwiseParallel, RowwiseParallel):
        return _read_layer(style, name, module, stated)
    if type(style) is SequenceParallel:
        first = argument_names(module)[0]
        stated.inputs[name] = {first: style.sequence_sharding[0]}
        stated.outputs[name] = style.sequence_sharding[0]
        return True
    if type(style) is PrepareModuleInputOutput:
        inner = (style.prepare_module_input, style.prepare_module_output)
        return all([_read(each, name, module, stated) for each in inner])
    if type(style) is PrepareModuleInput:
        by_name = dict(zip(argument_names(module), style.desired_input_layouts or (), strict=False))
        wanted = {**by_name, **style.desired_input_kwarg_layouts}
        stated.inputs[name] = {each: layout for each, layout in wanted.items() if layout is not None}
        return True
    if type(style) is PrepareModuleOutput:
        stated.outputs[name] = style.desired_output_layouts[0]
        return len(set(style.desired_output_layouts)) == 1
    return False


def _read_layer(style: Any, name: str, module: nn.Module, stated: Stated) -> bool:
    is_colwise = type(style) is ColwiseParallel
    if isinstance(module, nn.Linear):
        stated.parameters[f"{name}.weight"] = Shard(0 if is_colwise else 1)
        if module.bias is not None:
            stated.parameters[f"{name}.bias"] = Shard(0) if is_colwise else Replicate()
    elif isinstance(module, nn.Embedding):
        stated.parameters[f"{name}.weight"] = Shard(1 if is_colwise else 0)
    else:
        return False
    output = style.output_layouts[0]
    if is_colwise and isinstance(module, nn.Linear):
        stated.inputs[name] = {argument_names(module)[0]: Replicate()}
    if output != (Shard(-1) if is_colwise else Replicate()):
        stated.outputs[name] = output
    return True


def is_style(given: Any) -> bool:
    """Whether an entry of a plan is a style for modules, and not a placement for parameters."""
    return isinstance(given, (str, ParallelStyle))
