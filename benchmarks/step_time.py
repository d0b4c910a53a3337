"""Time of a training step, of its compilation and its memory, on two ranks: graphshard against FSDP2 and DDP.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --networks loopback --contenders fsdp2-compile,graphshard --json out.json

Two networks: loopback, and a rate-limited link between two network namespaces (Linux, root) where
communication takes wire time that a good schedule can hide. Both ranks run on the CPU with gloo, one thread
and one core each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from contenders import CONTENDERS
from gpt import GptConfig
from shaped_link import LinkEnd, ShapedLinkError, check_rate, find_obstacle, shaped_link
from step_report import Row, find_loss_gaps, format_table, make_rows
from step_worker import NUM_RANKS, StepJob

NETWORKS = ("loopback", "shaped")
MAX_LEFT_SHARE = 0.1
WORKER = Path(__file__).with_name("step_worker.py")


class RankFailedError(RuntimeError):
    """A rank ended with an error or ran out of time; the message holds the end of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkResult:
    """What was measured on one network."""

    network: str
    link_gbits: float
    seconds: float
    rows: list[Row]
    loss_gaps: list[str]


def positive(text: str) -> int:
    """Read an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def choice_list(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a reader of comma-separated names out of `known`, which puts them in the order of `known`."""

    def parse(text: str) -> tuple[str, ...]:
        names = {name.strip() for name in text.split(",") if name.strip()}
        unknown = sorted(names.difference(known))
        if unknown or not names:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(unknown) or 'none given'}; known: {', '.join(known)}"
            )
        return tuple(name for name in known if name in names)

    return parse


def rate(text: str) -> str:
    """Read a rate that tc understands."""
    try:
        return check_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; a bad option ends the program with a message."""
    names = "\n".join(f"  {name:15} {contender.summary}" for name, contender in CONTENDERS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"contenders:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--width", type=positive, default=256)
    parser.add_argument("--heads", type=positive, default=4)
    parser.add_argument("--context", type=positive, default=128)
    parser.add_argument("--vocab", type=positive, default=512)
    parser.add_argument("--batch", type=positive, default=4, help="sequences per rank")
    parser.add_argument("--micro-batches", type=positive, default=1, help="forwards and backwards in a step")
    parser.add_argument("--rounds", type=positive, default=8)
    parser.add_argument("--steps-per-round", type=positive, default=2)
    parser.add_argument("--contenders", type=choice_list(tuple(CONTENDERS)), default=tuple(CONTENDERS))
    parser.add_argument("--networks", type=choice_list(NETWORKS), default=NETWORKS)
    parser.add_argument(
        "--rate", type=rate, default="1gbit", help="of the shaped link, each way (default 1gbit)"
    )
    parser.add_argument(
        "--limit", type=positive, default=600, metavar="S", help="seconds per network at most"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample and fact here")
    parser.set_defaults(num_cards=1)
    options = parser.parse_args(argv)
    try:
        options.model = GptConfig(
            num_layers=options.layers,
            width=options.width,
            num_heads=options.heads,
            context=options.context,
            vocab=options.vocab,
        )
    except ValueError as error:
        parser.error(str(error))
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: no folder {options.json.absolute().parent}")
    return options


def pick_cores() -> tuple[int, ...]:
    """A core for each rank; the same one twice when there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    return tuple(cores[rank % len(cores)] for rank in range(NUM_RANKS))


def describe_machine() -> dict[str, str | int | float]:
    """Facts that the figures depend on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown"
    )
    return {
        "cpu": model,
        "num_cores": len(os.sched_getaffinity(0)),
        "load_at_start": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def rank_environment(end: LinkEnd | None) -> dict[str, str]:
    """One thread on the CPU, the link's device, and graphs that are always compiled anew."""
    return dict(
        os.environ,
        CUDA_VISIBLE_DEVICES="",
        GLOO_SOCKET_IFNAME=end.interface if end else "lo",
        OMP_NUM_THREADS="1",
        TORCHINDUCTOR_COMPILE_THREADS="1",
        TORCHINDUCTOR_AUTOGRAD_CACHE="0",
        TORCHINDUCTOR_FX_GRAPH_CACHE="0",
    )


def start_rank(rank: int, job_file: Path, end: LinkEnd | None) -> subprocess.Popen:
    """Start one rank, inside its namespace when there is one; its errors go to a log beside the job.

    Kernels are kept in a folder for each contender, empty at first.
    """
    argv = [sys.executable, str(WORKER), str(job_file), str(rank)]
    with job_file.with_name(f"rank{rank}.log").open("w") as log:
        return subprocess.Popen(
            end.command(argv) if end else argv,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            stderr=log,
            env=rank_environment(end),
            start_new_session=True,
        )


