"""``graphshard calibrate``: measures this machine and writes a hardware card."""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from ..cost import HardwareCard, load_card
from ..errors import UsageError
from ..progress import StageLines
from ..setting_checks import LAUNCH_VARIABLES, check_card_file, check_spawned_ranks
from ..user_cache import CACHE_VARIABLE, cache_folder, is_switched_off


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, help='file of the card (JSON); default: kept where hardware="auto" finds it'
    )
    parser.add_argument(
        "--nproc", type=int, default=2, help="ranks to spawn without torchrun (default 2); 1 needs --like"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default cuda under torchrun where there is one, else cpu"
    )
    parser.add_argument(
        "--like",
        default="",
        metavar="CARD",
        help="card that gives the links not measured; one rank measures none",
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a trial of the command, no more")


def run_calibrate(options: argparse.Namespace) -> int:
    """Measures this machine and writes a card, or keeps it where the backend looks for one."""
    is_launched = all(name in os.environ for name in LAUNCH_VARIABLES)
    if options.like:
        load_card(options.like)  # an unknown card is an error before measuring
    if options.out is not None:
        check_card_file(options.out)
    if not is_launched:
        check_spawned_ranks(options.nproc, options.like, None)
    # Torch takes seconds to import. Mistakes above are reported before that.
    import torch

    from ..cost import CalibrationJob, ProbeSizes, calibrate

    device = options.device or ("cuda" if is_launched and torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device here; use --device cpu")
    num_ranks = int(os.environ["WORLD_SIZE"]) if is_launched else options.nproc
    ranks_here = int(os.environ["LOCAL_WORLD_SIZE"]) if is_launched else max(num_ranks, 1)
    if options.out is None:
        _check_that_it_is_found(device, num_ranks, ranks_here)
    num_threads = 0 if "OMP_NUM_THREADS" in os.environ else max((os.cpu_count() or 1) // ranks_here, 1)
    with tempfile.TemporaryDirectory() as folder:
        job = CalibrationJob(
            out=options.out or Path(folder, "calibrated.json"),
            device_type=device,
            sizes=ProbeSizes.for_device(device, quick=options.quick),
            num_threads=num_threads,
            like=options.like,
        )
        card = calibrate(job, num_ranks=num_ranks, report=StageLines())
    if card is None:
        return 0
    if options.out is None:
        _keep(replace(card, file=None), num_ranks, num_threads or torch.get_num_threads())
    else:
        print(f"wrote {options.out}; use it with hardware={str(options.out)!r}")
    return 0


def _check_that_it_is_found(device: str, num_ranks: int, ranks_here: int) -> None:
    """Refuses to measure a card for the cache that ``hardware="auto"`` would not take from there.

    Raises:
        UsageError: it says why, and names --out.
    """
    import torch

    from ..hardware import shipped_card_of_device

    why = ""
    if cache_folder() is None:
        reason = f"{CACHE_VARIABLE} is empty" if is_switched_off() else "there is no home folder"
        why = f"{reason}, so no card is kept"
    elif num_ranks == 1:
        why = "a card of one rank has no collectives, and the backend looks for those of its process groups"
    elif ranks_here != num_ranks:
        why = "the backend measures several nodes by itself"
    elif shipped := shipped_card_of_device(torch.device(device)):
        why = f"the backend takes the shipped card {shipped} on this GPU"
    if why:
        raise UsageError(
            f"calibrate without --out: {why}; give --out FILE, and option hardware=FILE in training"
        )


def _keep(card: HardwareCard, num_ranks: int, num_threads: int) -> None:
    """Keeps a card for jobs of as many ranks on this machine.

    Raises:
        UsageError: the cache folder cannot be written.
    """
    import torch

    from ..hardware import keep_calibrated

    is_cpu = card.device_type == "cpu"
    device = torch.device("cpu") if is_cpu else torch.device("cuda", torch.cuda.current_device())
    backend = "gloo" if is_cpu else "nccl"
    file = keep_calibrated(card, backend, device, num_ranks=num_ranks, num_threads=num_threads)
    if file is None:
        raise UsageError(f"calibrate without --out: {cache_folder()} cannot be written; give --out FILE")
    threads = f" of {num_threads} thread(s)" if is_cpu else ""
    print(
        f'kept {file}; hardware="auto" takes it for {num_ranks} ranks{threads} in one process group on this machine'
    )
