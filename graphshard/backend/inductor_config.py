"""The hand-over to Inductor: what is switched off, and what is asked of its kernels.

Inductor may move, merge or drop collectives after us; everything that does is switched off in a
scoped patch. :mod:`graphshard.backend.emitted_order` proves that the planned order survived.
"""

from __future__ import annotations

import contextlib
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch._inductor.custom_graph_pass as inductor_passes
from torch import fx
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx, compile_fx_inner, partition_fn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.dependencies import WeakDep
from torch._inductor.ir import _CollectiveKernel, _WaitKernel
from torch._inductor.scheduler import BaseSchedulerNode
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from .._compat import (
    RNG_WRAPPERS,
    call_of,
    detect_fake_mode,
    make_graph_module,
    run_and_save_rng_state,
    run_with_rng_state,
)
from ..errors import OptionError
from ..ir import fake_result
from ..memory import donated_inputs, mark_donated
from . import gloo_release
from .gloo_release import wait_until_released, wait_until_released_in_place

__all__ = [
    "CustomGraphPass",
    "compile_fx",
    "compile_fx_inner",
    "compile_later",
    "drop_rng_states",
]

#: Inductor settings that would move or merge collectives after us, checked on 2.13. A name that a
#: torch version lacks is left out: it cannot move anything there.
_KEEP_ORDER: dict[str, Any] = {
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "bucket_all_reduces_fx": "none",
    "dedup_reduce_scatters": False,
    "_fuse_ddp_communication": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,
    "aten_distributed_optimizations.collective_bucketing": False,
    "aten_distributed_optimizations.spmd_check": False,
    "aten_distributed_optimizations.pre_bucketing_fsdp_collectives": False,
}

#: Defaults a user may override. Reuse keeps a dead buffer until one of its size is needed again: the
#: gradients of a unit would stay beside their bucket until the next unit's gradients exist.
_DEFAULTS: dict[str, Any] = {"allow_buffer_reuse": False}

#: Kernels that only read the same values are fused from so many shared bytes on.
_SHARED_READS = "score_fusion_memory_threshold"

#: With a budget, defaults a user may override: Inductor would copy what convolutions read into channels-last, and save
#: the copies of inputs and weights for the backward. Without these, a step of a small ResNet took up to 9 % longer.
_WITH_BUDGET: dict[str, Any] = {"layout_optimization": False}

#: Set by the backend for each compilation.
_JOINT_PASS = "joint_custom_pre_pass"

#: Inductor's place for a pass over its kernels before it fuses them.
_BEFORE_FUSION = "_pre_fusion_custom_pass"

#: The user's word on how many activations are saved.
_SAVED_SHARE = "activation_memory_budget"

#: The autograd cache would skip our passes, and with them the agreement of the ranks; the decision
#: sync runs collectives while compiling, which hangs when one rank compiles alone.
_FUNCTORCH: dict[str, Any] = {"enable_autograd_cache": False, "_sync_decision_cross_ranks": False}


def config_patches(user: Mapping[str, Any], *, has_budget: bool = False) -> dict[str, Any]:
    """Our defaults, the user's Inductor options, and what keeps the planned order.

    Args:
        user: Inductor options.
        has_budget: whether memory has to be what the memory model says.

    Raises:
        OptionError: the user sets an option that would move collectives, or one Inductor lacks.
    """
    if _JOINT_PASS in user:
        raise OptionError(
            f"graphshard backend: Inductor option {_JOINT_PASS} carries graphshard's own joint passes; leave it out"
        )
    clash = sorted(name for name, value in user.items() if name in _KEEP_ORDER and value != _KEEP_ORDER[name])
    if clash:
        raise OptionError(
            f"graphshard backend: Inductor option(s) {', '.join(clash)} would move the collectives that "
            "graphshard has scheduled; leave them out"
        )
    if unknown := sorted(name for name in user if not _has(name)):
        elsewhere = [name for name in unknown if hasattr(functorch_config, name)]
        hint = f"; set torch._functorch.config.{elsewhere[0]} instead" if elsewhere else ""
        raise OptionError(f"graphshard backend: Inductor has no option(s) {', '.join(unknown)}{hint}")
    defaults = {**_DEFAULTS, **(_WITH_BUDGET if has_budget else {})}
    return {**defaults, **user, **{name: value for name, value in _KEEP_ORDER.items() if _has(name)}}


