"""The hand-over to Inductor: what is switched off, and proof that the planned order survived.

Inductor may move, merge or drop collectives after us; everything that does is switched off in a
scoped patch. What it finally emits is compared with the plan: the generated source names each
collective and each wait, in order.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx, compile_fx_inner, partition_fn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from ._compat import (
    RNG_WRAPPERS,
    call_of,
    detect_fake_mode,
    make_graph_module,
    run_and_save_rng_state,
    run_with_rng_state,
)
from .collectives import is_collective, is_wait, short_name
from .errors import OptionError
from .rewrite import fake_result

__all__ = [
    "CustomGraphPass",
    "compile_fx",
    "compile_fx_inner",
    "compile_later",
    "drop_rng_states",
    "emitted_order",
    "order_difference",
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
#: the copies of inputs and weights for the backward. Without these, a step of a small ResNet took 3 to 8 % longer.
_WITH_BUDGET: dict[str, Any] = {"layout_optimization": False}

#: Set by the backend for each compilation.
_JOINT_PASS = "joint_custom_pre_pass"

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
    """Has Inductor leave kernels apart that only read the same values, unless the user sets what these must share.

    Fused, they run where the last of them stood, and what the others read is held until then: a backward whose
    activations are computed again took up to 8 % more than the memory model says. Apart, it takes what that says.
    """
    if not _has(_SHARED_READS) or _SHARED_READS in user:
        return contextlib.nullcontext()
    return inductor_config.patch({_SHARED_READS: sys.maxsize})


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


def planned_order(gm: fx.GraphModule) -> list[str]:
    """``start NAME`` and ``wait NAME`` in graph order, NAME counting the collectives of a kind."""
    counts: dict[str, int] = {}
    names: dict[fx.Node, str] = {}
    order = []
    for node in gm.graph.nodes:
        if is_collective(node):
            kind = short_name(node)
            names[node] = f"{kind} {counts.setdefault(kind, 0)}"
            counts[kind] += 1
            order.append(f"start {names[node]}")
        elif is_wait(node):
            source = node.all_input_nodes[0]
            source = source if source in names else source.all_input_nodes[0]
            order.append(f"wait {names[source]}")
    return order


def pin_order(gm: fx.GraphModule) -> None:
    """Ties each wait to the start before it and each start to the wait before it, in plan order.

    Without this, Inductor fuses the copy into a bucket with compute that waits for another bucket,
    and the start that follows the copy moves behind that wait.
    """
    ties: dict[fx.Node, OrderedSet[fx.Node]] = {}
    previous: fx.Node | None = None
    for node in gm.graph.nodes:
        if not (is_collective(node) or is_wait(node)):
            continue
        if (
            previous is not None
            and is_wait(previous) != is_wait(node)
            and previous not in node.all_input_nodes
        ):
            ties[node] = OrderedSet([previous])
        previous = node
    preserve_node_ordering(gm.graph, ties)
    gm.recompile()


_CALL = re.compile(
    r"^\s*(?:(?P<result>\w+) = )?torch\.ops\."
    r"(?:_c10d_functional|graphshard(?=\.(?:custom_|all_reduce_hook)))\.(?P<op>\w+?)_?\.default\((?P<first>\[?\w+)"
)
_ALIAS = re.compile(r"^\s*(?P<new>\w+) = (?P<old>\w+)(?:\[\d+\])?(?:;|\s*#|\s*$)")


def emitted_order(source: str) -> list[str]:
    """The same words read from the Python wrapper that Inductor generated."""
    counts: dict[str, int] = {}
    buffers: dict[str, str] = {}
    order = []
    for line in source.splitlines():
        if call := _CALL.match(line):
            if call["op"] == "wait_tensor":
                order.append(f"wait {buffers.get(call['first'], call['first'])}")
                continue
            kind = call["op"].removesuffix("_out")
            name = f"{kind} {counts.setdefault(kind, 0)}"
            counts[kind] += 1
            buffers[call["result"] or call["first"].lstrip("[")] = name
            order.append(f"start {name}")
        elif (alias := _ALIAS.match(line)) and alias["old"] in buffers:
            buffers[alias["new"]] = buffers[alias["old"]]
    return order


def order_difference(planned: list[str], emitted: list[str]) -> str:
    """The first place where Inductor left the plan, in words; "" if nowhere."""
    for index in range(max(len(planned), len(emitted))):
        want = planned[index] if index < len(planned) else "nothing"
        have = emitted[index] if index < len(emitted) else "nothing"
        if want != have:
            return f"step {index}: planned {want!r}, emitted {have!r}"
    return ""


def _has(name: str) -> bool:
    holder: Any = inductor_config
    *path, leaf = name.split(".")
    for part in path:
        holder = getattr(holder, part, None)
    return hasattr(holder, leaf)
