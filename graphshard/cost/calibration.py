"""Measures this machine and its process group, and writes the result as a hardware card.

Under torchrun it measures the ranks that torchrun started, all at work at the same time. Otherwise it spawns ranks of
gloo on this machine. A device alone has no links: another card gives them.
"""

from __future__ import annotations

import os
import platform
import tempfile
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ..errors import CalibrationError
from ..machine import Machine
from ..setting_checks import LAUNCH_VARIABLES, check_card_file, check_spawned_ranks
from .card_files import load_card
from .cards import HardwareCard, LinkClass
from .collective_probes import CommProbe, probe_collectives, slowest
from .probes import ComputeProbe, ProbeSizes, Report, probe_compute, say_nothing

#: Entries of a card that describe collectives, beside the links.
_COMM_NUMBERS = tuple(each.name for each in fields(CommProbe) if each.name != "link")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationJob:
    """What every rank measures.

    Attributes:
        out: file of the card; rank 0 writes it.
        device_type: "cpu" or "cuda".
        sizes: what to measure.
        num_threads: threads of each rank; 0 leaves torch's choice.
        like: a card whose links replace those that were not measured; "" copies the measured links. One rank needs
            it: all that is known of its collectives is what this card says.
    """

    out: Path
    device_type: str
    sizes: ProbeSizes
    num_threads: int = 0
    like: str = ""


def calibrate(
    job: CalibrationJob, *, num_ranks: int = 2, report: Report = say_nothing
) -> HardwareCard | None:
    """Measures and writes a card.

    Args:
        job: what to measure, and where the card goes.
        num_ranks: ranks of gloo to spawn, at least 2; 1 measures this process alone, with the links of ``job.like``.
            Ignored under torchrun.
        report: takes lines of progress.

    Returns:
        The card; None under torchrun on ranks other than 0.

    Raises:
        CalibrationError: the folder does not exist, the card would be a folder, one rank without ``job.like``, several
            nodes with several ranks each, several GPUs without torchrun, or a rank failed.
    """
    check_card_file(job.out)
    if is_launched():
        return _calibrate_launched(job, report)
    check_spawned_ranks(num_ranks, job.like, job.device_type)
    if num_ranks == 1:
        return _calibrate_alone(job, report)
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(_spawned_rank, (num_ranks, str(Path(folder, "store")), job, report), num_ranks)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise CalibrationError(f"a rank failed: {str(error).strip()}") from error
    return load_card(job.out)


def _calibrate_alone(job: CalibrationJob, report: Report) -> HardwareCard:
    """The card of this process's device, with the links of ``job.like``."""
    if job.num_threads:
        torch.set_num_threads(job.num_threads)
    device = torch.device(job.device_type, torch.cuda.current_device() if job.device_type == "cuda" else None)
    report("measure compute, then write the card")
    compute = probe_compute(device, job.sizes, report=report)
    like = load_card(job.like)
    taken = {
        name: getattr(like, name) for name in (*_COMM_NUMBERS, "intra_node", "inter_node", "ranks_per_node")
    }
    card = _card_of(
        job,
        compute,
        taken,
        dict.fromkeys(taken, f"card {job.like}"),
        summary=f"{describe_machine(job.device_type)}, links of {job.like}",
    )
    card.save(job.out)
    return load_card(job.out)


def is_launched() -> bool:
    """True in a process that torchrun started."""
    return all(name in os.environ for name in LAUNCH_VARIABLES)


def _calibrate_launched(job: CalibrationJob, report: Report) -> HardwareCard | None:
    if job.device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if int(os.environ["WORLD_SIZE"]) == 1 and job.like:
        return _calibrate_alone(job, report)
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("nccl" if job.device_type == "cuda" else "gloo")
    try:
        measure_group(job, int(os.environ["LOCAL_WORLD_SIZE"]), report)
        return load_card(job.out) if dist.get_rank() == 0 else None
    finally:
        if started:
            dist.destroy_process_group()


def _spawned_rank(rank: int, num_ranks: int, store: str, job: CalibrationJob, report: Report) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    measure_group(job, num_ranks, report)
    dist.barrier()
    dist.destroy_process_group()


