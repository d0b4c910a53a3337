"""Bytes of a rank that live through a whole step: shards, gradients, the optimizer's state, inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from ..capture import CapturedStep
from ..ir import ParameterBinding, output_values, padded_shape, stored_bytes, tensor_bytes
from ..pipeline import PassContext
from .optimizers import OptimizerKind


def persistent_bytes(module: nn.Module, captured: CapturedStep, optimizer: OptimizerKind) -> dict[str, int]:
    """Bytes of a rank that live through the whole step, by category.

    Two further entries are for the optimizer: "trained" is the bytes of the shards that it updates, "elements" the
    number of their elements.
    """
    context = captured.context.for_backward()
    return _persistent(module, context, output_values(captured.backward.graph), captured.forward, optimizer)


def persistent_bytes_of_joint(
    module: nn.Module, gm: fx.GraphModule, context: PassContext, optimizer: OptimizerKind
) -> dict[str, int]:
    """:func:`persistent_bytes` from the joint graph at level 1."""
    return _persistent(module, context, output_values(gm.graph), gm, optimizer)


def _persistent(
    module: nn.Module,
    context: PassContext,
    outputs: Sequence[Any],
    forward: fx.GraphModule,
    optimizer: OptimizerKind,
) -> dict[str, int]:
    bindings = {binding.name: binding for binding in context.parameters}
    parameters = trained = elements = gradient_bytes = 0
    num_shards = next((binding.group_size for binding in bindings.values()), 1)
    for name, param in module.named_parameters():
        binding = bindings.get(name)
        dim = 0 if binding is None else binding.dim
        shape = padded_shape(_own_shape(param, binding), dim, num_shards) if param.dim() else [1]
        numel = torch.Size(shape).numel()
        if binding is None or binding.placeholder not in context.held:
            parameters += numel * param.element_size()
        gradient = context.gradient_of(binding, outputs) if binding is not None else None
        if gradient is not None:
            trained += numel * param.element_size()
            elements += numel
            gradient_bytes += tensor_bytes(gradient.meta["val"])
    placeholders = forward.graph.find_nodes(op="placeholder")
    parameters += sum(stored_bytes(node.meta["val"]) for node in placeholders if node.name in context.held)
    inputs = [
        node for node in placeholders
        if context.binding(node.name) is None and node.name not in context.held
        and not node.name.startswith("tangents_")
    ]  # fmt: skip
    return {
        "parameters": parameters,
        "optimizer": optimizer.num_states * trained,
        "gradients": gradient_bytes,
        "inputs": sum(stored_bytes(node.meta.get("val")) for node in inputs),
        "trained": trained,
        "elements": elements,
    }


def _own_shape(param: nn.Parameter, binding: ParameterBinding | None) -> Sequence[int]:
    """The shape of what a rank gathers: a piece, if a further axis of the mesh cuts the parameter."""
    if binding is None:
        return param.shape
    return binding.shape[:-1] if param.is_complex() else binding.shape


def always_bytes(persistent: Mapping[str, int], micro_batches: int) -> dict[str, int]:
    """Bytes by category that live outside of a half; gradients only if earlier micro-batches left some."""
    return {
        "parameters": persistent["parameters"],
        "optimizer": persistent["optimizer"],
        "gradients": persistent["gradients"] if micro_batches > 1 else 0,
        "inputs": persistent["inputs"],
    }
