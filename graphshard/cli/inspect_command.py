"""``graphshard inspect PKG.MODULE:FACTORY``: the report of a model on the command line."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..progress import StageLines
from .early_checks import refuse_wrong_model, split_name
from .hf_model import add_hf_arguments, hf_factory

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

#: Values of ``--reshard-after-forward``.
RESHARD = {"default": None, "true": True, "false": False}
_OUTPUTS = ("html", "text", "trace", "json")
_DEFAULT_MESH = {"shard": 64}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``graphshard inspect``; see :func:`graphshard.inspect`."""
    add_model_arguments(parser)
    add = parser.add_argument
    add(
        "--mesh",
        action="append",
        metavar="AXIS=N",
        help="replicate=M,shard=N, outermost first (default shard=64); with --placements a further axis: shard=8,tp=8",
    )
    add(
        "--formulas",
        metavar="NAME=DIM",
        help="print expressions in dims of the inputs instead: batch=0,sequence=1",
    )
    add("--batch", type=int, metavar="N", help="batch size of a rank, with --hf (default 1)")
    add("--html", type=Path, metavar="FILE", help="a page with everything, in one file")
    add("--text", type=Path, metavar="FILE", help="graph text after each pass, and all collectives")
    add("--all-blocks", action="store_true", help="with --text: write repeated blocks in full, too")
    add("--trace", type=Path, metavar="FILE", help="trace for Perfetto or chrome://tracing")
    add("--json", type=Path, metavar="FILE", help="the whole report as data")


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options for a model and how it is trained: factory, units, dtypes and micro-batches."""
    add = parser.add_argument
    add(
        "factory",
        nargs="?",
        metavar="PKG.MODULE:FACTORY",
        help="function that returns (model, args) or (model, args, kwargs); or --hf",
    )
    add_hf_arguments(parser)
    add("--unit", action="append", default=[], metavar="PATTERN", help="modules that are units: layers.*")
    add("--param-dtype", metavar="DTYPE", help="of compute and gathers: bfloat16")
    add("--reduce-dtype", metavar="DTYPE", help="of reductions: float32")
    add("--reshard-after-forward", choices=tuple(RESHARD), default="default", help="as in fully_shard")
    add("--micro-batches", type=int, default=1, metavar="N", help="forwards and backwards in a step")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options for model, hardware and training, without the mesh."""
    add = parser.add_argument
    add_training_arguments(parser)
    add("--hardware", default="h100-sxm", metavar="CARD", help="name or file of a card (default h100-sxm)")
    add("--tables", metavar="CSV", help="measured times of collectives")
    add("--loss", metavar="PKG.MODULE:FUNCTION", help="turns the model's output into a scalar")
    add("--optimizer", default="adamw", help="adamw, adam, sgd, sgd-momentum, adagrad, rmsprop or none")
    add("--memory-budget", metavar="BYTES", help='the most a rank may hold: "60GiB"')
    add(
        "--placements",
        metavar="PLAN",
        help="how the model lies on the further axis of the mesh: a ready plan (llama), auto, or PKG.MODULE:DICT",
    )
    add("--plan", default="unit", help="unit: the schedule of training; auto: by cost")
    add(
        "--checkpoint",
        action="append",
        default=[],
        metavar="PATTERN",
        help='modules to recompute, or "units"',
    )


