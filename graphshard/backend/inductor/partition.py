"""Inductor's partitioner: the joint graph of a step, cut into its forward and its backward.

The partitioner decides which activations are saved. Two helpers mend what it leaves behind: ops that may draw random
numbers are wrapped (:func:`drop_rng_states`), and the wrappers have no fake values (:func:`type_rng_states`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx
from torch._inductor.compile_fx import partition_fn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import lazy_init
from torch._inductor.virtualized import V

from ..._compat import (
    RNG_WRAPPERS,
    call_of,
    detect_fake_mode,
    make_graph_module,
    run_and_save_rng_state,
    run_with_rng_state,
)
from ...ir import argument, fake_result
from ...memory import mark_donated
from .inductor_config import JOINT_PASS, config_patches

Result = TypeVar("Result")

#: Attention that draws random numbers for its dropout only.
_DRAWS_FOR_DROPOUT = frozenset(
    {
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
    }
)

_NEW_EMPTY = torch.ops.aten.new_empty.default

#: The user's setting of AOTAutograd for how many activations are saved.
_SAVED_SHARE = "activation_memory_budget"


def saved_share() -> float:
    """The share of activations that the user has saved, of those that the partitioner would save; 1 unless set."""
    return float(getattr(functorch_config, _SAVED_SHARE, 1.0))


def partitioner_settings() -> str:
    """A hash of AOTAutograd's settings, which decide what the partitioner saves."""
    return functorch_config.get_hash().hex()


def inductor_decompositions() -> Mapping[Any, Any]:
    """The decompositions Inductor traces with."""
    return select_decomp_table()


def prepare_patterns(joint: fx.GraphModule) -> None:
    """Makes the patterns that Inductor's joint passes look for, once a process and device.

    That takes about a second, which whoever times :func:`partition_as_inductor` must not count.
    """
    values = (node.meta["val"] for node in joint.graph.find_nodes(op="placeholder"))
    devices = (value.device for value in values if isinstance(value, torch.Tensor))
    lazy_init(next(devices, None))


class JointPass(CustomGraphPass, Generic[Result]):
    """A function of the joint graph, as Inductor calls it; ``result`` is what its last call returned.

    Args:
        run: edits the joint graph in place.
        key: gives Inductor's caches a key; None where nothing is cached.
    """

    def __init__(self, run: Callable[[fx.GraphModule], Result], key: Callable[[], str] | None = None) -> None:
        self._run, self._key = run, key
        self.result: Result | None = None

    def __call__(self, graph: fx.Graph) -> None:
        assert graph.owning_module is not None
        self.result = self._run(graph.owning_module)

    def __deepcopy__(self, memo: dict[int, Any]) -> JointPass[Result]:
        """Itself: torch copies Inductor's settings where an operator such as ``scan`` compiles its function."""
        return self

    def uuid(self) -> str | None:
        """The key; None for Inductor not to cache."""
        return self._key() if self._key is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition(Generic[Result]):
    """The halves of a joint graph, and what the joint pass returned."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    joint: Result


def partition_as_inductor(
    joint: fx.GraphModule,
    num_results: int,
    parameters: Sequence[int],
    joint_pass: Callable[[fx.GraphModule], Result],
    share: float | None = None,
) -> Partition[Result]:
    """Runs ``joint_pass``, then Inductor's joint passes, then its partitioner.

    Args:
        joint: a joint graph, edited in place.
        num_results: how many of its outputs are the forward's.
        parameters: positions of the inputs that are parameters; they live on whatever is saved.
        joint_pass: edits the joint graph in place.
        share: of the activations that are saved; None for the user's setting.
    """
    inputs = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
    first = JointPass(joint_pass)
    # Inductor's replacement of random ops asks for the mode of the values, as its compiler sets it.
    saved = functorch_config.patch({_SAVED_SHARE: share}) if share is not None else contextlib.nullcontext()
    patches = config_patches({}) | {JOINT_PASS: first}
    with inductor_config.patch(patches), saved, V.set_fake_mode(detect_fake_mode(inputs)):
        forward, backward = partition_fn(
            joint,
            inputs,
            num_fwd_outputs=num_results,
            static_lifetime_input_indices=list(parameters),
        )
    if functorch_config.donated_buffer:
        mark_donated(forward, backward, num_results)
    return Partition(
        forward=make_graph_module(forward, forward.graph),
        backward=make_graph_module(backward, backward.graph),
        joint=first.result,  # type: ignore[arg-type]
    )


def drop_rng_states(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Replaces ops that are recomputed from a saved state of the random generator by plain ops.

    The partitioner wraps each recomputed op that may draw random numbers (attention without dropout too), so that it
    draws the same numbers again. A graph that runs needs that. In a graph that is inspected, the wrapper hides shapes
    and operations, and the state weighs nothing.
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


def unwrap_undrawn(gm: fx.GraphModule) -> None:
    """Replaces the wrappers of attention without dropout, in a half that runs, by the op: it draws nothing.

    The forward saves an empty tensor in place of the state of the generator; the backward reads none.
    """
    undrawn = [node for node in gm.graph.nodes if node.target in RNG_WRAPPERS and _draws_nothing(node)]
    for node in undrawn:
        target, args, kwargs = call_of(node)
        result = node
        if node.target is run_and_save_rng_state:
            parts = {user.args[1]: user for user in node.users}
            result = parts[1]
            with gm.graph.inserting_before(parts[0]):
                empty = gm.graph.call_function(_NEW_EMPTY, (args[0], [0]), {"dtype": torch.uint8})
            empty.meta["val"] = fake_result(_NEW_EMPTY, empty.args, empty.kwargs)
            parts[0].replace_all_uses_with(empty)
            gm.graph.erase_node(parts[0])
        _replace_with_op(gm.graph, result, (target, *args), kwargs)
        for unused in dict.fromkeys((result, node)):
            gm.graph.erase_node(unused)
    if undrawn:
        gm.recompile()


def _draws_nothing(node: fx.Node) -> bool:
    """Whether the op inside a wrapper is attention without dropout."""
    packet = getattr(call_of(node)[0], "overloadpacket", None)
    if packet is None or packet.__name__ not in _DRAWS_FOR_DROPOUT:
        return False
    return bool(argument(node, "dropout_p") == 0)


def type_rng_states(gm: fx.GraphModule) -> None:
    """Adds the missing fake values to the partitioner's wrappers of ops that may draw random numbers.

    On the CPU the state of the generator is a value that the forward saves; on CUDA a generator is an input.
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
