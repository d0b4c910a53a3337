"""Graph text: a graph as lines that are equal on every rank and every machine.

Each node is one line, with a dtype and a shape for its value. Parameters show name and placement, collectives the label
of their mesh axis. Raw group names and device indices never appear. Goldens, diffs, fingerprints, dumps and errors use
this text, so it shows whatever changes behaviour: strides that are not contiguous, recompute tags, every argument.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from .collectives import group_name, is_collective, operands, setting, short_name
from .mesh import MeshLayout
from .node_args import call_arguments
from .params import ParameterBinding, ReduceGradCall, UnshardCall
from .piece_ops import KEEP_PIECE, SPREAD
from .reshard import RESHARD, ReshardCall, bytes_sent
from .shard_ops import REDUCE_GRAD, UNSHARD
from .tensor_sizes import is_contiguous

#: The arguments of the shard ops that are group names; not printed, since the labels of their axes are.
_GROUP_ARGUMENTS = ("group_name", "replicate_group", "reshard_group", "reduce_group")
_CALLS: dict[Any, Any] = {UNSHARD: UnshardCall, REDUCE_GRAD: ReduceGradCall}
_POSITIONAL = ("shard", "grad", "handle", "name")
_SILENT: dict[str, Any] = {
    "unreduced": None,
    "partial": None,
    "replicate_axis": "",
    "replicate_size": 1,
    "reduce_dtype": None,
    "divide_factor": None,
    "force_sum": False,
    "all_reduce": True,
    "device": None,
    "custom": "",
    "forward_prefetch": "",
    "backward_prefetch": "",
    "reshard_fixed": False,
    "max_reductions": 0,
    "row_offset": -1,
}
_INPUT_NAME = re.compile(r"(primals|tangents|arg\d+)_\d+")
_TAGS = {CheckpointPolicy.MUST_RECOMPUTE: "recompute", CheckpointPolicy.MUST_SAVE: "save"}


def graph_text(
    gm: fx.GraphModule, *, mesh: MeshLayout | None = None, parameters: tuple[ParameterBinding, ...] = ()
) -> str:
    """The graph as text, one line for each node.

    Args:
        gm: any FX graph; dtypes and shapes come from ``meta["val"]``.
        mesh: maps group names to axis labels; groups it does not have become ``group0``, ``group1``, ... in the order
            of their first use.
        parameters: the placeholders that are shards of parameters.
    """
    return "\n".join(_GraphPrinter(mesh or MeshLayout(), parameters).lines(gm)) + "\n"


def node_names(gm: fx.GraphModule) -> dict[fx.Node, str]:
    """The name of each node's value in :func:`graph_text`; the output node has none."""
    printer = _GraphPrinter(MeshLayout(), ())
    printer.lines(gm)
    return printer.names


def text_fingerprint(text: str) -> str:
    """SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def value_text(value: Any) -> str:
    """``f32[4, 8]`` for a tensor, with strides if it is not contiguous; tuples recursively."""
    if isinstance(value, torch.Tensor):
        text = f"{dtype_text(value.dtype)}{list(value.shape)}"
        if value.layout is torch.strided and not is_contiguous(value):
            text += f"@{tuple(value.stride())}".replace(" ", "")
        return text
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(value_text, value)) + ")"
    return "none" if value is None else type(value).__name__


def dtype_text(dtype: torch.dtype) -> str:
    """``f32`` for ``torch.float32``, ``bf16``, ``i64``, ``bool``, ..."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


def collective_text(node: fx.Node, labels: Mapping[str, str]) -> str:
    """A collective as all ranks must issue it: op, input types, reduction, axis label."""
    inputs = ", ".join(value_text(arg.meta["val"]) for arg in operands(node))
    return f"{short_name(node)}({', '.join(filter(None, (inputs, setting(node))))}) over {labels[group_name(node)]}"


def collective_sequence(gm: fx.GraphModule, mesh: MeshLayout | None = None) -> list[str]:
    """The collectives of a graph in the order of issue, as text that must be equal on all ranks."""
    labels = group_labels(gm, mesh or MeshLayout())
    return [collective_text(node, labels) for node in gm.graph.nodes if is_collective(node)]


def group_labels(gm: fx.GraphModule, mesh: MeshLayout) -> dict[str, str]:
    """The axis label of each group name in a graph; groups that ``mesh`` does not have are numbered."""
    labels = {axis.group_name: axis.label for axis in mesh.axes}
    for node in gm.graph.nodes:
        if is_collective(node):
            labels.setdefault(group_name(node), f"group{len(labels) - len(mesh.axes)}")
    return labels


