"""Gloo's collectives against what graphshard has in their place.

- reductions: gloo's reduce-scatter, and an exchange of pieces and a sum (`exchange_reductions`);
- gathers: gloo's all-gather, and messages straight into the result (`graphshard/_compat_gloo.py`).

    python benchmarks/gloo_collectives.py
    python benchmarks/gloo_collectives.py --links loopback --ranks 4

The ranks have a core each, as far as there are so many. For each size the two take turns; of each the median of the
time until the result is there counts, and of the seconds that the process spent on its core, gloo's threads included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from graphshard._compat_gloo import gather_single
from graphshard.ir.collectives import ALL_GATHER, REDUCE_SCATTER, WAIT
from graphshard.ir.lowering import EagerEmitter, emit_exchange, emit_sum_of_exchange
from shaped_link import check_rate, find_obstacle, shaped_link

LIMIT_S = 300
KIB = 2**10
SIZES = (4 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB, 8192 * KIB)


def reduce_scatter(value: torch.Tensor) -> torch.Tensor:
    """What FSDP2 calls."""
    return WAIT(REDUCE_SCATTER(value, "sum", dist.get_world_size(), dist.group.WORLD.group_name))


def exchange(value: torch.Tensor) -> torch.Tensor:
    """What compiled graphs run."""
    emit, num_ranks = EagerEmitter(), dist.get_world_size()
    received = WAIT(emit_exchange(emit, value, num_ranks, dist.group.WORLD.group_name))
    return emit_sum_of_exchange(emit, received, "sum", num_ranks)


def plain_gather(whole: torch.Tensor) -> torch.Tensor:
    """What FSDP2 calls. Each rank sends its part of ``whole``."""
    gathered = torch.empty_like(whole)
    gather_single(gathered, whole.chunk(dist.get_world_size())[dist.get_rank()])
    return gathered


def gather_in_place(whole: torch.Tensor) -> torch.Tensor:
    """What compiled graphs run."""
    shard = whole.chunk(dist.get_world_size())[dist.get_rank()]
    return WAIT(ALL_GATHER(shard, dist.get_world_size(), dist.group.WORLD.group_name))


PAIRS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "reductions": (reduce_scatter, exchange),
    "gathers": (plain_gather, gather_in_place),
}


def take_turns(pair: str, num_bytes: int, rounds: int) -> list[tuple[float, float]]:
    """Median milliseconds and core milliseconds of both."""
    value = torch.randn(num_bytes // 4)
    if pair == "gathers":
        dist.broadcast(value, 0)
    torch.testing.assert_close(*(call(value) for call in PAIRS[pair]))
    seen: list[list[tuple[float, float]]] = [[], []]
    for _ in range(rounds):
        for call, times in zip(PAIRS[pair], seen, strict=True):
            dist.barrier()
            wall, core = time.perf_counter(), time.process_time()
            call(value)
            times.append((time.perf_counter() - wall, time.process_time() - core))
    return [tuple(1e3 * statistics.median(column) for column in zip(*times, strict=True)) for times in seen]


def run_rank(rank: int, num_ranks: int, rounds: int, host: str, folder: Path) -> None:
    """One rank; rank 0 prints the tables."""
    os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    torch.set_num_threads(1)
    limit = timedelta(seconds=LIMIT_S)
    port_file = folder / "port"
    if rank == 0:
        store = dist.TCPStore(host, 0, num_ranks, is_master=True, timeout=limit, wait_for_workers=False)
        port_file.with_suffix(".part").write_text(str(store.port))
        port_file.with_suffix(".part").rename(port_file)
    else:
        deadline = time.monotonic() + LIMIT_S
        while not port_file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("rank 0 wrote no port")
            time.sleep(0.05)
        store = dist.TCPStore(host, int(port_file.read_text()), num_ranks, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
    for pair in PAIRS:
        if rank == 0:
            print(
                f"{pair}\n     size    gloo ms       here   ratio     gloo core       here   ratio",
                flush=True,
            )
        for num_bytes in SIZES:
            (slow, slow_core), (fast, fast_core) = take_turns(pair, num_bytes, rounds)
            if rank == 0:
                print(
                    f"{num_bytes // KIB:5} KiB {slow:10.2f} {fast:10.2f} {fast / slow:7.2f} "
                    f"{slow_core:13.2f} {fast_core:10.2f} {fast_core / slow_core:7.2f}",
                    flush=True,
                )
    dist.barrier()
    dist.destroy_process_group()


def run_link(where: str, num_ranks: int, rounds: int) -> None:
    """All ranks on one link."""
    print(f"\n== {where}, {num_ranks} ranks ==", flush=True)
    with tempfile.TemporaryDirectory(prefix="gloo-") as folder:

        def argv(rank: int, host: str) -> list[str]:
            return [sys.executable, __file__, "--rank", f"{rank},{num_ranks},{rounds},{host},{folder}"]

        if where == "loopback":
            wait_for([subprocess.Popen(argv(rank, "127.0.0.1")) for rank in range(num_ranks)])
            return
        with shaped_link(where) as ends:
            wait_for(
                [
                    subprocess.Popen(
                        end.command(argv(rank, ends[0].address)),
                        env={**os.environ, "GLOO_SOCKET_IFNAME": end.interface},
                    )
                    for rank, end in enumerate(ends)
                ]
            )


def wait_for(ranks: list[subprocess.Popen]) -> None:
    """Ends all when one fails or takes too long."""
    try:
        failed = [rank.wait(LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(failed):
        sys.exit("a rank failed")


def main() -> int:
    """Prints a table for each link."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--links", default="loopback,1gbit", help="loopback, or rates of a link between namespaces"
    )
    parser.add_argument("--ranks", type=int, default=2, help="2 on a link between namespaces")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank, num_ranks, rounds, host, folder = options.rank.split(",", 4)
        run_rank(int(rank), int(num_ranks), int(rounds), host, Path(folder))
        return 0
    if options.ranks != 2 and options.links != "loopback":
        parser.error("--ranks: a link between namespaces has two ends, so other numbers need --links loopback")
    for where in options.links.split(","):
        if where != "loopback" and (obstacle := find_obstacle()):
            print(f"{where} SKIPPED: {obstacle}")
            continue
        run_link(where if where == "loopback" else check_rate(where), options.ranks, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
