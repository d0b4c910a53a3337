"""All-gather extensions: tensor subclasses that define what is gathered and what the full parameter is.

A parameter may hold a tensor subclass, a quantised weight for instance, with the methods ``fsdp_pre_all_gather`` and
``fsdp_post_all_gather``, as in FSDP2. Its shards are of that subclass. The first method turns the shard into plain
tensors to gather. The second turns the gathered tensors into the full parameter. Gradients go to the shard as if the
full parameter itself had been gathered.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..errors import ExtensionError
from ..ir import UnshardCall, padded_shape

_PRE = "fsdp_pre_all_gather"
_POST = "fsdp_post_all_gather"


def has_extension(tensor: Tensor, name: str) -> bool:
    """Whether a parameter's data has a gather extension.

    Raises:
        ExtensionError: (an AssertionError) it has only one of the two methods.
    """
    found = [method for method in (_PRE, _POST) if hasattr(tensor, method)]
    if len(found) == 1:
        raise ExtensionError(
            f"parameter {name}: {type(tensor).__name__} has {found[0]} only; define {_PRE} and {_POST}"
        )
    return bool(found)


def calls_before(
    call: UnshardCall,
    mesh: DeviceMesh,
    stride: Sequence[int],
    module: nn.Module,
    policy: MixedPrecisionPolicy,
) -> tuple[list[UnshardCall], Any]:
    """The gathers that ``call.shard`` asks for, along dim 0 and in their own dtypes, and its metadata.

    Raises:
        ExtensionError: (an AssertionError) ``fsdp_pre_all_gather`` takes neither 1 nor 5 arguments, or its inputs for a
            shard that lacks rows do not have the padded shape, as those of other ranks do.
    """
    method = getattr(call.shard, _PRE)
    signature = inspect.signature(method)
    size = torch.Size(call.shape)
    arguments = (mesh, size, tuple(stride), module, policy)
    if len(signature.parameters) not in (1, 5):
        raise ExtensionError(
            f"parameter {call.name}: {_PRE}{signature} must take (mesh) or "
            "(mesh, outer_size, outer_stride, module, mp_policy)"
        )
    inputs, metadata = method(*arguments[: len(signature.parameters)])
    padded = padded_shape(call.shape, call.dim, call.group_size)
    if list(call.shard.shape) != padded and any(list(value.shape) != padded for value in inputs):
        raise ExtensionError(
            f"parameter {call.name} of shape {tuple(call.shape)} is cut unevenly over {call.group_size} ranks: "
            f"{_PRE} must return inputs of the padded shape {tuple(padded)}, not "
            f"{[tuple(value.shape) for value in inputs]}"
        )
    calls = []
    for value in inputs:
        plain = value.view(-1) if value.ndim == 0 else value
        shape = [plain.shape[0] * call.group_size, *plain.shape[1:]]
        calls.append(call._replace(shard=plain, shape=shape, dim=0, dtype=None))
    return calls, metadata


def full_after(shard: Tensor, gathered: Sequence[Tensor], metadata: Any, call: UnshardCall) -> Tensor:
    """The full parameter that the shard makes of the gathered tensors, without padding."""
    full, _ = getattr(shard, _POST)(tuple(gathered), metadata, call.dtype or shard.dtype)
    return full if full.shape == torch.Size(call.shape) else full.narrow(0, 0, call.shape[0])
