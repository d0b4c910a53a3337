"""One rank of the step benchmark; step_time.py starts two of these and reads the files they write.

Every contender lives in the same pair of processes. First each is built and compiled in turn with empty
caches, then they take turns, a few steps each, so that a noisy spell of the machine falls on all of them.
"""

from __future__ import annotations

import faulthandler
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.utils import clear_caches
from torch.distributed.device_mesh import init_device_mesh

from contenders import CONTENDERS, Site, Trainer, build_trainer
from gpt import GptConfig, random_batch
from graphshard.cost.calibration import CalibrationJob, measure_group
from graphshard.cost.probes import ProbeSizes
from step_memory import local_bytes, measure_step_memory, optimizer_bytes

NUM_RANKS = 2
NUM_WARM_STEPS = 3
COLLECTIVE_LIMIT_S = 300
PROBE_BYTES = 4 * 2**20
PROBES_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepJob:
    """What both ranks are told to do.

    `num_cards` hardware cards are measured for contenders that plan with one: the first before they are built, the
    others before later rounds. `cores[rank]` is the core a rank is pinned to, `store_host` is rank 0's address,
    `is_shaped` says that each rank is on a node of its own. `cache_folder` keeps compiled kernels: when it starts
    empty the first calls are compilations from nothing.
    """

    model: GptConfig
    batch: int
    rounds: int
    steps_per_round: int
    contenders: tuple[str, ...]
    micro_batches: int
    num_cards: int
    cores: tuple[int, ...]
    store_host: str
    is_shaped: bool
    folder: str
    cache_folder: str
    limit_s: float

    def save(self, path: Path) -> None:
        """Write the job as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> StepJob:
        """Read what `save` wrote."""
        fields = json.loads(path.read_text())
        fields["model"] = GptConfig(**fields["model"])
        for name in ("contenders", "cores"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


@dataclass(slots=True, kw_only=True)
class ContenderRecord:
    """What one rank saw of one contender; `rounds[i]` holds the seconds of one turn's steps."""

    first_call_s: float
    first_call_cpu_s: float
    losses: list[float]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    comm_bytes: int
    peak_bytes: int
    left_bytes: int
    rounds: list[list[float]] = field(default_factory=list)


def join_group(folder: Path, store_host: str, rank: int, num_ranks: int = NUM_RANKS) -> None:
    """Meet the other ranks through a TCPStore on a port the system picks, passed on in a file of the folder."""
    limit = timedelta(seconds=COLLECTIVE_LIMIT_S)
    port_file = folder / "port"
    if rank == 0:
        store = dist.TCPStore(store_host, 0, num_ranks, is_master=True, timeout=limit, wait_for_workers=False)
        part = port_file.with_suffix(".part")
        part.write_text(str(store.port))
        part.rename(port_file)
    else:
        deadline = time.monotonic() + COLLECTIVE_LIMIT_S
        while not port_file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank 0 wrote no port to {port_file} within {COLLECTIVE_LIMIT_S} s")
            time.sleep(0.05)
        store = dist.TCPStore(store_host, int(port_file.read_text()), num_ranks, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)


def measure_link() -> float:
    """Gbit/s each rank sends at while gathering; what the shaped link should limit to its rate.

    Of several gathers at once, what the others add to the first: gloo leaves a link idle while one is alone on it.
    """
    alone, at_once = (
        statistics.median([_gather_seconds(num) for _ in range(4)][1:]) for num in (1, PROBES_AT_ONCE)
    )
    return (PROBES_AT_ONCE - 1) * PROBE_BYTES * 8 / (at_once - alone) / 1e9


def _gather_seconds(at_once: int) -> float:
    """From the start of so many gathers to the end of all."""
    piece = torch.zeros(PROBE_BYTES, dtype=torch.uint8)
    wholes = [torch.zeros(NUM_RANKS * PROBE_BYTES, dtype=torch.uint8) for _ in range(at_once)]
    dist.barrier()
    start = time.perf_counter()
    works = [dist.all_gather_into_tensor(whole, piece, async_op=True) for whole in wholes]
    for work in works:
        work.wait()
    return time.perf_counter() - start


def measure_card(path: Path, *, is_shaped: bool) -> None:
    """Measure this machine and the link between the ranks; rank 0 writes the card."""
    sizes = ProbeSizes.for_device("cpu")
    local_ranks = 1 if is_shaped else NUM_RANKS
    measure_group(CalibrationJob(out=path, device_type="cpu", sizes=sizes), local_ranks)