def run_inspect(options: argparse.Namespace) -> int:
    """Inspects a model, prints the summary and writes the files asked for."""
    of_batch = hf_factory(options)
    refuse_missing_folders(options, _OUTPUTS)
    mesh = None if options.mesh is None else parse_mesh(options.mesh)
    dynamic = None if options.formulas is None else parse_mesh([options.formulas], "--formulas")
    if dynamic is not None:
        _refuse_with_formulas(options)
    given = inspect_options(options, [mesh or _DEFAULT_MESH])
    # The imports below load Inductor, which takes seconds. Mistakes above are reported before that.
    from rich.console import Console

    from ..capture import no_garbage_collection
    from ..inspection import inspect
    from ..report import print_summary, report_text, write_html, write_trace

    middle = "schedule" if options.plan == "unit" else "plan"
    bound = ["bound"] if options.plan == "unit" else []
    halves = [
        f"{half}: {what}" for half in ("forward", "backward") for what in ("passes", *bound, middle, "cost")
    ]
    chosen = ["placements"] if options.placements == "auto" else []
    following = ["import the model", *chosen, "capture", *halves, "report", "write", "done"]
    progress = StageLines(following if dynamic is None else ("import the model", "captures"))
    progress("import the model")
    loss = None if options.loss is None else load_attribute("--loss", options.loss)
    model, args, kwargs = make_inputs(options.factory) if of_batch is None else of_batch(options.batch or 1)
    if dynamic is not None:
        del given["plan"]
        return _print_formulas(
            options, (model, args, kwargs), dynamic=dynamic, mesh=mesh or _DEFAULT_MESH, loss=loss,
            progress=progress, **given,
        )  # fmt: skip
    with no_garbage_collection():
        report = inspect(model, args, kwargs, mesh=mesh, loss=loss, progress=progress, **given)
        progress("write")
        print_summary(report, Console(width=None if sys.stdout.isatty() else 160))
        if options.html is not None:
            write_html(report, options.html)
        if options.text is not None:
            options.text.write_text(report_text(report, folds=not options.all_blocks))
        if options.trace is not None:
            write_trace(report, options.trace)
        if options.json is not None:
            report.to_json(options.json)
        if options.ends_process:
            gc.freeze()
    progress("done")
    for name in _OUTPUTS:
        if getattr(options, name) is not None:
            print(f"wrote {getattr(options, name)}")
    return 0


def _refuse_with_formulas(options: argparse.Namespace) -> None:
    if options.plan != "unit":
        raise UsageError(f"--plan {options.plan}: --formulas are those of --plan unit; leave --plan out")
    unused = [f"--{name}" for name in ("html", "text", "trace") if getattr(options, name) is not None]
    if unused:
        raise UsageError(f"{', '.join(unused)}: --formulas writes none; leave it out")


def _print_formulas(options: argparse.Namespace, inputs: tuple[Any, ...], **given: Any) -> int:
    from ..inspection.formulas import formulas
    from ..report import formulas_text

    found = formulas(*inputs, **given)
    print(formulas_text(found), end="")
    if options.json is not None:
        options.json.write_text(json.dumps(found.to_dict(), allow_nan=False) + "\n")
        print(f"wrote {options.json}")
    return 0


