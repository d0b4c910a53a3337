"""Labels that tell the models apart which one process group plans."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from .._compat import group_by_name, group_store
from ..fsdp import Tree


def label_models(trees: Sequence[Tree]) -> dict[str, str]:
    """By process group, what tells these models from others that are planned there; the same on all its ranks.

    The ranks of a group run their models for the first time in one order, so they count them alike. Models with equal
    parameters may differ in their compute, or be tried with other sizes: each has plans of its own.
    """
    labels: dict[str, list[str]] = {}
    for tree in trees:
        for name in tree.groups():
            group = group_by_name(name)
            if dist.get_backend(group) == "fake":
                continue
            if name not in tree.numbers:
                key = f"graphshard/{name}/models/{group.rank()}"
                tree.numbers[name] = int(group_store(group).add(key, 1))
            labels.setdefault(name, []).append(str(tree.numbers[name]))
    return {name: "+".join(numbers) for name, numbers in labels.items()}
