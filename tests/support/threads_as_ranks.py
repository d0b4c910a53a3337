"""Ranks as threads of one process, in torch's own "threaded" process group. Run it in a process of its own."""

import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    ThreadLocalWorld,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

#: How long each thread may take, in seconds.
LIMIT_S = 100


TESTS = Path(__file__).parents[1]


def check_script(script: Path, num_ranks: int, *arguments: str, timeout_s: float = 150) -> None:
    """Runs a script that prints what :func:`run_on_threads` returns, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, script, *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    assert f"trained: {list(range(num_ranks))}" in answer.stdout, answer.stdout + answer.stderr


def run_on_threads(num_ranks: int, run_rank: Callable[[int], Any], limit_s: float = LIMIT_S) -> list[int]:
    """Runs a function once a rank, all at once; the ranks that came to its end. Errors are printed."""
    if not hasattr(ThreadLocalWorld, "comms"):  # torch 2.11, whose destroy_process_group() asks for it
        ThreadLocalWorld.comms = []
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    store, done = dist.HashStore(), []

    def run(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=num_ranks, store=store)
        try:
            run_rank(rank)
            done.append(rank)
        except BaseException as error:
            traceback.print_exc()
            ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
    _uninstall_threaded_pg()
    return sorted(done)
