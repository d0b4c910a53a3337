"""Private torch names, in one place, each with the versions that it was checked on.

Those that tell Dynamo which frames to leave alone are in ``_compat_frames``, those of composable APIs in
``_compat_composable``. The hand-over to Inductor (:mod:`graphshard.backend.inductor`) has private imports of its own.
No other module may import a private torch name.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch._C._profiler import _ExperimentalConfig  # checked: 2.11, 2.13, 2.14
from torch._dynamo.convert_frame import compile_lock  # checked: 2.13
from torch._dynamo.exc import TorchDynamoException  # checked: 2.13
from torch._dynamo.functional_export import _dynamo_graph_capture_for_export  # checked: 2.13
from torch._functorch._aot_autograd.descriptors import (  # checked: 2.13
    AOTOutput,
    GradAOTOutput,
    ParamAOTInput,
    PlainAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
)
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # checked: 2.13
from torch._guards import TracingContext, detect_fake_mode  # checked: 2.13
from torch._prims.rng_prims import (  # checked: 2.13
    graphsafe_run_with_rng_state,
    run_and_save_rng_state,
    run_with_rng_state,
)
from torch._subclasses.fake_tensor import (  # checked: 2.13
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd import (  # checked: 2.11, 2.13, 2.14
    ProfilerConfig,
    ProfilerState,
    _disable_profiler_legacy,
    _enable_profiler_legacy,
    forward_ad,
)
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # checked: 2.13
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard  # checked: 2.13
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module  # checked: 2.13
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode  # checked: 2.13
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # checked: 2.13
from torch.utils._python_dispatch import TorchDispatchMode  # checked: 2.13
from torch.utils._pytree import tree_leaves, tree_map  # checked: 2.13

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult  # checked: 2.13
except ImportError:  # torch before it had a mesh per parameter
    ShardPlacementResult = None

__all__ = [
    "DATA_DEPENDENT",
    "FakeTensor",
    "FakeTensorMode",
    "ShardPlacementResult",
    "TorchDispatchMode",
    "TorchDynamoException",
    "allocated_bytes",
    "autograd_metadata",
    "below_autograd",
    "capture_with_dynamo",
    "collective_op",
    "compile_lock",
    "detect_fake_mode",
    "export_joint",
    "flatten_mesh",
    "from_local_takes_grad_placements",
    "get_proxy_mode",
    "gradient_described",
    "gradients_are_boxed",
    "graph_break_after",
    "group_by_name",
    "group_timeout_seconds",
    "in_backward",
    "in_recomputation",
    "is_composite",
    "is_described_result",
    "is_described_user_result",
    "is_to_local",
    "is_tracing",
    "join_meshes",
    "lazy_graph_modules",
    "make_graph_module",
    "no_torch_function",
    "num_holders",
    "num_memory_holders",
    "outside_transforms",
    "over_memory",
    "parameter_of_input",
    "queue_after_backward",
    "reduce_scatter_single",
    "register_backend",
    "spin_gpu",
    "storage_id",
    "store_of",
    "strided_shard",
    "transforms_active",
    "tree_leaves",
    "tree_map",
    "uses_gloo",
]


def collective_op(name: str) -> Any:
    """The op ``_c10d_functional.NAME``; None if this torch has none of that name."""
    packet = getattr(torch.ops._c10d_functional, name, None)
    return None if packet is None else packet.default


#: Whether ``DTensor.from_local`` takes placements for gradients (checked: 2.11 does not, 2.12 to 2.15 do). If not, a
#: gradient is placed like its value, and cannot stay unsummed, which ``dp_mesh_dims`` needs.
from_local_takes_grad_placements = "grad_placements" in inspect.signature(DTensor.from_local).parameters


#: Whether a backward may release the gradients that it was called with (checked: 2.11 and 2.12 may not, 2.13 may). If
#: not, autograd holds them until the backward returns.
gradients_are_boxed = hasattr(torch.autograd.Function, "boxed_grads_call")


def register_backend(name: str, load: Callable[[], Callable[..., Any]]) -> None:
    """Gives Dynamo a backend by name, unless it has one; ``load`` returns it and is called when it compiles.

    Dynamo finds the backends of entry points too, but two threads that first ask for one at the same time both load and
    register it, and the second gets an AssertionError (checked: 2.13).
    """

    def backend(gm: fx.GraphModule, example_inputs: Any, **arguments: Any) -> Any:
        return load()(gm, example_inputs, **arguments)

    backend.__name__ = name
    with suppress(AssertionError):  # the name is taken: by the entry point, or another thread
        torch._dynamo.register_backend(backend, name=name)


def lazy_graph_modules() -> AbstractContextManager[None]:
    """A context in which captured graphs get Python code only when they are called (checked: 2.13).

    Most graphs of a capture are edited further and never run; making the code takes a sixth of a capture's time.
    """
    return _use_lazy_graph_module(True)


def make_graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A graph module, lazy inside :func:`lazy_graph_modules` (checked: 2.13)."""
    return _make_graph_module(root, graph)