def memory_patch(user: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """Has Inductor hold what the memory model says, but for what the user sets.

    Kernels that only read the same values stay apart. Fused, they run where the last of them stood, and what the others
    read is held until then: a backward whose activations are computed again took up to 8 % more than the memory model
    says. And kernels write over what dies in them.
    """
    wanted = {_SHARED_READS: sys.maxsize, "inplace_buffers": True}
    return inductor_config.patch({name: wanted[name] for name in wanted if _has(name) and name not in user})


def functorch_patch() -> Any:
    """A context manager with the AOTAutograd settings the backend needs."""
    return functorch_config.patch(
        {name: value for name, value in _FUNCTORCH.items() if hasattr(functorch_config, name)}
    )


def saved_share() -> float:
    """The share of the activations that the partitioner saves of those it would save by itself; 1 unless set."""
    return float(getattr(functorch_config, _SAVED_SHARE, 1.0))


def inductor_decompositions() -> Mapping[Any, Any]:
    """The decompositions Inductor traces with."""
    return select_decomp_table()


class _JointPass(CustomGraphPass):
    def __init__(self, run: Callable[[fx.GraphModule], None]) -> None:
        self._run = run

    def __call__(self, graph: fx.Graph) -> None:
        assert graph.owning_module is not None
        self._run(graph.owning_module)

    def uuid(self) -> None:
        """Nothing that is captured here is cached."""


def partition_as_inductor(
    joint: fx.GraphModule,
    num_results: int,
    parameters: Sequence[int],
    joint_pass: Callable[[fx.GraphModule], None],
    share: float | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Inductor's joint passes, ``joint_pass`` in front of them, and its partitioner.

    Args:
        joint: a joint graph, edited in place.
        num_results: how many of its outputs are the forward's.
        parameters: positions of the inputs that are parameters, which live on whatever is saved.
        share: of the activations that are saved; None for what is set.

    Returns:
        Forward and backward.
    """
    inputs = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
    patches = config_patches({}) | {_JOINT_PASS: _JointPass(joint_pass)}
    # Inductor's replacement of random ops asks for the mode of the values, as its compiler sets it.
    saved = functorch_config.patch({_SAVED_SHARE: share}) if share is not None else contextlib.nullcontext()
    with inductor_config.patch(patches), saved, V.set_fake_mode(detect_fake_mode(inputs)):
        forward, backward = partition_fn(
            joint,
            inputs,
            num_fwd_outputs=num_results,
            static_lifetime_input_indices=list(parameters),
        )
    if functorch_config.donated_buffer:
        mark_donated(forward, backward, num_results)
    return make_graph_module(forward, forward.graph), make_graph_module(backward, backward.graph)


def drop_rng_states(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Makes plain ops again of those that are recomputed from a saved state of the random generator.

    The partitioner wraps every recomputed op that may draw random numbers, attention without dropout
    too, so that it draws the same ones again. That is for running a graph; for looking at one, the
    wrapped op hides its shapes and its operations, and the state weighs nothing.
    """
    states = set()
    for node in forward.graph.find_nodes(op="call_function", target=run_and_save_rng_state):
        parts = {user.args[1]: user for user in node.users}
        _replace_with_op(forward.graph, parts[1], list(node.args), node.kwargs)
        states.add(parts[0].name)
        outputs = forward.graph.output_node()
        outputs.args = (type(outputs.args[0])(value for value in outputs.args[0] if value is not parts[0]),)
        for unused in (*parts.values(), node):
            forward.graph.erase_node(unused)
    for node in backward.graph.find_nodes(op="call_function", target=run_with_rng_state):
        _state, *rest = node.args
        _replace_with_op(backward.graph, node, rest, node.kwargs)
        backward.graph.erase_node(node)
    for node in backward.graph.find_nodes(op="placeholder"):
        if node.name in states:
            backward.graph.erase_node(node)


def type_rng_states(gm: fx.GraphModule) -> None:
    """Gives the wrappers of recomputed ops that may draw random numbers the fake values they lack.

    The partitioner makes them: on the CPU the state of the generator is a value that the forward saves, on
    CUDA a generator is an input.
    """
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in RNG_WRAPPERS and "val" not in node.meta:
            value = fake_result(*call_of(node))
            if node.target is run_and_save_rng_state:
                (state,) = [user for user in node.users if user.args[1] == 0]
                value = (state.meta["val"], value)
            node.meta["val"] = value


def _replace_with_op(
    graph: fx.Graph, result: fx.Node, call: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    target, *args = call
    with graph.inserting_before(result):
        plain = graph.call_function(target, tuple(args), dict(kwargs))
    plain.meta = dict(result.meta)
    plain.meta["val"] = fake_result(plain.target, plain.args, plain.kwargs)  # the wrapper has none
    result.replace_all_uses_with(plain)


def compile_later(patches: Mapping[str, Any]) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context, entered any number of times, in which ``compile_fx_inner`` works as it does now.

    Inductor reads its configuration, the fake mode and AOTAutograd's metadata from the surroundings,
    which are gone when a variant is compiled at the first step that needs it.
    """
    tracing_context = TracingContext.try_get()

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(tracing(tracing_context))
            if tracing_context is not None and tracing_context.fake_mode is not None:
                stack.enter_context(V.set_fake_mode(tracing_context.fake_mode))
            stack.enter_context(inductor_config.patch(dict(patches)))
            stack.enter_context(functorch_patch())
            yield

    return enter


def pinning_patch(*, releases: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Has Inductor run a graph's collectives, waits and kernels that it does not generate in the graph's order.

    What it generates (pointwise kernels, reductions) is fused and moves as data allow, but no fusion may need
    another order of the rest. Without this, a kernel fused of an early and a late part pulls all collectives that the
    late part needs in front of the compute that they were to run beside.

    Args:
        releases: whether waits last until the backend holds nothing any more.
    """
    user_pass = getattr(inductor_config, _BEFORE_FUSION)
    return inductor_config.patch({_BEFORE_FUSION: _PinOrder(user_pass, releases=releases)})


#: Inductor's passes over the kernels it is about to fuse; torch before 2.13 has one class for all passes.
_SchedulerPass: Any = getattr(inductor_passes, "CustomSchedulerPass", CustomGraphPass)


class _PinOrder(_SchedulerPass):
    def __init__(self, user_pass: Callable[[list[Any]], list[Any]] | None, *, releases: bool) -> None:
        self._user_pass, self._releases = user_pass, releases

    def __call__(self, nodes: list[Any]) -> list[Any]:
        if self._user_pass is not None:
            nodes = self._user_pass(nodes)
        pin_order(nodes)
        if self._releases:
            wait_for_releases(nodes)
        return nodes

    def uuid(self) -> Any:
        """Of this file, the user's pass, what may be written over, which caches leave out, and what waits wait for.

        One that no cache knows if the user's pass has none.
        """
        own = get_hash_for_files((__file__, gloo_release.__file__)), donated_inputs(), self._releases
        if self._user_pass is None:
            return own
        users = self._user_pass.uuid() if isinstance(self._user_pass, _SchedulerPass) else None
        return own, uuid.uuid4().bytes if users is None else users


def pin_order(nodes: Sequence[BaseSchedulerNode]) -> None:
    """Makes each kernel that Inductor does not generate depend on the one in front of it.

    Args:
        nodes: Inductor's kernels before they are fused, in the order of the graph.
    """
    above: dict[str, OrderedSet[str]] = {}
    previous: BaseSchedulerNode | None = None
    for node in nodes:
        if (node.is_extern() or node.is_template()) and node.get_outputs():
            if previous is not None:
                before = previous.get_outputs()[0].get_name()
                # Named after the kernel, not after what it writes: such a dependency is never fused away.
                node.add_fake_dep(WeakDep(before, mutating_buf=node.get_name(), is_fake=True))
            previous = node
        for dep in node.unmet_dependencies:
            name = node.scheduler.name_to_buf[dep.name].defining_op_name()
            node.ancestors |= OrderedSet([name]) | above[name]
        above.update(dict.fromkeys(node.get_operation_names(), node.ancestors))


def wait_for_releases(nodes: Sequence[BaseSchedulerNode]) -> None:
    """Has the last wait for each collective call one of :mod:`graphshard.backend.gloo_release`.

    Not where torch goes on holding the collective, because some of its results are not waited for here, nor where it
    writes to an input of the graph: others may hold that for longer.

    Args:
        nodes: Inductor's kernels before they are fused, in the order of the graph.
    """
    started_by: dict[str, str] = {}
    results: dict[str, set[str]] = {}
    waits: dict[str, list[_WaitKernel]] = {}
    in_place: set[str] = set()
    for node in nodes:
        kernel: Any = node.node
        if isinstance(kernel, _WaitKernel):
            if (source := started_by.get(kernel.inputs[0].get_name())) is not None:
                waits.setdefault(source, []).append(kernel)
        elif isinstance(kernel, _CollectiveKernel):
            name = kernel.get_name()
            written = {name for output in kernel.get_outputs() for name in output.get_mutation_names()}
            results[name] = written or {output.get_name() for output in kernel.outputs}
            started_by |= dict.fromkeys(results[name], name)
            if written:
                in_place.add(name)
    for source, found in waits.items():
        names = {wait.inputs[0].get_name() for wait in found}
        if names == results[source] and not names & V.graph.graph_inputs.keys():
            function = wait_until_released_in_place if source in in_place else wait_until_released
            _release_after(found[-1], function)


def _release_after(wait: _WaitKernel, function: Callable[..., None]) -> None:
    V.graph.wrapper_code.add_import_once(f"from {function.__module__} import {function.__name__}")
    wait.python_kernel_name = function.__name__
    # All of it, where a view of it was waited for.
    wait.inputs[0] = V.graph.get_buffer(wait.inputs[0].get_name())


def _has(name: str) -> bool:
    holder: Any = inductor_config
    *path, leaf = name.split(".")
    for part in path:
        holder = getattr(holder, part, None)
    return hasattr(holder, leaf)
