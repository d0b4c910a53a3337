"""``graphshard precompile PKG.MODULE:FACTORY``: the compiled step of a later run, made on one machine."""

from __future__ import annotations

import argparse
import json
import math
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cost import HardwareCard, load_card
from ..errors import UsageError
from ..progress import StageLines
from ..user_cache import CACHE_VARIABLE
from .early_checks import refuse_wrong_training
from .hf_model import hf_factory
from .inspect_command import RESHARD, add_training_arguments, make_inputs, mp_policy_of, parse_mesh

if TYPE_CHECKING:
    from ..precompile import Precompiled

_AUTO, _NO_CARD = "auto", "none"


def add_precompile_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``graphshard precompile``."""
    add = parser.add_argument
    add_training_arguments(parser)
    add("--batch", type=int, metavar="N", help="batch size of a rank, with --hf (default 1)")
    add(
        "--mesh",
        action="append",
        required=True,
        metavar="AXIS=N",
        help="mesh of the later run, outermost first: shard=8, or replicate=2,shard=4; names as in the run",
    )
    add("--out", type=Path, required=True, metavar="FOLDER", help="where plans, steps and kernels go")
    add(
        "--hardware",
        default=None,
        metavar="CARD",
        help="name or file of a card, none, or auto (default): the card that an earlier run has kept here",
    )
    add(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the backend in the later run: memory_budget=60GiB",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the later run computes (default cpu)")
    add(
        "--threads",
        type=int,
        default=1,
        metavar="N",
        help="threads of a rank, as OMP_NUM_THREADS (default 1)",
    )
    add(
        "--rank",
        action="append",
        type=int,
        default=[],
        metavar="N",
        help="only these ranks (default: as needed)",
    )


def run_precompile(options: argparse.Namespace) -> int:
    """Fills a folder and says how a later run finds it."""
    mesh = parse_mesh(options.mesh)
    given = dict(map(_read_option, options.option))
    _check_mesh(mesh)
    if options.threads < 1 or options.micro_batches < 1:
        raise UsageError("--threads and --micro-batches: give whole numbers, at least 1")
    num_ranks = math.prod(mesh.values())
    if wrong := [rank for rank in options.rank if not 0 <= rank < num_ranks]:
        raise UsageError(f"--rank {wrong[0]}: the mesh has ranks 0 to {num_ranks - 1}")
    make = _factory(options)
    refuse_wrong_training(options)
    if options.hardware not in (None, _AUTO, _NO_CARD):
        load_card(options.hardware)
    if options.out.exists() and not options.out.is_dir():
        raise UsageError(f"--out {options.out}: it is a file; name a folder")
    progress = StageLines()
    progress("import graphshard")
    # The imports below load Inductor, which takes seconds. Mistakes above are reported before that.
    import torch

    from ..backend import default_hardware
    from ..capture import ShardingRules
    from ..precompile import INDUCTOR_CACHE_VARIABLE, INDUCTOR_FOLDER, ShardedAs, precompile

    torch.set_num_threads(options.threads)
    hardware: Any = options.hardware or default_hardware()
    if hardware == _AUTO:
        hardware = _own_card(options, num_ranks)
    progress("compile")

    def tell(done: Precompiled) -> None:
        print(_line(done), flush=True)

    precompile(
        make,
        options.out,
        ShardedAs(
            mesh=mesh,
            is_unit=ShardingRules(mesh={"shard": num_ranks}, units=options.unit).is_unit,
            mp_policy=mp_policy_of(options),
            reshard_after_forward=RESHARD[options.reshard_after_forward],
            device_type=options.device,
        ),
        options={**given, "hardware": hardware},
        micro_batches=options.micro_batches,
        ranks=options.rank,
        tell=tell,
    )
    folder = options.out.resolve()
    print(
        f"a run finds this with {CACHE_VARIABLE}={folder} {INDUCTOR_CACHE_VARIABLE}={folder / INDUCTOR_FOLDER}"
    )
    return 0


def _check_mesh(mesh: dict[str, int]) -> None:
    """Refuses meshes that have another axis than those of shards and replicas, or an axis without ranks.

    Raises:
        UsageError: that.
    """
    shown = ",".join(f"{name}={size}" for name, size in mesh.items())
    if len(mesh) > 2 or (len(mesh) == 2 and next(iter(mesh)) == "shard"):
        raise UsageError(
            f"--mesh {shown}: one axis of shards, or replicas and then shards; a model on a further axis is "
            "parallelized and sharded by its factory"
        )
    if not all(mesh.values()):
        raise UsageError(f"--mesh {shown}: an axis has one rank at least")


def _factory(options: argparse.Namespace) -> Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    of_batch = hf_factory(options)

    def make() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        from torch import nn

        from ..capture import refuse_patterns_without_modules

        model, args, kwargs = (
            make_inputs(options.factory) if of_batch is None else of_batch(options.batch or 1)
        )
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"{options.factory} returned an exported program; precompile needs the model itself"
            )
        refuse_patterns_without_modules(model, "--unit", options.unit)
        return model, args, kwargs

    return make


def _read_option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name or name == "hardware":
        raise UsageError(
            f"--option {text}: write NAME=VALUE, as in --option bucket=unit; --hardware names a card"
        )
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _own_card(options: argparse.Namespace, num_ranks: int) -> HardwareCard:
    """The shipped card of this GPU, or the newest card that a run of so many ranks has kept here.

    Raises:
        UsageError: there is none.
    """
    import torch

    from ..hardware import kept_cards, shipped_card_of_device

    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    if (name := shipped_card_of_device(device)) is not None:
        return load_card(name)
    wanted = {"host": platform.node(), "torch": torch.__version__}
    fitting = [
        kept
        for kept in kept_cards()
        if all(kept.key.get(name) == value for name, value in wanted.items())
        and kept.key.get("ranks", "").startswith(f"{num_ranks} in all")
        and kept.need.device_type == options.device
    ]
    if not fitting:
        raise UsageError(
            f"--hardware auto: no run of {num_ranks} ranks on {options.device} has measured this machine; start the "
            "training once, or give --hardware, a card's name or file, or none, and the same in the run"
        )
    newest = max(fitting, key=lambda kept: kept.file.stat().st_mtime)
    folder = options.out / "cards"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / newest.file.name).exists():
        shutil.copy(newest.file, folder)  # the run finds it there, and measures nothing
    return newest.card


def _line(done: Precompiled) -> str:
    parts = [f"{done.compiled} graphs compiled", f"{done.found} found", f"{done.planned} plans made"]
    if done.not_kept:
        parts.append(f"{done.not_kept} graphs that Inductor does not keep")
    return f"rank {done.rank}: {', '.join(parts)}"