class _GraphPrinter:
    """Names values and writes lines; one object for each call of :func:`graph_text`."""

    def __init__(self, mesh: MeshLayout, parameters: tuple[ParameterBinding, ...]) -> None:
        self._mesh = mesh
        self._bindings = {binding.placeholder: binding for binding in parameters}
        self.names: dict[fx.Node, str] = {}
        self._counts: Counter[str] = Counter()
        self._op_names: dict[Any, str] = {}

    def lines(self, gm: fx.GraphModule, indent: str = "") -> list[str]:
        labels = group_labels(gm, self._mesh)
        result = []
        for node in gm.graph.nodes:
            result.append(indent + self._line(node, labels))
            for argument in node.all_input_nodes if node.op == "call_function" else ():
                submodule = getattr(gm, str(argument.target), None) if argument.op == "get_attr" else None
                if isinstance(submodule, fx.GraphModule):
                    result.extend(self.lines(submodule, indent + "    "))
        return result

    def _line(self, node: fx.Node, labels: Mapping[str, str]) -> str:
        if node.op == "output":
            return f"return {self._value(node.args[0])}"
        name = self.names[node] = self._name(node)
        tag = _TAGS.get(node.meta.get("recompute"))
        head = f"{name}: {value_text(node.meta.get('val'))}"
        return f"{head} = {self._body(node, labels)}" + (f"  !{tag}" if tag else "")

    def _name(self, node: fx.Node) -> str:
        if node.op == "placeholder":  # a saved value has the name of its op: mark it
            return f"%{node.name}" if _INPUT_NAME.fullmatch(node.name) else f"%saved.{node.name}"
        stem = self._op_name(node.target)
        self._counts[stem] += 1
        return f"%{stem}_{self._counts[stem] - 1}"

    def _op_name(self, target: Any) -> str:
        if target not in self._op_names:
            self._op_names[target] = _op_name(target)
        return self._op_names[target]

    def _body(self, node: fx.Node, labels: Mapping[str, str]) -> str:
        if node.op == "placeholder":
            binding = self._bindings.get(node.name)
            if binding is None:
                return "input"
            placement = (
                f"Shard({binding.dim}) of {list(binding.shape)} over {binding.axis}={binding.group_size}"
            )
            if binding.replicate_size > 1:
                placement += f", copied over {binding.replicate_axis}={binding.replicate_size}"
            return f"shard {binding.name} {placement}, unit {binding.unit}"
        if node.op == "get_attr":
            return f"attribute {node.target}"
        args, named, suffix = list(node.args), dict(node.kwargs), ""
        if is_collective(node):
            suffix = f", axis={labels[group_name(node)]}"
            arguments = {key: value for key, value in call_arguments(node).items() if key != "group_name"}
            named = {key: arguments.pop(key) for key in ("out",) if key in arguments}
            args = list(arguments.values())
        elif node.target in (SPREAD, KEEP_PIECE):
            suffix = f", axis={self._axis_label(args.pop())}"
        parts = [self._value(arg) for arg in args]
        if node.target is RESHARD:
            parts = self._reshard_arguments(ReshardCall(*args), node.args[0].meta["val"].dtype)
        if node.target in _CALLS:
            parts = self._shard_op_arguments(_CALLS[node.target](*args))
        parts += [f"{key}={self._value(value)}" for key, value in named.items()]
        return f"{self._op_name(node.target)}({', '.join(parts)}{suffix})"

    def _axis_label(self, group: str) -> str:
        axis = self._mesh.find(group)
        return axis.label if axis is not None else "group"

    def _reshard_arguments(self, call: ReshardCall, dtype: torch.dtype) -> list[str]:
        sent = bytes_sent(call, dtype)
        return [
            self._value(call.value),
            f"{call.src} -> {call.dst}",
            f"shape={self._value(list(call.shape))}",
            f"axis={call.axis}={call.group_size}",
            *([f"sends={sent} bytes"] if sent is not None else []),
            *(["placed"] if call.placed else []),
        ]

    def _shard_op_arguments(self, call: UnshardCall | ReduceGradCall) -> list[str]:
        """Tensors by position, other arguments by name, settings only if they are not the default."""
        defaults = dict(_SILENT, dtype=None) if isinstance(call, UnshardCall) else _SILENT
        parts = []
        for name, value in zip(call._fields, call, strict=True):
            if name in _GROUP_ARGUMENTS or (name in defaults and value == defaults[name]):
                continue
            parts.append(self._value(value) if name in _POSITIONAL else f"{name}={self._value(value)}")
        return parts

    def _value(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.names.get(value, f"%{value.name}")
        if isinstance(value, (tuple, list)):
            return "[" + ", ".join(map(self._value, value)) + "]"
        if isinstance(value, slice):
            return ":".join(self._value(part) for part in (value.start, value.stop, value.step))
        if isinstance(value, torch.device):
            return value.type
        if isinstance(value, torch.dtype):
            return dtype_text(value)
        return repr(value) if isinstance(value, str) else str(value)


def _op_name(target: Any) -> str:
    """``mm`` for ``aten.mm.default``; with the overload unless that is ``default`` or ``Tensor``."""
    if isinstance(target, torch._ops.OpOverload):
        _, name, overload = str(target).split(".")
        return name if overload in ("default", "Tensor") else f"{name}.{overload}"
    return str(getattr(target, "__name__", target))
