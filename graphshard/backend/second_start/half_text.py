"""A text that differs where the code of two halves may: a step is named by those of its halves.

The text of a graph alone leaves out what differs between ranks (groups of the user, numbers of devices), and values of
constants. AOTAutograd's cache tells such graphs apart, so their steps need names of their own.
"""

from __future__ import annotations

import hashlib
import operator
import re
from typing import Any

from torch import Tensor, fx, nn
from torch._ops import OpOverload

from ..._compat import tree_map
from ..._compat_kept import bytes_of
from ...memory import DONATED

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def half_text(gm: fx.GraphModule) -> str:
    """Each node with its whole operator, its arguments, where its values lie, and what its constants hold.

    "" if a constant is no plain tensor, so that what it holds is not known.
    """
    lines = []
    for path, module in gm.named_modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            values = tree_map(_place, node.meta.get("val"))
            lines.append(f"{path} {node.name} {node.op} {_name(node.target)} {node.args!r} {node.kwargs!r}")
            lines.append(f"{values!r} {node.meta.get(DONATED)!r}")
            if node.op == "get_attr":
                held = _constant(operator.attrgetter(node.target)(module))
                if held is None:
                    return ""
                lines.append(held)
    return _ADDRESS.sub("", "\n".join(lines))


def _name(target: Any) -> str:
    return str(target) if isinstance(target, (str, OpOverload)) else repr(target)


def _place(value: Any) -> Any:
    """What says how a fake value lies in memory, and where."""
    if not isinstance(value, Tensor):
        return value
    return type(value).__name__, value.dtype, value.device, tuple(value.shape), tuple(value.stride())


def _constant(value: Any) -> str | None:
    if isinstance(value, fx.GraphModule):
        return ""
    if type(value) not in (Tensor, nn.Parameter):
        return None
    return f"{_place(value)} {hashlib.sha256(bytes_of(value)).hexdigest()}"
