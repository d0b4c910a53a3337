"""AOTAutograd's cache and torch's pickler of graphs; private torch names, as in ``_compat``."""

from __future__ import annotations

from typing import Any

from torch._functorch._aot_autograd.autograd_cache import (  # checked: 2.11, 2.13, 2.14
    BypassAOTAutogradCache,
    FXGraphCacheMiss,
)
from torch._guards import TracingContext, detect_fake_mode  # checked: 2.13
from torch._inductor.output_code import OutputCode  # checked: 2.11, 2.13, 2.14
from torch._subclasses.fake_tensor import FakeTensorMode  # checked: 2.13
from torch.fx._graph_pickler import GraphPickler, Options  # checked: 2.11, 2.13, 2.14

__all__ = ["BypassAOTAutogradCache", "FXGraphCacheMiss", "OutputCode", "pickled", "unpickled"]


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
