"""Gloo's reduce-scatter against an exchange of pieces and a sum, which `exchange_reductions` puts in its place.

    python benchmarks/gloo_reductions.py
    python benchmarks/gloo_reductions.py --links loopback

Two ranks on a core each. For each size the two take turns; of each the median of the time until the result is
there counts, and of the seconds that the process spent on its core, gloo's threads included.
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

from graphshard.ir.collectives import REDUCE_SCATTER, WAIT
from graphshard.ir.lowering import EagerEmitter, emit_exchange, emit_sum_of_exchange
from shaped_link import check_rate, find_obstacle, shaped_link

NUM_RANKS = 2
LIMIT_S = 300
KIB = 2**10
SIZES = (4 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB, 8192 * KIB)


def reduce_scatter(value: torch.Tensor) -> torch.Tensor:
    """What FSDP2 calls."""
    return WAIT(REDUCE_SCATTER(value, "sum", NUM_RANKS, dist.group.WORLD.group_name))


def exchange(value: torch.Tensor) -> torch.Tensor:
    """What compiled graphs run."""
    emit = EagerEmitter()
    received = WAIT(emit_exchange(emit, value, NUM_RANKS, dist.group.WORLD.group_name))
    return emit_sum_of_exchange(emit, received, "sum", NUM_RANKS)


def take_turns(num_bytes: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Median milliseconds and core milliseconds of both."""
    contenders: dict[str, Callable[[torch.Tensor], torch.Tensor]]
    contenders = {"reduce_scatter": reduce_scatter, "exchange": exchange}
    value = torch.randn(num_bytes // 4)
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    results = {name: call(value) for name, call in contenders.items()}
    torch.testing.assert_close(*results.values())
    for _ in range(rounds):
        for name, call in contenders.items():
            dist.barrier()
            wall, core = time.perf_counter(), time.process_time()
            call(value)
            seen[name].append((time.perf_counter() - wall, time.process_time() - core))
    return {
        name: tuple(1e3 * statistics.median(column) for column in zip(*rows, strict=True))
        for name, rows in seen.items()
    }


def run_rank(rank: int, rounds: int, host: str, folder: Path) -> None:
    """One rank; rank 0 prints the table."""
    os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    torch.set_num_threads(1)
    limit = timedelta(seconds=LIMIT_S)
    port_file = folder / "port"
    if rank == 0:
        store = dist.TCPStore(host, 0, NUM_RANKS, is_master=True, timeout=limit, wait_for_workers=False)
        port_file.with_suffix(".part").write_text(str(store.port))
        port_file.with_suffix(".part").rename(port_file)
    else:
        deadline = time.monotonic() + LIMIT_S
        while not port_file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("rank 0 wrote no port")
            time.sleep(0.05)
        store = dist.TCPStore(host, int(port_file.read_text()), NUM_RANKS, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=limit)
    for num_bytes in SIZES:
        (slow, slow_core), (fast, fast_core) = take_turns(num_bytes, rounds).values()
        if rank == 0:
            print(
                f"{num_bytes // KIB:8} KiB {slow:10.2f} {fast:10.2f} {fast / slow:7.2f} "
                f"{slow_core:12.2f} {fast_core:10.2f} {fast_core / slow_core:7.2f}",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


def run_link(where: str, rounds: int) -> None:
    """Both ranks on one link."""
    print(f"\n== {where} ==\n     size  reduce ms   exchange   ratio   reduce core   exchange   ratio", flush=True)
    with tempfile.TemporaryDirectory(prefix="gloo-") as folder:

        def argv(rank: int, host: str) -> list[str]:
            return [sys.executable, __file__, "--rank", f"{rank},{rounds},{host},{folder}"]

        if where == "loopback":
            wait_for([subprocess.Popen(argv(rank, "127.0.0.1")) for rank in range(NUM_RANKS)])
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default="loopback,1gbit", help="loopback, or rates of a link between namespaces")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank, rounds, host, folder = options.rank.split(",", 3)
        run_rank(int(rank), int(rounds), host, Path(folder))
        return 0
    for where in options.links.split(","):
        if where != "loopback" and (obstacle := find_obstacle()):
            print(f"{where} SKIPPED: {obstacle}")
            continue
        run_link(where if where == "loopback" else check_rate(where), options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