def refuse_missing_folders(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Refuses files that cannot be written, before any work is done.

    Raises:
        UsageError: the folder of a file does not exist, or the file is a folder itself.
    """
    for name in names:
        path = getattr(options, name)
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise UsageError(
                f"--{name} {path}: its folder does not exist, or it is a folder itself; name a file in another"
            )


def inspect_options(options: argparse.Namespace, meshes: Iterable[Mapping[str, int]]) -> dict[str, Any]:
    """Keyword arguments of :func:`graphshard.inspect` from :func:`add_model_arguments`, without loss and mesh.

    Raises:
        GraphShardError: an option is wrong, alone or for one of the meshes; most are refused without torch.
    """
    refuse_wrong_model(options, meshes)
    return {
        "hardware": options.hardware,
        "tables": options.tables,
        "units": options.unit,
        "mp_policy": mp_policy_of(options) if options.param_dtype or options.reduce_dtype else None,
        "reshard_after_forward": RESHARD[options.reshard_after_forward],
        "optimizer": options.optimizer,
        "micro_batches": options.micro_batches,
        "memory_budget": options.memory_budget,
        "plan": options.plan,
        "checkpoint": options.checkpoint,
        "placements": read_placements(options.placements),
    }


def mp_policy_of(options: argparse.Namespace) -> MixedPrecisionPolicy:
    """The dtypes of ``--param-dtype`` and ``--reduce-dtype``, whose names are checked."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    def dtype(name: str | None) -> torch.dtype | None:
        found: torch.dtype | None = None if name is None else getattr(torch, name)
        return found

    return MixedPrecisionPolicy(
        param_dtype=dtype(options.param_dtype), reduce_dtype=dtype(options.reduce_dtype)
    )


def read_placements(given: str | None) -> Any:
    """What ``--placements`` names: a ready plan by its name, or a dict as PKG.MODULE:DICT.

    Raises:
        UsageError: there is no such attribute, or it is no dict.
    """
    if given is None or ":" not in given:
        return given
    found = find_attribute("--placements", given)
    if not isinstance(found, Mapping):
        raise UsageError(
            f"--placements {given}: it is a {type(found).__name__}; name a dict of placements, or a ready plan (llama)"
        )
    return found


def parse_mesh(words: list[str], option: str = "--mesh") -> dict[str, int]:
    """Reads a mesh: {"replicate": 4, "shard": 16} from ["replicate=4,shard=16"] or ["replicate=4", "shard=16"].

    Raises:
        UsageError: a word cannot be read, or an axis is named twice.
    """
    mesh: dict[str, int] = {}
    for word in ",".join(words).split(","):
        name, equals, size = word.partition("=")
        if not equals or not name.strip() or not size.strip().isdecimal():
            example = "AXIS=N, as in --mesh replicate=4,shard=16"
            if option == "--formulas":
                example = "NAME=DIM, as in --formulas batch=0,sequence=1"
            if option == "--meshes":
                example = 'AXIS=N, as in --meshes "shard=16; replicate=2,shard=8"'
            raise UsageError(f"{option} {word}: write {example}")
        if name.strip() in mesh:
            raise UsageError(f"{option} names the axis {name.strip()!r} twice; give each axis once")
        mesh[name.strip()] = int(size)
    return mesh


def make_inputs(factory: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Calls a factory, named as PKG.MODULE:FACTORY; returns model, positional and keyword inputs.

    Raises:
        UsageError: the factory cannot be imported or called, or returns something else.
    """
    return read_inputs(factory, {})


def read_inputs(factory: str, options: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """:func:`make_inputs` with keyword arguments for the factory."""
    import torch

    made = _call(factory, load_attribute("the factory", factory), options)
    given = made if isinstance(made, tuple) else (made,)
    model, args, kwargs = (*given, {}, {})[:3]
    is_fine = (
        len(given) in (2, 3)
        and isinstance(model, (torch.nn.Module, torch.export.ExportedProgram))
        and isinstance(args, (tuple, list))
        and isinstance(kwargs, dict)
    )
    if not is_fine:
        kinds = ", ".join(type(part).__name__ for part in given)
        raise UsageError(
            f"{factory} returned ({kinds}); a factory returns (model, args) or (model, args, kwargs), the model "
            "a torch.nn.Module, args a tuple and kwargs a dict"
        )
    return model, tuple(args), kwargs


def _call(name: str, factory: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    try:
        return factory(**given)
    except Exception as error:  # the user's code may raise anything
        first = str(error).strip().splitlines()
        raise UsageError(f"{name} raised {type(error).__name__}: {first[0] if first else ''}") from error


def load_attribute(what: str, name: str) -> Callable[..., Any]:
    """Imports the callable PKG.MODULE:NAME; modules of the current folder are found too.

    Raises:
        UsageError: there is no such module or attribute, or it is not callable.
    """
    found: Callable[..., Any] = find_attribute(what, name)
    if not callable(found):
        module_name, _, attribute = name.partition(":")
        raise UsageError(f"{what} {name!r}: {module_name} has no function {attribute!r}")
    return found


def find_attribute(what: str, name: str) -> Any:
    """Imports PKG.MODULE:NAME; modules of the current folder are found too.

    Raises:
        UsageError: there is no such module or attribute.
    """
    module_name, attribute = split_name(what, name)
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything
        first = str(error).strip().splitlines()
        raise UsageError(
            f"{what} {name!r}: {module_name} cannot be imported: {type(error).__name__}: {first[0] if first else ''}"
        ) from error
    finally:
        sys.path.remove(here)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            kind = "attribute" if what == "--placements" else "function"
            raise UsageError(f"{what} {name!r}: {module_name} has no {kind} {attribute!r}")
        found = getattr(found, part)
    return found
