"""The source of a graph's custom ops: how they are differentiated or decomposed is traced, and in no key of torch."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ..._compat_kept import functions_of_op, overloads_of, registrations_of_op

#: Ops of torch and of graphshard, whose versions and source are in the key anyway.
_KNOWN = frozenset(
    {
        "aten",
        "prims",
        "prim",
        "higher_order",
        "graphshard",
        "c10d",
        "_c10d_functional",
        "_c10d_functional_autograd",
    }
)

_TORCH = Path(torch.__file__).parent

_PYTHON_FILE = re.compile(r"registered at ([^\n]+?\.py|<[^>]*>):\d+")


def sources_of_ops(gm: fx.GraphModule) -> list[str] | None:
    """Schemas of the custom ops in a graph, and hashes of the files of Python that define them.

    None if an op is defined where there is no file, as in a notebook.
    """
    found = set()
    for op in _custom_ops(gm):
        files = {*_PYTHON_FILE.findall(registrations_of_op(op)), *map(_file_of, functions_of_op(op))}
        found.add(str(op._schema))
        for file in files:
            if Path(file).is_relative_to(_TORCH):
                continue
            try:
                found.add(hashlib.sha256(Path(file).read_bytes()).hexdigest())
            except OSError:
                return None
    return sorted(found)


def _file_of(function: Any) -> str:
    """The file of a function or of a callable object's class; where there is none, a name that is no file."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isbuiltin(function):  # such as torch.empty_like: it is torch's, or of a package without source
        return torch.__file__
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is not None:
        return code.co_filename
    return getattr(inspect.getmodule(type(function)), "__file__", "")


def _custom_ops(gm: fx.GraphModule) -> Iterator[OpOverload]:
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            for op in overloads_of(node.target):
                if op.namespace not in _KNOWN:
                    yield op
