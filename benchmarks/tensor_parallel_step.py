"""Time of a training step on four ranks, two of tensor parallelism by two of data: graphshard against torch.

    python benchmarks/tensor_parallel_step.py
    python benchmarks/tensor_parallel_step.py --networks shaped --across tp --json out.json

A Llama in float32 with AdamW, on gloo. torch's contenders split it as torchtitan does it, with ``parallelize_module``,
compile each layer and the loss, and shard with FSDP2. graphshard gets the plain model: ``parallelize`` with a ready
plan, ``fully_shard``, ``torch.compile``. The shaped network joins two nodes of two ranks by a rate-limited link: the
axis of data crosses it, or the one of tensor parallelism (``--across tp``). The ranks of a node share one core.
Collectives are those of one step of rank 0; their bytes are of the larger tensor of each.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.profiler import ProfilerActivity, profile

import graphshard
from contenders import copy_source
from llama_tensor_parallel import BY_COLUMNS, BY_ROWS, split
from shaped_link import LinkEnd, ShapedLinkError, find_obstacle, shaped_link
from step_report import MAX_LOSS_GAP, round_ratios
from step_time import (
    NETWORKS,
    RankFailedError,
    await_ranks,
    choice_list,
    describe_machine,
    positive,
    rank_environment,
    rate,
    stop_on_signal,
    stop_rank,
)
from step_worker import join_group, use_cache

LLAMA = Path(__file__).parents[1] / "examples" / "llama_model.py"
NUM_RANKS, NUM_WARM_STEPS, VOCABULARY = 4, 3, 512

#: Collectives as the profiler names them; graphs call the functional ones, FSDP2 those of c10d.
KINDS = {
    "c10d::_allgather_base_": "gathers",
    "c10d::_reduce_scatter_base_": "scatters",
    "_c10d_functional::all_reduce": "all-reduces",
    "_c10d_functional::all_reduce_": "all-reduces",
    "_c10d_functional::all_gather_into_tensor": "gathers",
    "_c10d_functional::all_gather_into_tensor_out": "gathers",
    "_c10d_functional::reduce_scatter_tensor": "scatters",
    "_c10d_functional::all_to_all_single": "all-to-alls",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A model that is ready to train; ``forward`` takes a batch and gives its loss."""

    model: nn.Module
    forward: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    has_split_loss: bool = False

    def step(self, batch: tuple[Tensor, Tensor]) -> tuple[float, float]:
        """Seconds and loss."""
        start = time.perf_counter()
        with loss_parallel() if self.has_split_loss else contextlib.nullcontext():
            loss = self.forward(*batch)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start, float(loss.detach())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def split_by_columns(model: nn.Module, tp: DeviceMesh) -> None:
    """Weights alone: values between layers are whole; embedding, output layer and loss along the vocabulary."""
    plan = {name: ColwiseParallel() for name in BY_COLUMNS} | {name: RowwiseParallel() for name in BY_ROWS}
    for layer in model.layers:
        parallelize_module(layer, tp, plan)
    ends = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(use_local_output=False),
    }
    parallelize_module(model, tp, ends)


def build_torch(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    splits: Callable[[nn.Module, DeviceMesh], None],
    is_ahead: bool = False,
) -> Trainer:
    """In torchtitan's order: split, compile the layers, shard.

    ``is_ahead``: gathers are asynchronous, and each layer starts that of the next one. On the CPU FSDP2 overlaps none
    without it.
    """
    splits(model, mesh["tp"])
    # The embedding gives a tensor that is still being summed. A compiled layer that reads one gives it no gradient.
    model.tokens.register_forward_hook(lambda module, inputs, output: output + 0)
    for layer in model.layers:
        layer.compile(fullgraph=True)
    model.loss = torch.compile(model.loss)
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh["dp"])
    if is_ahead:
        layers = list(model.layers)
        model._set_unshard_async_op(True)
        model.set_modules_to_forward_prefetch(layers[:1])
        for before, after in itertools.pairwise(layers):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
    return Trainer(model=model, forward=model, optimizer=optimizer_of(model), has_split_loss=True)


def build_graphshard(model: nn.Module, mesh: DeviceMesh, *, plan: str) -> Trainer:
    """The plain model, with a ready plan and no other option."""
    graphshard.parallelize(model, mesh["tp"], plan)
    for unit in (*model.layers, model):
        graphshard.fully_shard(unit, mesh=mesh["dp"])
    forward = torch.compile(model, backend="graphshard", fullgraph=True)
    return Trainer(model=model, forward=forward, optimizer=optimizer_of(model))


