"""AOTAutograd's cache and torch's pickler of graphs; private torch names, as in ``_compat``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._functorch._aot_autograd.autograd_cache import (  # checked: 2.11, 2.13, 2.14
    BypassAOTAutogradCache,
    FXGraphCacheMiss,
)
from torch._guards import TracingContext, detect_fake_mode  # checked: 2.13
from torch._inductor.output_code import OutputCode  # checked: 2.11, 2.13, 2.14
from torch._library.custom_ops import OPDEFS  # checked: 2.11, 2.13, 2.14
from torch._library.fake_class_registry import FakeScriptObject  # checked: 2.13
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode  # checked: 2.13
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx._graph_pickler import GraphPickler, Options  # checked: 2.11, 2.13, 2.14
from torch.utils._python_dispatch import _disable_current_modes  # checked: 2.13

__all__ = [
    "BypassAOTAutogradCache",
    "FXGraphCacheMiss",
    "OutputCode",
    "bytes_of",
    "forget_hashes",
    "functions_of_op",
    "overloads_of",
    "pickled",
    "place_in_meshes",
    "registrations_of_op",
    "unpickled",
]


def pickled(value: Any, node_keys: frozenset[str]) -> bytes:
    """A value that may hold graphs and fake tensors, and what AOTAutograd knows of the half that is compiled now.

    Args:
        value: plain data, graphs and fake tensors.
        node_keys: the entries of ``node.meta`` that are written.
    """
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    options = Options(ops_filter=None, node_metadata_key_filter=node_keys.__contains__)
    return GraphPickler.dumps((value, metadata), options)


def unpickled(data: bytes) -> Any:
    """Reads :func:`pickled`; what AOTAutograd knew of the half is known in the context of the caller then."""
    context = TracingContext.try_get()
    mode = (context.fake_mode if context is not None else None) or detect_fake_mode() or FakeTensorMode()
    value, metadata = GraphPickler.loads(data, mode)
    if context is not None and context.fw_metadata is None:
        context.fw_metadata = metadata
    return value


def bytes_of(value: torch.Tensor) -> bytes:
    """What a real tensor holds, also while a graph is traced with fake ones."""
    with _disable_current_modes():
        return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def forget_hashes(inputs: Sequence[Any]) -> None:
    """Lets meshes among a graph's inputs work out their hashes anew when they are next asked (checked: 2.13).

    The key of AOTAutograd's cache is a pickle of these inputs, and a mesh keeps its hash, which no other process has.
    """
    for mesh in _meshes_of(inputs):
        for each in _family(mesh):
            each._hash = None


def place_in_meshes(inputs: Sequence[Any]) -> str:
    """What traced code may take of the meshes of a graph's inputs and of DTensors among them; "" if there are none.

    These are this rank, the ranks and names of each mesh and of the one it is cut out of, and its process groups
    (checked: 2.13).
    """
    with _disable_current_modes():  # the tensors of ranks are real
        texts = [[_mesh_text(each) for each in _family(mesh)] for mesh in _meshes_of(inputs)]
    return f"rank {dist.get_rank()} of {texts}" if texts else ""


def _meshes_of(inputs: Sequence[Any]) -> list[DeviceMesh]:
    values = [each.real_obj if isinstance(each, FakeScriptObject) else each for each in inputs]
    values = [each.device_mesh if isinstance(each, DTensor) else each for each in values]
    return [each for each in values if isinstance(each, DeviceMesh)]


def _family(mesh: DeviceMesh) -> tuple[DeviceMesh, ...]:
    """A mesh, the one that it is cut out of, and what that one was flattened to."""
    root = mesh._get_root_mesh()
    return (mesh, root, *root._flatten_mapping.values())


def _mesh_text(mesh: DeviceMesh) -> tuple[Any, ...]:
    groups = getattr(mesh, "_dim_group_names", None)  # none, of a mesh without groups
    return mesh.device_type, mesh.mesh_dim_names, mesh.mesh.tolist(), groups


def registrations_of_op(op: OpOverload) -> str:
    """What the dispatcher knows of an op; each kernel with the file and the line that registered it (checked: 2.13)."""
    return torch._C._dispatch_dump(op.name())


def functions_of_op(op: OpOverload) -> list[Callable[..., Any]]:
    """The functions of an op of ``torch.library.custom_op`` that may be traced (checked: 2.11, 2.13, 2.14)."""
    defined = OPDEFS.get(op._schema.name)
    if defined is None:
        return []
    given = (defined._init_fn, defined._abstract_fn, defined._setup_context_fn, defined._backward_fn)
    return [function for function in given if function is not None]


def overloads_of(target: Any) -> list[OpOverload]:
    """The ops that the target of a node may call (checked: 2.11, 2.13, 2.14)."""
    if isinstance(target, OpOverload):
        return [target]
    if isinstance(target, OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]
    return []
