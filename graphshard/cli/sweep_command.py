"""``graphshard sweep PKG.MODULE:FACTORY``: a table of meshes and batch sizes on the command line."""

from __future__ import annotations

import argparse
import inspect
import itertools
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..processes import start_early
from .hf_model import hf_factory
from .inspect_command import (
    add_model_arguments,
    inspect_options,
    load_attribute,
    make_inputs,
    parse_mesh,
    read_inputs,
    refuse_missing_folders,
)

_OUTPUTS = ("csv", "json", "plot")
_RANGE = re.compile(r"(\d+)\.\.(\d+)(?::(\d+))?")

#: The most numbers in a range. More is a mistake, and could fill memory before anything is priced.
_MOST_NUMBERS = 10_000


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``graphshard sweep``; see :func:`graphshard.inspection.sweep.sweep`."""
    add_model_arguments(parser)
    add = parser.add_argument
    add(
        "--mesh",
        action="append",
        metavar="AXIS=NUMBERS",
        help="sizes of each axis: 8..1024 (doubling), 8..64:8 (steps of 8) or 8,24 (default shard=8..1024)",
    )
    add(
        "--meshes",
        action="append",
        metavar="MESHES",
        help='these meshes and no others, instead of --mesh: "shard=16; replicate=2,shard=8"',
    )
    add("--batch", default="1..8", metavar="NUMBERS", help="batch sizes of a rank (default 1..8, doubling)")
    add("--processes", type=int, metavar="N", help="captures are shared out among so many (default: cores)")
    add(
        "--captures",
        choices=("ends", "all"),
        default="ends",
        help="batches to capture: the smallest and the largest, and others where graphs differ; or all",
    )
    add("--csv", type=Path, metavar="FILE", help="the table as comma-separated values")
    add("--json", type=Path, metavar="FILE", help="the table as data")
    add("--plot", type=Path, metavar="FILE", help="throughput, memory and exposed share against devices")


def run_sweep(options: argparse.Namespace) -> int:
    """Sweeps over batch sizes and meshes, prints the table and writes the files asked for."""
    of_config = hf_factory(options)
    refuse_missing_folders(options, _OUTPUTS)
    if options.meshes and options.mesh:
        raise UsageError("--mesh and --meshes: give all combinations with --mesh, or a list with --meshes")
    meshes = (
        parse_mesh_list(options.meshes) if options.meshes else parse_meshes(options.mesh or ["shard=8..1024"])
    )
    batches = parse_numbers("--batch", options.batch)
    num_processes = options.processes
    if num_processes is None:
        num_processes = min(os.cpu_count() or 1, len(batches))
    given = inspect_options(options, meshes)
    find_loss = None if options.loss is None else partial(load_attribute, "--loss", options.loss)
    if find_loss is not None:
        find_loss()
    make = of_config or batched(options.factory)
    if num_processes > 1:
        start_early()
    # The imports below load Inductor, which takes seconds. Mistakes above are reported before that.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from ..inspection import Later, sweep
    from ..report import sweep_plot, sweep_table

    began = time.perf_counter()
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(file=sys.stderr), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("import the model", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        found = sweep(
            make,
            meshes=meshes,
            batches=batches,
            loss=None if find_loss is None else Later(find_loss),
            num_processes=num_processes,
            captures=options.captures,
            progress=progress,
            **given,
        )
        bar.update(task, description="done")
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(f"{found.model} on {found.hardware}", sweep_table(found), sep="\n\n", markup=False)
    print(
        f"\n{len(found.points)} points, {found.num_captures} captures in {time.perf_counter() - began:.1f} s: "
        f"a capture {found.capture_seconds / found.num_captures:.1f} s, "
        f"a point {found.point_seconds / len(found.points):.2f} s"
    )
    if found.are_chosen:
        print(f"placements chosen for each point: {found.choice_seconds:.1f} s")
    if found.between:
        print(
            f"batch {', '.join(map(str, found.between))}: in between those captured, with equal graphs "
            "(--captures all captures each)"
        )
    if options.csv is not None:
        found.to_csv(options.csv)
    if options.json is not None:
        found.to_json(options.json)
    if options.plot is not None:
        sweep_plot(found, options.plot)
    for name in _OUTPUTS:
        if getattr(options, name) is not None:
            print(f"wrote {getattr(options, name)}")
    return 0


def parse_numbers(option: str, text: str) -> list[int]:
    """Reads numbers: [8, 16, 32] from "8..32" (doubling), [8, 16, 24] from "8..24:8", [1, 2, 6] from "1,2,6".

    Raises:
        UsageError: a part cannot be read, or is too many numbers.
    """
    found: list[int] = []
    for part in text.split(","):
        word = part.strip()
        match = _RANGE.fullmatch(word)
        first, last = (int(match[1]), int(match[2])) if match else (0, 0)
        if word.isdecimal() and int(word) > 0:
            found.append(int(word))
        elif match and match[3] and 0 < first <= last and int(match[3]) > 0:
            numbers = range(first, last + 1, int(match[3]))
            if (last - first) // numbers.step >= _MOST_NUMBERS:
                raise UsageError(
                    f"{option} {text}: {word!r} is more than {_MOST_NUMBERS} numbers; take larger steps"
                )
            found += numbers
        elif match and not match[3] and 0 < first <= last:
            found += [first << times for times in range((last // first).bit_length())]
        else:
            raise UsageError(
                f"{option} {text}: {word!r} is none of 8, 8..64 (doubling) and 8..64:8 (steps of 8), upwards from 1"
            )
    return list(dict.fromkeys(found))


def parse_meshes(words: Sequence[str]) -> list[dict[str, int]]:
    """Reads meshes: all combinations of the sizes of the axes, in the order of the axes.

    Args:
        words: each names one axis or several: "shard=8..64", "replicate=1,2,shard=8..64".

    Raises:
        UsageError: a word names no axis, an axis is named twice, or its sizes cannot be read.
    """
    texts: dict[str, list[str]] = {}
    for word in words:
        name = ""
        for part in word.split(","):
            before, equals, after = part.partition("=")
            if equals:
                name = before.strip()
                if name in texts:
                    raise UsageError(
                        f"--mesh names the axis {name!r} twice; give each axis once, or list the meshes: --meshes"
                    )
                texts[name] = [after]
            elif name:
                texts[name].append(part)
            if not name:
                raise UsageError(f"--mesh {word}: write AXIS=NUMBERS, as in --mesh shard=8..1024")
    sizes = {name: parse_numbers(f"--mesh {name}", ",".join(parts)) for name, parts in texts.items()}
    return [dict(zip(sizes, point, strict=True)) for point in itertools.product(*sizes.values())]


def parse_mesh_list(words: Sequence[str]) -> list[dict[str, int]]:
    """Reads meshes: [{"shard": 16}, {"replicate": 2, "shard": 8}] from "shard=16; replicate=2,shard=8".

    Raises:
        UsageError: a mesh cannot be read, or names an axis twice.
    """
    texts = [text.strip() for word in words for text in word.split(";")]
    return [parse_mesh([text], "--meshes") for text in texts if text] or [parse_mesh([words[0]], "--meshes")]


def batched(factory: str) -> _Batched:
    """A function that makes model and inputs for a batch size, from a factory named as PKG.MODULE:FACTORY.

    A factory with a parameter ``batch`` is called with the batch size. Any other is called without arguments, and dim 0
    of every tensor among its inputs is resized.

    Raises:
        UsageError: the factory cannot be imported, or needs other parameters.
    """
    found = load_attribute("the factory", factory)
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):  # some callables have no signature
        return _Batched(factory, False)
    needed = [
        name
        for name, parameter in parameters.items()
        if name != "batch"
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise UsageError(f"{factory} needs {', '.join(needed)}: a factory takes batch=N, or nothing")
    return _Batched(factory, "batch" in parameters)


@dataclass(frozen=True, slots=True)
class _Batched:
    """Calls a factory by its name; it pickles, so other processes can call it too."""

    factory: str
    takes_batch: bool

    def __call__(self, batch: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        if self.takes_batch:
            return read_inputs(self.factory, {"batch": batch})
        from ..inspection import resized

        model, args, kwargs = resized(_Example(self.factory))(batch)
        return model, tuple(args), dict(kwargs)


@dataclass(frozen=True, slots=True)
class _Example:
    factory: str

    def __call__(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        return make_inputs(self.factory)
