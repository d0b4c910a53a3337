"""Patterns of names: "layers.*.attention.w[qkv].weight".

"*" stands for one part of a path, and "[qkv]" for one of these letters, as in plans of ``parallelize_module``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

Value = TypeVar("Value")


def matches(pattern: str, name: str) -> bool:
    """Whether a name has the pattern."""
    pieces = re.split(r"(\[[^\]]+\]|\*)", pattern)
    regex = "".join(
        r"[^.]+" if each == "*" else each if each.startswith("[") and each.endswith("]") else re.escape(each)
        for each in pieces
    )
    return re.fullmatch(regex, name) is not None


def resolve(
    given: Mapping[str, Value], names: Iterable[str], what: str, problems: list[str]
) -> dict[str, Value]:
    """The value for each name that a pattern matches.

    Args:
        given: values by pattern.
        names: all names there are.
        what: "parameter" or "module", for messages.
        problems: gets a sentence for each pattern without a match, and for each name with two.
    """
    all_names = list(names)
    found: dict[str, str] = {}
    twice: dict[tuple[str, str], list[str]] = {}
    for pattern in given:
        hits = [name for name in all_names if matches(pattern, name)]
        if not hits:
            some = ", ".join(name for name in all_names[:6] if name)
            problems.append(
                f"{pattern!r} matches no {what}; there are {some}, ...: correct it or leave it out"
            )
        for name in hits:
            if name in found:
                twice.setdefault((found[name], pattern), []).append(name)
            else:
                found[name] = pattern
    for (one, other), hits in twice.items():
        problems.append(
            f"{one!r} and {other!r} both match {what} {hits[0]!r}"
            + (f" and {len(hits) - 1} more" if len(hits) > 1 else "")
            + ": leave one out"
        )
    return {name: given[pattern] for name, pattern in found.items()}