#: Queues a kernel that spins for so many cycles of the current GPU (checked: 2.11).
spin_gpu = torch.cuda._sleep

#: Raised where a shape or a number depends on data (checked: 2.13).
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


def transforms_active() -> bool:
    """True inside ``torch.func.vmap``, ``grad``, ``jvp`` and the like; Dynamo evaluates it (checked: 2.13)."""
    return torch._C._are_functorch_transforms_active()


@contextmanager
def outside_transforms(*, is_traced: bool = False) -> Iterator[None]:
    """A context in which no transform of ``torch.func`` is active (checked: 2.13).

    ``make_fx``, which ``linearize`` calls without a transform, sees results as constants unless ``is_traced``.
    """
    if not (transforms_active() or forward_ad._current_level >= 0):
        yield
        return
    with temporarily_clear_interpreter_stack(), nullcontext() if is_traced else disable_proxy_modes_tracing():
        yield


def in_backward() -> bool:
    """True while autograd runs a backward on this thread (checked: 2.13)."""
    return torch._C._current_graph_task_id() != -1


def in_recomputation() -> bool:
    """True while a checkpointed region is recomputed: in a backward, with gradients enabled (checked: 2.13).

    A hook in a backward with ``create_graph=True`` looks the same.
    """
    return torch.is_grad_enabled() and in_backward()


#: The ``__torch_function__`` of a tensor subclass that has none of its own, as ``nn.Parameter`` (checked: 2.13).
no_torch_function = torch._C._disabled_torch_function_impl


#: A context in which ops skip autograd's kernels, but views and versions are still tracked (checked: 2.13).
below_autograd = torch._C._AutoDispatchBelowAutograd


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The key-value store that a process group was made with (checked: 2.13)."""
    from torch.distributed.distributed_c10d import _world

    return _world.pg_map[group][1]


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Runs ``callback`` when the current backward has ended (checked: 2.13)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def group_by_name(name: str) -> dist.ProcessGroup:
    """The process group a functional collective's group name stands for (checked: 2.13)."""
    return _resolve_process_group(name)


def uses_gloo(group: dist.ProcessGroup, device_type: str = "cpu") -> bool:
    """Whether gloo communicates the group's tensors on these devices (checked: 2.13)."""
    return f"{device_type}:gloo" in dist.get_backend_config(group).split(",")


