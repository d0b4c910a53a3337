"""Inductor's settings: what would move collectives is switched off, and what memory must be is asked for.

Inductor may move, merge or drop collectives after the passes. Each setting that does so is switched off in a scoped
patch. :mod:`graphshard.backend.inductor.emitted_order` checks that the planned order survived.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.virtualized import V

from ...errors import OptionError

__all__ = [
    "JOINT_PASS",
    "compile_fx",
    "compile_fx_inner",
    "compile_later",
    "config_patches",
    "count_compiled",
    "count_loaded",
    "functorch_patch",
    "keeps_code",
    "memory_patch",
    "records_cuda_graphs",
    "settings_of_torch",
]

#: Inductor settings that would move or merge collectives after the passes (checked: 2.13). A name that a torch version
#: lacks is left out: that version has nothing of the kind.
_KEEP_ORDER: dict[str, Any] = {
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "bucket_all_reduces_fx": "none",
    "dedup_reduce_scatters": False,
    "_fuse_ddp_communication": False,
    "triton.reorder_for_reducing_graph_partitions": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,
    "aten_distributed_optimizations.collective_bucketing": False,
    "aten_distributed_optimizations.spmd_check": False,
    "aten_distributed_optimizations.pre_bucketing_fsdp_collectives": False,
}

#: Defaults that a user may override. Reuse keeps a dead buffer until a buffer of its size is needed: the gradients of a
#: unit would stay allocated beside their bucket until the next unit's gradients exist.
_DEFAULTS: dict[str, Any] = {"allow_buffer_reuse": False}

#: Kernels that share nothing but values they read are fused if these values have at least so many bytes.
_SHARED_READS = "score_fusion_memory_threshold"

#: With a memory budget, defaults that a user may override. Inductor would copy inputs and weights of convolutions to
#: channels-last and save the copies for the backward. Switched off, a step of a small ResNet took up to 9 % longer.
_WITH_BUDGET: dict[str, Any] = {"layout_optimization": False}

#: Inductor's setting for a pass over the joint graph; the backend sets it for each compilation.
JOINT_PASS = "joint_custom_pre_pass"

#: The decision sync runs collectives while it compiles, which hangs if one rank compiles alone.
_FUNCTORCH: dict[str, Any] = {"_sync_decision_cross_ranks": False}

#: Where a graph's code is not kept, AOTAutograd's cache would skip the passes, and with them the agreement of the
#: ranks. With halves pickled as they are, Inductor would not look up single graphs.
_NOT_KEPT: dict[str, Any] = {"enable_autograd_cache": False, "bundled_autograd_cache": False}

#: Where it is kept, AOTAutograd pickles halves as they are, so it asks for the backward when it has the forward. A half
#: with shard ops is compiled later all the same.
_KEPT: dict[str, Any] = {"bundled_autograd_cache": True, "force_non_lazy_backward_lowering": True}


def config_patches(user: Mapping[str, Any], *, has_budget: bool = False) -> dict[str, Any]:
    """Settings for one compilation: graphshard's defaults, the user's options, and those that keep the planned order.

    Args:
        user: Inductor options.
        has_budget: the user gave a memory budget, so memory must be what the memory model predicts.

    Raises:
        OptionError: the user sets an option that would move collectives, or one that Inductor lacks.
    """
    if JOINT_PASS in user:
        raise OptionError(
            f"graphshard backend: Inductor option {JOINT_PASS} carries graphshard's own joint passes; leave it out"
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
    """A context in which Inductor holds what the memory model predicts, except for what the user sets.

    Two settings change. Kernels that only read the same values stay apart: a fused kernel runs where the last of them
    stood, and holds what the others read until then. Such fusions made a backward that recomputes activations take up
    to 8 % more than the memory model predicts. And kernels write over buffers that die in them.
    """
    wanted = {_SHARED_READS: sys.maxsize, "inplace_buffers": True}
    return inductor_config.patch({name: wanted[name] for name in wanted if _has(name) and name not in user})


def functorch_patch(*, keeps_code: bool = False) -> Any:
    """A context with the AOTAutograd settings that the backend needs; ``keeps_code`` has its cache on."""
    settings = {**_FUNCTORCH, **(_KEPT if keeps_code else _NOT_KEPT)}
    return functorch_config.patch(
        {name: value for name, value in settings.items() if hasattr(functorch_config, name)}
    )


def compile_later(patches: Mapping[str, Any]) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context in which ``compile_fx_inner`` works later as it does now; it may be entered any number of times.

    Inductor reads its configuration, the fake mode and AOTAutograd's metadata from its surroundings. They are gone by
    the time a variant is compiled, at the first step that needs it.
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


def keeps_code() -> bool:
    """Whether the caches of torch that kept code needs are on."""
    return bool(functorch_config.enable_autograd_cache and inductor_config.fx_graph_cache)


def records_cuda_graphs(user: Mapping[str, Any]) -> bool:
    """Whether Inductor records CUDA graphs, with the user's options."""
    return bool(user.get("triton.cudagraphs", inductor_config.triton.cudagraphs))


def settings_of_torch() -> str:
    """All settings of Inductor and AOTAutograd as text."""
    return f"{inductor_config.get_hash().hex()} {functorch_config.get_hash().hex()}"


def count_loaded(more: int) -> None:
    """Counts graphs that were loaded with kept steps, for :func:`count_compiled`."""
    counters["graphshard"]["graphs_loaded"] += more


def count_compiled() -> tuple[int, int, int]:
    """How many graphs Inductor has found in a cache, has compiled for its own, and has compiled without it."""
    found = counters["inductor"]
    hits, misses, others = (found[f"fxgraph_cache_{what}"] for what in ("hit", "miss", "bypass"))
    return hits + counters["graphshard"]["graphs_loaded"], misses, others


def _has(name: str) -> bool:
    holder: Any = inductor_config
    *path, leaf = name.split(".")
    for part in path:
        holder = getattr(holder, part, None)
    return hasattr(holder, leaf)
