"""Keeps the planned order inside Inductor: a pass over its kernels, before it fuses them.

Each kernel that Inductor does not generate (collectives, waits, library calls) is made to depend on the one in front of
it. Generated kernels move as data allow.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch._inductor.config as inductor_config
import torch._inductor.custom_graph_pass as inductor_passes
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.dependencies import WeakDep
from torch._inductor.ir import _CollectiveKernel, _WaitKernel
from torch._inductor.scheduler import BaseSchedulerNode
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from ...memory import donated_inputs
from . import gloo_release
from .gloo_release import wait_until_released, wait_until_released_in_place

#: Inductor's setting for a pass over its kernels before it fuses them.
_BEFORE_FUSION = "_pre_fusion_custom_pass"


def pinning_patch(*, releases: bool = False) -> contextlib.AbstractContextManager[Any]:
    """A context in which Inductor runs collectives, waits and library kernels in the order of the graph.

    Generated kernels (pointwise, reductions) are fused and move as data allow, but no fusion may need another order of
    the rest. Without this, a kernel that is fused of an early and a late part would pull all collectives that the late
    part needs in front of the compute that they overlap.

    Args:
        releases: waits last until the backend holds nothing of the collective.
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
        """A key for Inductor's caches; a new one at each call if the user's pass has none.

        It covers the source of this file and of the file that generated code calls, the inputs that may be written
        over (other cache keys leave these out), ``releases`` and the user's pass.
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
                # Named after the kernel, not after its output: such a dependency is never fused away.
                node.add_fake_dep(WeakDep(before, mutating_buf=node.get_name(), is_fake=True))
            previous = node
        for dep in node.unmet_dependencies:
            name = node.scheduler.name_to_buf[dep.name].defining_op_name()
            node.ancestors |= OrderedSet([name]) | above[name]
        above.update(dict.fromkeys(node.get_operation_names(), node.ancestors))


def wait_for_releases(nodes: Sequence[BaseSchedulerNode]) -> None:
    """Replaces the last wait for each collective by a function of :mod:`graphshard.backend.inductor.gloo_release`.

    Does not handle:

    - a collective some of whose results are not waited for here: torch goes on holding it;
    - a collective that writes to an input of the graph: others may hold that for longer.

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
    # The whole buffer, also where the graph waits for a view of it.
    wait.inputs[0] = V.graph.get_buffer(wait.inputs[0].get_name())
