"""``graphshard calibrate``: measures this machine and writes a hardware card."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ..errors import UsageError
from ..progress import StageLines


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="file of the card (JSON)")
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
    """Measures this machine and writes a card."""
    import torch

    from ..cost import CalibrationJob, ProbeSizes, calibrate, is_launched, load_card

    device = options.device or ("cuda" if is_launched() and torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device here; use --device cpu")
    if options.like:
        load_card(options.like)  # an unknown card is an error before measuring
    ranks_here = int(os.environ["LOCAL_WORLD_SIZE"]) if is_launched() else max(options.nproc, 1)
    num_threads = 0 if "OMP_NUM_THREADS" in os.environ else max((os.cpu_count() or 1) // ranks_here, 1)
    job = CalibrationJob(
        out=options.out,
        device_type=device,
        sizes=ProbeSizes.for_device(device, quick=options.quick),
        num_threads=num_threads,
        like=options.like,
    )
    if calibrate(job, num_ranks=options.nproc, report=StageLines()) is not None:
        print(f"wrote {options.out}; use it with hardware={str(options.out)!r}")
    return 0
