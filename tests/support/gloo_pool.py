"""Persistent pools of rank processes, so that a distributed test costs milliseconds instead of a launch.

One pool holds `world_size` processes in one gloo process group; they are forked once from a server that has
already imported torch and then serve calls until the test run ends. A call runs one function on every rank
and returns the results in rank order. An exception on any rank, a death or a hang raises `RankError` in the
caller, with each rank's traceback and the end of its output; the pool is then thrown away and the next call
gets a fresh one, because a failed call can leave collectives half done.

Functions travel by reference (module and qualified name), arguments and results by pickle.
"""

import contextlib
import faulthandler
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.brief_search import briefly
from support.interpreted_halves import interpreted_halves
from support.thorough import note_thorough
from support.unmeasured_guards import leave_guards_unmeasured

CALL_TIMEOUT_S = 240.0
"""A call that takes longer is a hang. Generous: a slow machine compiles a small transformer within it."""

COLLECTIVE_TIMEOUT_S = 120.0
"""Gloo's own limit, shorter, so that a collective nobody else joins usually ends in that rank's traceback."""

MAX_GROUPS = 24
"""A pool whose ranks have more process groups is replaced: each has threads that poll a hundred times a second."""

GRACE_S = 10.0
"""How long the other ranks may go on after the first one failed."""

PRELOADED_MODULES = [
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "graphshard.backend.entry",
    "pytest",
    "support.warm_ranks",
]
TESTS = Path(__file__).parents[1]
"""What the server of the ranks needs in its path to load `support`."""

SINGLE_THREAD_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}

TOLERATED_WARNINGS = [
    # torch warns about its own internals; nothing a user of graphshard wrote is at fault.
    (DeprecationWarning, r".*"),
    (UserWarning, r"The \.grad attribute of a Tensor that is not a leaf"),  # Dynamo, after a graph break
    # set_model_state_dict of a model on meta looks for a device
    (UserWarning, r"`_get_pg_default_device` will be deprecated"),
    (UserWarning, r"Multiple backends are registered with this ProcessGroup"),
    (UserWarning, r"DTensor random operators may not have complete support on cpu"),
    (UserWarning, r"Warning: Profiler clears events at the end of each cycle"),  # on 2.11
    (UserWarning, r"Torchinductor does not support code generation for complex operators"),
    (FutureWarning, r"`torch\._prims_common\.check` is deprecated"),  # Inductor's lowering of diagonal
    (FutureWarning, r"`torch\.jit\.script` is deprecated"),  # forward-mode derivatives, on 2.14
    (UserWarning, r"graphshard: a graph break cuts the model"),  # tested by itself
]
"""(category, message pattern) of the warnings that are not errors on a rank."""


