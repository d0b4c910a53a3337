"""Refuses what is wrong in the words of a command before torch is imported, which takes seconds.

The texts are those of the errors that later checks raise. What cannot be known without torch is left to those.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from ..budget_text import parse_bytes
from ..cost import load_card, tables_of
from ..errors import UsageError
from ..setting_checks import (
    AUTO_PLACEMENTS,
    FLOAT_DTYPES,
    check_axes,
    check_nodes,
    check_ready_plan,
    check_step,
)

#: Names with which a module can make names, and a package submodules, that its source does not show.
_MAKE_NAMES = frozenset({
    "__dict__", "__getattr__", "__path__", "eval", "exec", "globals", "locals", "meta_path", "modules", "setattr",
    "vars",
})  # fmt: skip


def refuse_wrong_training(options: argparse.Namespace) -> None:
    """Checks the options of ``add_training_arguments``.

    Raises:
        UsageError: the model cannot be found, or a dtype is unknown.
    """
    if options.factory is not None:
        refuse_attribute("the factory", options.factory)
    if options.hf is not None:
        _refuse_config(options.hf)
    for option, name in (("--param-dtype", options.param_dtype), ("--reduce-dtype", options.reduce_dtype)):
        if name is not None and name not in FLOAT_DTYPES:
            raise UsageError(
                f"{option} {name}: no floating-point dtype of torch; bfloat16, float16 or float32, say"
            )


def refuse_wrong_model(options: argparse.Namespace, meshes: Iterable[Mapping[str, int]]) -> None:
    """Checks the options of ``add_model_arguments`` for some meshes.

    Raises:
        UsageError: the model or a function cannot be found, or a dtype is unknown.
        CardError, TableError: there is no such card or table.
        OptionError: a setting is unknown or cannot be read.
        ShardingError: a mesh is impossible, or there is no such ready plan.
    """
    refuse_wrong_training(options)
    card = load_card(options.hardware)
    placements = options.placements
    for mesh in meshes:
        check_axes(mesh, is_placed=placements is not None)
        check_nodes(mesh, int(card.ranks_per_node), card.name)
    check_step(micro_batches=options.micro_batches, plan=options.plan, optimizer=options.optimizer)
    tables_of(options.tables)
    if options.memory_budget is not None:
        parse_bytes(options.memory_budget)
    if options.loss is not None:
        refuse_attribute("--loss", options.loss)
    if placements is not None and ":" in placements:
        refuse_attribute("--placements", placements)
    elif placements not in (None, AUTO_PLACEMENTS):
        check_ready_plan(placements)


def refuse_attribute(what: str, name: str) -> None:
    """Refuses PKG.MODULE:NAME if the text is malformed, or if the module or the name is not there.

    The module is not imported. A name is looked for in its source, unless the source may make names in other ways.

    Raises:
        UsageError: it says what is missing.
    """
    module_name, attribute = split_name(what, name)
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        spec = _find(module_name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{what} {name!r}: {module_name} cannot be imported: ModuleNotFoundError: {error}"
        ) from error
    finally:
        sys.path.remove(here)
    if spec is None or spec.submodule_search_locations is not None:
        return  # submodules are attributes of a package, too
    words = _words(spec)
    if words is not None and attribute.partition(".")[0] not in words:
        kind = "attribute" if what == "--placements" else "function"
        raise UsageError(f"{what} {name!r}: {module_name} has no {kind} {attribute!r}")


def split_name(what: str, name: str) -> tuple[str, str]:
    """The parts of PKG.MODULE:NAME.

    Raises:
        UsageError: it is none.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise UsageError(f"{what} {name!r}: write PKG.MODULE:NAME, as in examples.llama_model:llama_3_8b")
    return module_name, attribute


def _find(module_name: str) -> ModuleSpec | None:
    """Where a module lies; None if only its import can tell.

    Raises:
        ModuleNotFoundError: it lies nowhere.
    """
    top, *rest = module_name.split(".")
    if top in sys.modules:
        return None
    full, spec = top, importlib.util.find_spec(top)
    for part in rest:
        if spec is None:
            break
        places = spec.submodule_search_locations
        if places is None or (spec.origin is not None and _words(spec) is None):
            return None
        full = f"{full}.{part}"
        spec = PathFinder.find_spec(full, places)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {full!r}")
    return spec


def _words(spec: ModuleSpec) -> set[str] | None:
    """The words in the source of a module, its names among them; None if it may have names besides."""
    origin = Path(spec.origin or "")
    if origin.suffix != ".py":
        return None
    try:
        source = origin.read_text()
    except (OSError, ValueError):
        return None
    words = set(re.findall(r"\w+", source))
    return None if words & _MAKE_NAMES or re.search(r"import\s+\*", source) else words


def _refuse_config(config: str) -> None:
    """Refuses a configuration of ``--hf`` that is no JSON, or a file that does not exist.

    Raises:
        UsageError: that, or transformers is missing.
    """
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(
            f"--hf {config}: transformers is not installed; pip install transformers, or name a factory"
        )
    path = Path(config)
    if path.suffix == ".json" and not path.exists():
        raise UsageError(f"--hf {config}: there is no such file; give the path of a config.json")
    if path.is_file():
        try:
            json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UsageError(f"--hf {config} cannot be read: {error}") from error