def stop_rank(process: subprocess.Popen) -> None:
    """Kill a rank and the compilers it started; it leads its own process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def await_ranks(processes: Sequence[subprocess.Popen], folder: Path, limit_s: float) -> None:
    """Return when every rank has ended well; raise RankFailedError when one has not, or at the limit."""
    deadline = time.monotonic() + limit_s
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            logs = [
                f"rank {rank} ended with status {codes[rank]}; the end of its log:\n"
                + "\n".join((folder / f"rank{rank}.log").read_text().splitlines()[-30:])
                for rank in failed
            ]
            raise RankFailedError("\n".join(logs))
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            raise RankFailedError(f"the ranks did not finish within {limit_s:.0f} s (see --limit)")
        time.sleep(0.1)


def run_ranks(options: argparse.Namespace, ends: tuple[LinkEnd, LinkEnd] | None, folder: Path) -> list[dict]:
    """Run both ranks to the end and return what each wrote to `folder`."""
    job = StepJob(
        model=options.model,
        batch=options.batch,
        rounds=options.rounds,
        steps_per_round=options.steps_per_round,
        contenders=options.contenders,
        micro_batches=options.micro_batches,
        num_cards=options.num_cards,
        cores=pick_cores(),
        store_host=ends[0].address if ends else "127.0.0.1",
        is_shaped=ends is not None,
        folder=str(folder),
        cache_folder=str(folder.parent / "compiled"),
        limit_s=options.limit + 10,
    )
    job.save(folder / "job.json")
    processes: list[subprocess.Popen] = []
    try:
        for rank in range(NUM_RANKS):
            processes.append(start_rank(rank, folder / "job.json", ends[rank] if ends else None))
        await_ranks(processes, folder, options.limit)
    finally:
        for process in processes:
            stop_rank(process)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def find_cold(options: argparse.Namespace) -> frozenset[str]:
    """The contenders that compile on the first network, rather than find their kernels compiled."""
    names = options.contenders
    return frozenset(name for name in names if CONTENDERS[name].same_kernels_as not in names)


def measure_network(network: str, options: argparse.Namespace, scratch: Path) -> NetworkResult:
    """Run the whole comparison on one network; compiled kernels stay in `scratch` for the next one."""
    started = time.monotonic()
    folder = scratch / network
    folder.mkdir()
    if network == "shaped":
        with shaped_link(options.rate) as ends:
            results = run_ranks(options, ends, folder)
    else:
        results = run_ranks(options, None, folder)
    records = [result["records"] for result in results]
    averaging = frozenset(name for name in options.contenders if CONTENDERS[name].averages_gradients)
    return NetworkResult(
        network=network,
        link_gbits=results[0]["link_gbits"],
        seconds=time.monotonic() - started,
        rows=make_rows(records, cold=find_cold(options) if network == options.networks[0] else frozenset()),
        loss_gaps=find_loss_gaps(records, averaging),
    )


def print_result(result: NetworkResult, options: argparse.Namespace) -> None:
    """The table of one network and what to know about it."""
    title = f"shaped to {options.rate}" if result.network == "shaped" else result.network
    print(f"\n== {title}: link {result.link_gbits:.2f} Gbit/s each way, took {result.seconds:.0f} s ==")
    print(format_table(result.rows))
    for row in result.rows:
        if row.left_bytes > MAX_LEFT_SHARE * row.peak_bytes:
            print(f"NOTE {row.contender}: {row.left_bytes} bytes not seen freed, so its peak may read high")
    for gap in result.loss_gaps:
        print(f"WRONG {gap}")


def save_results(
    options: argparse.Namespace, command: str, machine: Mapping[str, object], results: Sequence[NetworkResult]
) -> None:
    """Write every fact and sample so far to the file of `--json`."""
    facts = {
        "command": command,
        "machine": machine,
        "model": asdict(options.model),
        "batch": options.batch,
        "micro_batches": options.micro_batches,
        "rate": options.rate,
        "results": [asdict(result) for result in results],
    }
    options.json.write_text(json.dumps(facts, indent=1) + "\n")


def drop_unavailable(options: argparse.Namespace) -> None:
    """Leave out what cannot run here, saying so; exit when nothing is left."""
    obstacle = find_obstacle()
    if obstacle and "shaped" in options.networks:
        print(f"shaped network SKIPPED: {obstacle}")
        options.networks = tuple(name for name in options.networks if name != "shaped")
    if not options.networks:
        sys.exit("nothing left to measure")
    if len(set(pick_cores())) < NUM_RANKS:
        print("NOTE one core for both ranks: they take turns on it, so the times say little")
    if torch.cuda.is_available():
        print(
            "NOTE this benchmark needs one device per rank, so both ranks run on the CPU; the GPU is not used"
        )


def stop_on_signal(signum: int, frame: object) -> None:
    """Leave through the clean-up; a second signal must not interrupt that."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    sys.exit(f"stopped by {signal.Signals(signum).name}")


def main(argv: Sequence[str]) -> int:
    """Run, print and return the exit status: 1 when a contender trained another model than the rest."""
    options = parse_options(argv)
    sys.stdout.reconfigure(line_buffering=True)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop_on_signal)
    command = shlex.join(["python", "benchmarks/step_time.py", *argv])
    machine = describe_machine()
    print(f"$ {command}")
    print("  ".join(f"{name} {value}" for name, value in machine.items()))
    print(
        f"{options.model}, batch {options.batch} per rank, {options.micro_batches} micro-batches, {NUM_RANKS} ranks"
    )
    drop_unavailable(options)
    results = []
    with tempfile.TemporaryDirectory(prefix="step-time-", ignore_cleanup_errors=True) as scratch:
        for network in options.networks:
            print(f"measuring on {network} ...", file=sys.stderr)
            try:
                results.append(measure_network(network, options, Path(scratch)))
            except (ShapedLinkError, RankFailedError) as error:
                sys.exit(f"{network}: {error}")
            print_result(results[-1], options)
            if options.json:
                save_results(options, command, machine, results)
    return int(any(result.loss_gaps for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
