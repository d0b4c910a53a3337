"""Checks that Inductor kept the planned order: compares its generated code with the plan.

The generated Python source names each collective, each wait and each library kernel, in order.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

from torch import fx

from ...ir import (
    aliased_inputs,
    is_alias,
    is_collective,
    is_point_to_point,
    is_wait,
    short_name,
    written_operands,
)
from .gloo_release import wait_until_released

__all__ = ["emitted_order", "order_difference", "planned_order"]


def planned_order(gm: fx.GraphModule) -> list[str]:
    """The steps ``start NAME``, ``wait NAME`` and ``run OP`` in graph order; NAME is a kind and a count."""
    counts: dict[str, int] = {}
    names: dict[fx.Node, str] = {}
    order = []
    for node in gm.graph.nodes:
        if is_collective(node) or is_point_to_point(node):
            kind = short_name(node).rstrip("_").removesuffix("_out")
            name = f"{kind} {counts.setdefault(kind, 0)}"
            names |= dict.fromkeys((node, *written_operands(node)), name)
            counts[kind] += 1
            order.append(f"start {name}")
        elif is_wait(node):
            source = node.all_input_nodes[0]
            while source not in names and is_alias(source):
                source = aliased_inputs(source)[0]
            order.append(f"wait {names.get(source, source.name)}")
        elif node.op == "call_function" and getattr(node.target, "namespace", "") == "aten":
            order.append(f"run {node.target._opname}")
    return order


_COLLECTIVE = re.compile(
    r"^\s*(?:(?P<result>\w+) = )?torch\.ops\."
    r"(?:_c10d_functional|graphshard(?=\.(?:custom_|all_reduce_hook)))\.(?P<op>\w+?)_?\.default\((?P<arguments>.*)"
)
_WAIT = re.compile(
    rf"^\s*(?:\w+ = )?(?:torch\.ops\._c10d_functional\.wait_tensor\.default|{wait_until_released.__name__}\w*)"
    r"\((?:reinterpret_tensor\()?(?P<waited>\w+)"
)
_KERNEL = re.compile(r"^\s*(?:\w+ = )?(?:extern_kernels|torch\.ops\.aten)\.(?:bias_)?(?P<op>\w+)[.(]")
_ALIAS = re.compile(r"^\s*(?P<new>\w+) = (?P<old>\w+)(?:\[\d+\])?(?:;|\s*#|\s*$)")


def emitted_order(source: str) -> list[str]:
    """The same steps, read from Inductor's Python wrapper; ``run OP`` only for kernels that it calls by name."""
    counts: dict[str, int] = {}
    buffers: dict[str, str] = {}
    order = []
    for line in source.splitlines():
        if wait := _WAIT.match(line):
            order.append(f"wait {buffers.get(wait['waited'], wait['waited'])}")
        elif call := _COLLECTIVE.match(line):
            kind = call["op"].removesuffix("_out")
            name = f"{kind} {counts.setdefault(kind, 0)}"
            counts[kind] += 1
            written = [call["result"]] if call["result"] else re.findall(r"\w+", call["arguments"])
            buffers |= dict.fromkeys(written, name)
            order.append(f"start {name}")
        elif kernel := _KERNEL.match(line):
            order.append(f"run {kernel['op']}")
        elif (alias := _ALIAS.match(line)) and alias["old"] in buffers:
            buffers[alias["new"]] = buffers[alias["old"]]
    return order


#: A product and the sum behind it become one kernel, where the sum stands: the kernel, and the product.
_MADE_OF = {"run addmm": "run mm", "run baddbmm": "run bmm"}


def order_difference(planned: Sequence[str], emitted: Sequence[str]) -> str:
    """The first difference between the two orders, in words; "" if there is none.

    Compute is compared by how often each op has run in front of each start and wait. An op is not compared if some of
    its calls have no kernel of their own (generated, decomposed, replaced). A product that is merged with a sum may run
    as late as the sum.
    """
    steps, emitted_steps = ([step for step in order if not _is_run(step)] for order in (planned, emitted))
    for index, (want, have) in enumerate(zip_longest(steps, emitted_steps, fillvalue="nothing")):
        if want != have:
            return f"step {index}: planned {want!r}, emitted {have!r}"
    late = Counter(filter(_MADE_OF.get, emitted)) - Counter(filter(_MADE_OF.get, planned))
    planned, emitted = ([_MADE_OF.get(step, step) for step in order] for order in (planned, emitted))
    for op in dict.fromkeys(filter(_is_run, planned)):
        if planned.count(op) != emitted.count(op):
            continue
        may_be_late = sum(number for merged, number in late.items() if _MADE_OF[merged] == op)
        for step, most, run in zip(steps, _runs_before(planned, op), _runs_before(emitted, op), strict=True):
            if not most - may_be_late <= run <= most:
                return f"in front of {step!r}: planned {most} times {op!r}, emitted {run}"
    return ""


def _is_run(step: str) -> bool:
    return step.startswith("run ")


def _runs_before(order: Sequence[str], op: str) -> list[int]:
    """For each start and wait, how often ``op`` runs in front of it."""
    counts, number = [], 0
    for step in order:
        if step == op:
            number += 1
        elif not _is_run(step):
            counts.append(number)
    return counts