CONTENDERS: dict[str, Callable[[nn.Module, DeviceMesh], Trainer]] = {
    "torch-columns": partial(build_torch, splits=split_by_columns),
    "torch-columns-ahead": partial(build_torch, splits=split_by_columns, is_ahead=True),
    "torch-sequence": partial(build_torch, splits=split),
    "torch-sequence-ahead": partial(build_torch, splits=split, is_ahead=True),
    "graphshard-columns": partial(build_graphshard, plan="llama"),
    "graphshard-sequence": partial(build_graphshard, plan="llama-sequence"),
}


@dataclass(slots=True, kw_only=True)
class Record:
    """What one rank saw of one contender; ``rounds[i]`` holds the seconds of one turn's steps."""

    losses: list[float]
    rounds: list[list[float]] = field(default_factory=list)
    collectives: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contender; ratios are of the slowest rank's medians of each round, to the fastest contender of torch."""

    contender: str
    median_ms: float
    min_ms: float
    ratio_low: float
    ratio: float
    ratio_high: float
    collectives: Mapping[str, Sequence[int]]
    samples_ms: list[list[float]]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--width", type=positive, default=256)
    parser.add_argument("--context", type=positive, default=128)
    parser.add_argument("--batch", type=positive, default=4, help="sequences of each pair of ranks")
    parser.add_argument("--rounds", type=positive, default=6)
    parser.add_argument("--steps-per-round", type=positive, default=2)
    parser.add_argument("--contenders", type=choice_list(tuple(CONTENDERS)), default=tuple(CONTENDERS))
    parser.add_argument("--networks", type=choice_list(NETWORKS), default=NETWORKS)
    parser.add_argument("--rate", type=rate, default="1gbit", help="of the shaped link, each way")
    parser.add_argument("--across", choices=("dp", "tp"), default="dp", help="the axis over the shaped link")
    parser.add_argument(
        "--limit", type=positive, default=900, metavar="S", help="seconds per network at most"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample and fact here")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def node_of(rank: int, across: str) -> int:
    """The node of a rank of the mesh (dp, tp)."""
    return rank // 2 if across == "dp" else rank % 2


def build(name: str, options: argparse.Namespace, mesh: DeviceMesh, folder: Path) -> Trainer:
    """A contender, with a copy of the model's source for itself and the same weights as the others."""
    source: ModuleType = copy_source(name, folder, str(LLAMA))
    config = source.LlamaConfig(
        num_layers=options.layers,
        width=options.width,
        hidden=3 * options.width,
        num_heads=8,
        num_kv_heads=4,
        vocabulary=VOCABULARY,
    )
    torch.manual_seed(0)
    return CONTENDERS[name](source.Llama(config), mesh)


def count_collectives(trainer: Trainer, batch: tuple[Tensor, Tensor]) -> dict[str, list[int]]:
    """By kind, the number and bytes of a step's collectives."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
        trainer.step(batch)
    found: dict[str, list[int]] = {}
    for event in trace.profiler.kineto_results.events():
        if (kind := KINDS.get(event.name())) is None:
            continue
        elements = max(math.prod(shape) for shape in event.shapes() if shape)
        grows = event.name() == "_c10d_functional::all_gather_into_tensor"
        total = found.setdefault(kind, [0, 0])
        total[0] += 1
        total[1] += elements * (2 if grows else 1) * 4
    return found


def run_rank(options: argparse.Namespace) -> None:
    """Measures everything on one rank and writes what it found."""
    faulthandler.dump_traceback_later(options.limit + 10, exit=True)
    rank, folder = options.rank, options.folder
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[node_of(rank, options.across) % len(cores)]})
    torch.set_num_threads(1)
    (sources := folder / f"rank{rank}").mkdir()
    join_group(folder, options.address, rank, NUM_RANKS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    generator = torch.Generator().manual_seed(1 + rank // 2)
    batch = tuple(torch.randint(VOCABULARY, (2, options.batch, options.context), generator=generator))
    trainers: dict[str, Trainer] = {}
    records: dict[str, Record] = {}
    for name in options.contenders:
        use_cache(folder.parent / "compiled", 0, "all")  # ranks share their kernels
        trainers[name] = build(name, options, mesh, sources)
        dist.barrier()
        seconds, loss = trainers[name].step(batch)
        losses = [loss, *(trainers[name].step(batch)[1] for _ in range(NUM_WARM_STEPS))]
        records[name] = Record(losses=losses)
        if rank == 0:
            print(f"  {name}: first call {seconds:.1f} s", flush=True)
    names = list(trainers)
    for turn in range(options.rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            trainers[name].step(batch)
            steps = [trainers[name].step(batch)[0] for _ in range(options.steps_per_round)]
            records[name].rounds.append(steps)
    for name in names:
        records[name].collectives = count_collectives(trainers[name], batch)
    found = {name: asdict(record) for name, record in records.items()}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def start(
    rank: int, argv: Sequence[str], folder: Path, address: str, end: LinkEnd | None
) -> subprocess.Popen:
    """One rank, inside its node's namespace when there is one; its errors go to a log."""
    own = [f"--rank={rank}", f"--folder={folder}", f"--address={address}"]
    command = [sys.executable, __file__, *argv, *own]
    with (folder / f"rank{rank}.log").open("w") as log:
        return subprocess.Popen(
            end.command(command) if end else command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            stderr=log,
            env=rank_environment(end),
            start_new_session=True,
        )


def measure(
    network: str, options: argparse.Namespace, argv: Sequence[str], folder: Path
) -> list[dict[str, dict]]:
    """What each rank found on one network."""
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        ends = stack.enter_context(shaped_link(options.rate)) if network == "shaped" else None
        address = ends[0].address if ends else "127.0.0.1"
        processes: list[subprocess.Popen] = []
        try:
            for rank in range(NUM_RANKS):
                end = ends[node_of(rank, options.across)] if ends else None
                processes.append(start(rank, argv, folder, address, end))
            await_ranks(processes, folder, options.limit)
        finally:
            for process in processes:
                stop_rank(process)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def make_rows(ranks: Sequence[dict[str, dict]]) -> list[Row]:
    """A row for each contender, in the order in which they ran."""
    samples = {
        name: [
            [1e3 * max(step) for step in zip(*turn, strict=True)]
            for turn in zip(*(rank[name]["rounds"] for rank in ranks), strict=True)
        ]
        for name in ranks[0]
    }
    medians = {name: statistics.median(itertools.chain(*each)) for name, each in samples.items()}
    of_torch = {name: each for name, each in medians.items() if name.startswith("torch")} or medians
    reference = min(of_torch, key=of_torch.__getitem__)
    rows = []
    for name, record in ranks[0].items():
        low, middle, high = round_ratios(samples[name], samples[reference])
        rows.append(
            Row(
                contender=name,
                median_ms=medians[name],
                min_ms=min(itertools.chain(*samples[name])),
                ratio_low=low,
                ratio=middle,
                ratio_high=high,
                collectives=record["collectives"],
                samples_ms=samples[name],
            )
        )
    return rows


def loss_gaps(ranks: Sequence[dict[str, dict]]) -> list[str]:
    """Contenders whose losses are not those of the first one."""
    gaps = []
    for rank, records in enumerate(ranks):
        expected = next(iter(records.values()))["losses"]
        gaps += [
            f"{name}: losses {record['losses']} on rank {rank}, not {expected}"
            for name, record in records.items()
            if not all(map(partial(math.isclose, rel_tol=MAX_LOSS_GAP), record["losses"], expected))
        ]
    return gaps


def print_rows(rows: Sequence[Row]) -> None:
    """The table of one network."""
    print(f"{'contender':22} median ms   min ms  ratio (quartiles)     collectives: number, MiB")
    for row in rows:
        counts = ", ".join(
            f"{kind} {count}, {size / 2**20:.1f}" for kind, (count, size) in row.collectives.items()
        )
        ratio = f"{row.ratio:.2f} ({row.ratio_low:.2f} - {row.ratio_high:.2f})"
        print(f"{row.contender:22} {row.median_ms:9.1f} {row.min_ms:8.1f}  {ratio:20}  {counts}")


def main(argv: Sequence[str]) -> int:
    """The exit status: 1 if losses differ."""
    options = parse(argv)
    if options.rank is not None:
        run_rank(options)
        return 0
    sys.stdout.reconfigure(line_buffering=True)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop_on_signal)
    print(f"$ {shlex.join(['python', 'benchmarks/tensor_parallel_step.py', *argv])}")
    machine = describe_machine()
    print("  ".join(f"{name} {value}" for name, value in machine.items()))
    results: dict[str, dict] = {}
    with tempfile.TemporaryDirectory(prefix="tensor-parallel-", ignore_cleanup_errors=True) as scratch:
        for network in options.networks:
            if network == "shaped" and (obstacle := find_obstacle()):
                print(f"shaped network SKIPPED: {obstacle}")
                continue
            started = time.monotonic()
            try:
                ranks = measure(network, options, argv, Path(scratch) / network)
            except (ShapedLinkError, RankFailedError) as error:
                sys.exit(f"{network}: {error}")
            rows, gaps = make_rows(ranks), loss_gaps(ranks)
            title = f"shaped to {options.rate}, {options.across} across" if network == "shaped" else network
            print(f"\n== {title}: took {time.monotonic() - started:.0f} s ==")
            print_rows(rows)
            print(*(f"WRONG {gap}" for gap in gaps), sep="\n") if gaps else print("losses agree")
            results[network] = {"rows": [asdict(row) for row in rows], "gaps": gaps}
    if options.json:
        facts = {"argv": list(argv), "machine": machine, "results": results}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")
    return int(any(each["gaps"] for each in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