def measure_group(job: CalibrationJob, local_ranks: int, report: Report = say_nothing) -> None:
    """Body of every rank of the default process group; rank 0 writes the card.

    Args:
        job: what to measure, and where the card goes.
        local_ranks: number of ranks on a node: all ranks, or one.
        report: takes lines of progress, on rank 0.

    Raises:
        CalibrationError: one rank, or several nodes with several ranks each.
    """
    num_ranks = dist.get_world_size()
    if 1 < local_ranks < num_ranks:
        raise CalibrationError(
            f"{num_ranks} ranks, {local_ranks} of them in a node: the times of such a group cannot be told "
            "apart into links; start the ranks of one node, or one rank on each node"
        )
    if num_ranks < 2:
        raise CalibrationError(
            "collectives need at least 2 ranks; start more with --nproc-per-node, or name the card whose links one "
            "rank takes (--like)"
        )
    if job.num_threads:
        torch.set_num_threads(job.num_threads)
    device = torch.device(job.device_type, torch.cuda.current_device() if job.device_type == "cuda" else None)
    tell = report if dist.get_rank() == 0 else say_nothing
    tell("measure compute, then collectives")
    compute = probe_compute(
        device, job.sizes, report=tell, together=dist.barrier, slowest=partial(slowest, device)
    )
    tell("measure collectives, then write the card")
    comm = probe_collectives(device, job.sizes, report=tell)
    if dist.get_rank() == 0:
        _card(job, compute, comm, local_ranks).save(job.out)
    dist.barrier()


def _card(job: CalibrationJob, compute: ComputeProbe, comm: CommProbe, local_ranks: int) -> HardwareCard:
    source = _source(job)
    measured = "intra_node" if local_ranks > 1 else "inter_node"
    other = "inter_node" if local_ranks > 1 else "intra_node"
    like = load_card(job.like) if job.like else None
    taken: dict[str, Any] = {name: getattr(comm, name) for name in _COMM_NUMBERS}
    sources = dict.fromkeys((*taken, measured), source)
    taken |= {
        measured: comm.link,
        other: getattr(like, other) if like else _without_rows(comm.link),
        "ranks_per_node": local_ranks,
    }
    sources[other] = f"card {job.like}" if job.like else f"not measured; as {measured}"
    sources["ranks_per_node"] = "the ranks started on this machine"
    summary = f"{describe_machine(job.device_type)}, {dist.get_world_size()} ranks of {dist.get_backend()}"
    if job.device_type == "cpu":
        compute = replace(compute, memory_bytes=compute.memory_bytes // local_ranks)
    return _card_of(job, compute, taken, sources, summary=summary)


def _card_of(
    job: CalibrationJob,
    compute: ComputeProbe,
    taken: dict[str, Any],
    sources: dict[str, str],
    *,
    summary: str,
) -> HardwareCard:
    """The card of the measured compute, and of what was taken of links and collectives."""
    values: dict[str, Any] = {each.name: getattr(compute, each.name) for each in fields(compute)}
    of_compute = dict.fromkeys(values, _source(job))
    of_compute["efficiency.vector"] = "vector_flops is what a pointwise kernel reached"
    return HardwareCard(
        name=job.out.stem,
        summary=summary,
        device_type=job.device_type,
        machine=Machine.here() if job.device_type == "cpu" else None,
        sources=of_compute | sources | dict.fromkeys(("device_type", "machine"), "where it was measured"),
        **values,
        **taken,
    )


def _source(job: CalibrationJob) -> str:
    return f"measured by graphshard calibrate: {describe_machine(job.device_type)}"


def _without_rows(link: LinkClass) -> LinkClass:
    return LinkClass(
        latency_seconds=link.latency_seconds, bandwidth=link.bandwidth, efficiency=link.efficiency
    )


def describe_machine(device_type: str) -> str:
    """Processor or device, threads a rank and torch's version."""
    if device_type == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    threads = f"{torch.get_num_threads()} threads" if torch.get_num_threads() > 1 else "1 thread"
    return f"{model or platform.machine()}, {threads} a rank, torch {torch.__version__}"