def group_timeout_seconds(group: dist.ProcessGroup) -> float:
    """The time limit the user gave for operations on this group (checked: 2.13)."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            return options._timeout.total_seconds()
    return default_pg_timeout.total_seconds()


def join_meshes(*meshes: DeviceMesh) -> DeviceMesh:
    """One mesh with the axes of all (checked: 2.13).

    Raises:
        RuntimeError: the meshes are cut out of different ones, or share ranks along an axis.
    """
    return DeviceMesh._concatenate(list(meshes))


def flatten_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The 1-D mesh over the named axes (checked: 2.13)."""
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def strided_shard(dim: int, split_factor: int) -> Placement:
    """A cut along ``dim`` of what an axis further right in the mesh has cut into ``split_factor`` parts.

    It is a plain ``Shard`` if there is no such cut (checked: 2.13).
    """
    return Shard(dim) if split_factor == 1 else _StridedShard(dim, split_factor=split_factor)


def capture_with_dynamo(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> fx.GraphModule:
    """One graph of a forward; its parameters are the module's own (checked: 2.13).

    The newer ``dynamo_graph_capture_for_export`` builds no guards. But it makes inputs of parameters and buffers that
    nothing reads, once for each of their names, and turns numbers into symbols.
    """
    return _dynamo_graph_capture_for_export(module)(*args, **kwargs)


def graph_break_after(gm: fx.GraphModule) -> str | None:
    """Where and why a graph of Dynamo ends at a graph break; None if it does not (checked: 2.13).

    The place is the innermost line that is not torch's.
    """
    reason = gm.__dict__.get("compile_subgraph_reason")
    if reason is None or not reason.graph_break:
        return None
    torch_folder = os.path.dirname(torch.__file__)
    frames = [each for each in reason.user_stack if not each.filename.startswith(torch_folder)]
    place = "".join(f"{each.filename}:{each.lineno}: " for each in (frames or reason.user_stack)[-1:])
    return place + reason.reason.strip().split("\n")[0]


def returns_tuple_of(traced: fx.GraphModule, named: type) -> bool:
    """Whether a forward captured by :func:`capture_with_dynamo` returns this named tuple (checked: 2.13)."""
    return traced.graph._codegen.pytree_info.out_spec.context is named


def export_joint(
    stack: ExitStack,
    traced: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    decompositions: Mapping[Any, Any],
) -> fx.GraphModule:
    """Forward and backward as one graph of aten ops; AOTAutograd describes its inputs (checked: 2.13).

    Writes to inputs that autograd does not follow are nodes of the graph, as in a compiled step.
    """
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors  # it loads much of Inductor

    joint = aot_export_joint_with_descriptors(
        stack,
        traced,
        args,
        dict(kwargs),
        decompositions=dict(decompositions),
        keep_inference_input_mutations=True,
    )
    joint.graph_module.graph.set_codegen(fx.graph.CodeGen())  # its own nests inputs and outputs
    return joint.graph_module


def is_to_local(node: fx.Node) -> bool:
    """Whether a node that Dynamo captured is ``to_local()`` without arguments (checked: 2.11, 2.13).

    Torch 2.11 captures a function that is made for the call and closes over the call's arguments.
    """
    if len(node.args) != 1 or node.kwargs:
        return False
    if getattr(node.target, "__name__", "") != "prim_to_local":
        return node.op == "call_method" and node.target == "to_local"
    return not any(inspect.getclosurevars(node.target).nonlocals.values())


def parameter_of_input(node: fx.Node, traced: fx.GraphModule) -> nn.Parameter | None:
    """The parameter of ``traced`` that an input of its joint graph stands for; None if it stands for none."""
    described = node.meta.get("desc")
    return traced.get_parameter(described.target) if isinstance(described, ParamAOTInput) else None


def gradient_described(output: Any) -> Any:
    """The description of the input whose gradient is described; None for another output (checked: 2.13).

    The gradient of a tensor subclass is several outputs, one for each attribute that is a tensor.
    """
    if isinstance(output, GradAOTOutput):
        return output.grad_of
    if isinstance(output, SubclassGetAttrAOTOutput):
        of = gradient_described(output.base)
        return None if of is None else SubclassGetAttrAOTInput(of, output.attr)
    return None


def is_described_result(output: Any) -> bool:
    """Whether an output of a joint graph is described as one of the forward (checked: 2.13).

    A gradient that is None has no description.
    """
    is_backward_token = type(output).__name__ == "BackwardTokenAOTOutput"
    return isinstance(output, AOTOutput) and not output.is_grad() and not is_backward_token


def is_described_user_result(output: Any) -> bool:
    """Whether an output of a joint graph is described as one that the traced function returns (checked: 2.13)."""
    while isinstance(output, SubclassGetAttrAOTOutput):
        output = output.base
    return isinstance(output, PlainAOTOutput)


@functools.lru_cache(maxsize=4096)
def is_composite(target: Any) -> bool:
    """Whether torch implements an op by calling other ops (checked: 2.13)."""
    is_op = isinstance(target, torch._ops.OpOverload)
    return is_op and target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


#: Reduce-scatter of one tensor, by its name in torch 2.13 or the older one (checked: 2.13).
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def allocated_bytes(step: Callable[[], Any]) -> tuple[int, Any]:
    """The most bytes that torch's CPU allocator has given to this thread at a time while ``step`` runs, and its result.

    Torch's first profiler counts per thread, and beside the one that users run in another thread (checked: 2.11, 2.13).
    """
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    _enable_profiler_legacy(config)
    try:
        result = step()
    finally:
        threads = _disable_profiler_legacy()
    live = peak = 0
    for event in (event for events in threads for event in events if event.kind() == "memory_alloc"):
        live += event.cpu_memory_usage()
        peak = max(peak, live)
    return peak, result


def is_tracing() -> bool:
    """Whether this thread traces or compiles a graph, so that what reads a module is torch itself (checked: 2.13)."""
    return TracingContext.try_get() is not None


def autograd_metadata() -> Any:
    """AOTAutograd's metadata of the graph that is being compiled; None outside of a compilation (checked: 2.13)."""
    context = TracingContext.try_get()
    return context.fw_metadata if context is not None else None


def _counts(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return tensor._use_count(), torch._C._storage_Use_Count(storage._cdata)


#: The counts of a tensor that only Python code holds, and of its memory.
_UNHELD = _counts(torch.empty(1))  # checked: 2.11, 2.13, 2.15


def num_holders(tensor: torch.Tensor) -> int:
    """How many holders a tensor has beside Python names: running work, autograd, its views (checked: 2.13)."""
    return _counts(tensor)[0] - _UNHELD[0]


def num_memory_holders(tensor: torch.Tensor) -> int:
    """How many holders the memory of ``tensor`` has beside it: views, in Python or elsewhere (checked: 2.13)."""
    return _counts(tensor)[1] - _UNHELD[1]


def storage_id(value: torch.Tensor) -> int:
    """A number that is equal for tensors, real or fake, that share their memory (checked: 2.13)."""
    return value.untyped_storage()._cdata


def over_memory(first: torch.Tensor, numel: int) -> torch.Tensor:
    """A 1-D tensor over the memory that begins at ``first``'s data; it does not keep it alive (checked: 2.13)."""
    num_bytes = numel * first.element_size()
    storage = torch._C._construct_storage_from_data_pointer(first.data_ptr(), first.device, num_bytes)
    return first.new_empty(0).set_(storage, 0, (numel,), (1,))


#: The partitioner's wrappers of recomputed ops that may draw random numbers (checked: 2.13).
RNG_WRAPPERS = (run_and_save_rng_state, run_with_rng_state, graphsafe_run_with_rng_state)


def call_of(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Op and arguments of a call; for a wrapper of ``RNG_WRAPPERS``, those of the wrapped op."""
    args, kwargs = node.args, dict(node.kwargs)
    if node.target not in RNG_WRAPPERS:
        return node.target, args, kwargs
    target, *rest = args[1:] if node.target is run_with_rng_state else args
    kwargs.pop("rng_state", None)
    return target, tuple(rest), kwargs