class RankError(RuntimeError):
    """At least one rank failed; the message holds the report of every rank that did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One call as it is sent to a rank."""

    root: str
    """Folder that must be on sys.path for `module` to be importable."""
    module: str
    qualname: str
    arguments: bytes
    """Pickled apart from the task, so that `module` is imported before its classes are needed."""
    timeout_s: float
    interprets: bool
    """Halves are interpreted: see `interpreted_halves`."""
    is_thorough: bool
    """What the run takes: see `thorough`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """What a rank process needs to join its pool."""

    rank: int
    world_size: int
    store_port: int
    folder: Path
    inductor_cache: Path

    @property
    def output_file(self) -> Path:
        return self.folder / f"rank{self.rank}.txt"


def describe_task(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    timeout_s: float,
    interprets: bool = False,
    is_thorough: bool = True,
) -> Task:
    """Refer to a module-level function by name. Raises ValueError for a lambda or a nested function."""
    if "<" in function.__qualname__:
        raise ValueError(f"{function.__qualname__} cannot run on ranks: define it at module level")
    file = Path(inspect.getfile(function)).resolve()
    root = file.parents[function.__module__.count(".")]
    return Task(
        root=str(root),
        module=function.__module__,
        qualname=function.__qualname__,
        arguments=pickle.dumps(arguments),
        timeout_s=timeout_s,
        interprets=interprets,
        is_thorough=is_thorough,
    )


def run_task(task: Task) -> Any:
    """Run one task from a clean state: seeds, Dynamo's caches and counters; warnings are errors."""
    if task.root not in sys.path:
        sys.path.insert(0, task.root)
    target: Any = importlib.import_module(task.module)
    for part in task.qualname.split("."):
        target = getattr(target, part)
    arguments = pickle.loads(task.arguments)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()
    gc.freeze()  # what earlier calls left alive is not looked at again
    random.seed(0)
    torch.manual_seed(0)
    halves = interpreted_halves() if task.interprets else contextlib.nullcontext()
    note_thorough(task.is_thorough)
    with halves, briefly(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for category, pattern in TOLERATED_WARNINGS:
            warnings.filterwarnings("ignore", message=pattern, category=category)
        result = target(*arguments)
    pending = torch._C._distributed_c10d._get_work_registry_size()
    if pending:
        raise AssertionError(f"the call left {pending} collectives started and never waited for")
    return result


def serve_rank(setup: RankSetup, connection: Connection) -> None:
    """Body of a rank process: join the group, then answer tasks until `connection` closes."""
    output = os.open(setup.output_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(SINGLE_THREAD_ENVIRONMENT, TORCHINDUCTOR_CACHE_DIR=str(setup.inductor_cache))
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    leave_guards_unmeasured()
    store = dist.TCPStore("127.0.0.1", setup.store_port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=setup.rank,
        world_size=setup.world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    gc.freeze()
    while True:
        try:
            task = connection.recv()
        except EOFError:
            break
        faulthandler.dump_traceback_later(task.timeout_s, file=output)
        try:
            result = pickle.dumps(run_task(task))
            answer = (True, (result, len(dist.distributed_c10d._world.pg_map)))
        except BaseException:  # pytest's failures are no Exceptions
            answer = (False, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        connection.send(answer)
    os._exit(0)  # no destroy_process_group: the peers may be gone already


class GlooPool:
    """`world_size` rank processes in one gloo group.

    After a RankError, or with too many process groups left by its calls, the pool is closed for good.
    """

    def __init__(self, world_size: int, inductor_cache: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"gloo_pool_{world_size}_"))
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.is_open = True
        self.setups = [
            RankSetup(
                rank=rank,
                world_size=world_size,
                store_port=self.store.port,
                folder=self.folder,
                inductor_cache=inductor_cache,
            )
            for rank in range(world_size)
        ]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED_MODULES)
        self.connections: list[Connection] = []
        self.processes = []
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        with set_environment({**SINGLE_THREAD_ENVIRONMENT, "PYTHONPATH": path}):
            for setup in self.setups:
                ours, theirs = context.Pipe()
                process = context.Process(target=serve_rank, args=(setup, theirs), daemon=True)
                process.start()
                theirs.close()
                self.connections.append(ours)
                self.processes.append(process)

    def call(self, task: Task) -> list[Any]:
        """Run the task on every rank; results in rank order. A failure closes the pool: RankError."""
        __tracebackhide__ = True
        marks = [
            setup.output_file.stat().st_size if setup.output_file.exists() else 0 for setup in self.setups
        ]
        answers = self.collect_answers(task)
        if all(rank in answers and answers[rank][0] for rank in range(len(self.setups))):
            results, num_groups = zip(*(answers[rank][1] for rank in range(len(self.setups))), strict=True)
            if max(num_groups) > MAX_GROUPS:
                self.close()
            return [pickle.loads(result) for result in results]
        failed_first = [rank for rank, (succeeded, _) in answers.items() if not succeeded]
        silent = [rank for rank in range(len(self.setups)) if rank not in answers]
        reports = [self.report_rank(rank, answers.get(rank), marks[rank]) for rank in failed_first + silent]
        self.close()
        raise RankError(f"{task.module}.{task.qualname} failed\n" + "\n".join(reports))

    def collect_answers(self, task: Task) -> dict[int, tuple[bool, Any]]:
        """Answers by rank, in order of arrival; a rank that died or hung is missing."""
        answers: dict[int, tuple[bool, Any]] = {}
        pending = dict(zip(self.connections, range(len(self.setups)), strict=True))
        grace_s = min(GRACE_S, task.timeout_s)
        deadline = time.monotonic() + task.timeout_s + grace_s
        for connection in self.connections:
            with contextlib.suppress(BrokenPipeError):  # a dead rank; reading from it reports so below
                connection.send(task)
        while pending and (remaining := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), timeout=remaining):
                rank = pending.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join(grace_s)
                    succeeded = False
                else:
                    succeeded = answers[rank][0]
                if not succeeded:
                    deadline = min(deadline, time.monotonic() + grace_s)
        return answers

    def report_rank(self, rank: int, answer: tuple[bool, Any] | None, mark: int) -> str:
        """Traceback of a failed rank, or whether a silent one died or hung; then what it wrote."""
        process = self.processes[rank]
        if answer is not None:
            what = answer[1]
        elif process.exitcode is None:
            what = "no answer: hung, or still waiting for a rank that failed"
        else:
            what = f"process died with exit code {process.exitcode}"
        output = self.setups[rank].output_file
        written = output.read_bytes()[mark:].decode(errors="replace") if output.exists() else ""
        return f"--- rank {rank} ---\n{what}\n" + (f"output:\n{written[-6000:]}" if written else "")

    def close(self) -> None:
        """Kill every rank and forget the pool's files."""
        self.is_open = False
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


class GlooPools:
    """The pools of one test run, one per world size, started when needed and restarted after a failure."""

    def __init__(self, inductor_cache: Path) -> None:
        self.inductor_cache = inductor_cache
        self.pools: dict[int, GlooPool] = {}

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *arguments: Any,
        timeout_s: float = CALL_TIMEOUT_S,
        interprets: bool = False,
        is_thorough: bool = True,
    ) -> list[Any]:
        """Run `function(*arguments)` on every rank of a pool of `world_size`; results in rank order.

        With `interprets`, what `torch.compile` makes of sharded models on the ranks is interpreted. Unless
        `is_thorough`, the planner's exact search ends early, and parity is compared for fewer steps.
        """
        __tracebackhide__ = True
        pool = self.pools.get(world_size)
        if pool is None or not pool.is_open:
            pool = self.pools[world_size] = GlooPool(world_size, self.inductor_cache)
        return pool.call(describe_task(function, arguments, timeout_s, interprets, is_thorough))

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()
        self.pools.clear()


@contextlib.contextmanager
def set_environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the processes started inside the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