def time_step(trainer: Trainer, batch: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Seconds and loss of one training step."""
    start = time.perf_counter()
    loss = trainer.run_step(*batch)
    return time.perf_counter() - start, loss


def read_cpu_s() -> float:
    """CPU seconds spent so far by this process and the compilers it waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def use_cache(folder: str | Path, rank: int, name: str) -> None:
    """Make the compiler keep its files in `folder` under `name`, and forget the kernels it holds in memory."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, f"rank{rank}", name))
    os.environ["GRAPHSHARD_CACHE"] = str(Path(folder, f"rank{rank}", "graphshard"))
    clear_caches()


def prepare_compiler(job: StepJob, site: Site, batch: tuple[Tensor, Tensor]) -> None:
    """Pay for what only the first compilation in a process does: imports, compiler checks, shared headers."""
    folder = Path(job.folder, f"prepare{site.mesh.get_rank()}")
    folder.mkdir()
    use_cache(job.cache_folder, site.mesh.get_rank(), "prepare")
    build_trainer("unsharded", replace(job.model, num_layers=1), site, folder).run_step(*batch)


def start_contender(
    name: str, job: StepJob, site: Site, batch: tuple[Tensor, Tensor]
) -> tuple[Trainer, ContenderRecord]:
    """Build, compile and warm up one contender; take its memory figures."""
    rank = site.mesh.get_rank()
    trainer = build_trainer(name, job.model, site, Path(job.folder, f"rank{rank}"), job.micro_batches)
    use_cache(job.cache_folder, rank, CONTENDERS[name].same_kernels_as or name)
    dist.barrier()
    cpu_s_before = read_cpu_s()
    first_call_s, loss = time_step(trainer, batch)
    first_call_cpu_s = read_cpu_s() - cpu_s_before
    losses = [loss] + [trainer.run_step(*batch) for _ in range(NUM_WARM_STEPS)]
    parameters = list(trainer.module.parameters())
    trainer.run_forward_backward(*batch)
    gradient_bytes = local_bytes(p.grad for p in parameters if p.grad is not None)
    trainer.run_update()
    memory = measure_step_memory(lambda: trainer.run_step(*batch))
    record = ContenderRecord(
        first_call_s=first_call_s,
        first_call_cpu_s=first_call_cpu_s,
        losses=losses,
        parameter_bytes=local_bytes(parameters),
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes(trainer.optimizer),
        comm_bytes=trainer.comm_bytes,
        peak_bytes=memory.peak_bytes,
        left_bytes=memory.left_bytes,
    )
    return trainer, record


def take_turns(
    job: StepJob,
    turn: int,
    trainers: dict[str, Trainer],
    records: dict[str, ContenderRecord],
    batch: tuple[Tensor, Tensor],
) -> None:
    """A round over the contenders, each round starting one further; an untimed step opens each turn."""
    names = list(trainers)
    first = turn % len(names)
    for name in names[first:] + names[:first]:
        dist.barrier()
        trainers[name].run_step(*batch)
        records[name].rounds.append([time_step(trainers[name], batch)[0] for _ in range(job.steps_per_round)])


def report_progress(rank: int, text: str) -> None:
    """Rank 0's progress goes to the stream it inherited."""
    if rank == 0:
        print(f"  {text}", flush=True)


def run_job(job: StepJob, rank: int) -> None:
    """Measure everything and write `rank<N>.json`."""
    os.sched_setaffinity(0, {job.cores[rank]})
    torch.set_num_threads(1)
    folder = Path(job.folder)
    (folder / f"rank{rank}").mkdir()
    join_group(folder, job.store_host, rank)
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("shard",))
    link_gbits = measure_link()
    report_progress(rank, f"link measured at {link_gbits:.2f} Gbit/s each way")
    batch = random_batch(job.model, batch=job.batch, seed=1 + rank)
    site = Site(mesh=mesh, card=folder / "card0.json")
    needs_card = any(CONTENDERS[name].needs_card for name in job.contenders)
    if needs_card:
        measure_card(site.card, is_shaped=job.is_shaped)
        report_progress(rank, "card measured")
    if any(CONTENDERS[name].is_compiled for name in job.contenders):
        prepare_compiler(job, site, batch)
    trainers: dict[str, Trainer] = {}
    records: dict[str, ContenderRecord] = {}
    for name in job.contenders:
        trainers[name], records[name] = start_contender(name, job, site, batch)
        report_progress(rank, f"{name}: first call {records[name].first_call_s:.1f} s")
    for turn in range(job.rounds):
        if needs_card and 0 < turn < job.num_cards:
            measure_card(folder / f"card{turn}.json", is_shaped=job.is_shaped)
        take_turns(job, turn, trainers, records, batch)
    link_gbits = statistics.mean([link_gbits, measure_link()])  # the machine drifts
    result = {"link_gbits": link_gbits, "records": {name: asdict(record) for name, record in records.items()}}
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """`step_worker.py JOB_FILE RANK`, started by step_time.py."""
    job, rank = StepJob.load(Path(sys.argv[1])), int(sys.argv[2])
    # Ends this process even when a collective hangs and the process that started it is gone.
    faulthandler.dump_traceback_later(job.limit_s, exit=True)
    run_job(job, rank)


if __name__ == "__main__":
    main()
