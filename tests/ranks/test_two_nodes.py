"""Two machines, as network namespaces with a link between them: hybrid sharding, and going on when one is lost."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from shaped_link import LinkEnd, ShapedLinkError, find_obstacle, shaped_link  # noqa: E402

LIMIT_S = 240
STEPS = 60


@contextmanager
def two_nodes() -> Iterator[tuple[LinkEnd, LinkEnd]]:
    """The ends of a link of 1 Gbit/s; skips the test where the system allows no network namespaces."""
    obstacle = find_obstacle()
    if obstacle is not None:
        pytest.skip(f"no network namespaces here: {obstacle}")
    link = shaped_link("1gbit")
    try:
        ends = link.__enter__()
    except ShapedLinkError as refusal:
        pytest.skip(f"no network namespaces here: {refusal}")
    try:
        yield ends
    finally:
        link.__exit__(None, None, None)


def start(node: int, ends: tuple[LinkEnd, LinkEnd], out: Path, *options: str) -> subprocess.Popen[str]:
    """The torchrun of a node, as docs/use/multi-node.md has it, with two ranks."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "2"),
        *("--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "elastic"),
        *("--rdzv-endpoint", f"{ends[0].address}:29400", "--local-addr", ends[node].address),
        *("--rdzv-conf", f"is_host={int(node == 0)},last_call_timeout=5,keep_alive_interval=1"),
        *(str(ROOT / "examples" / "elastic.py"), "--out", str(out), "--steps", str(STEPS), *options),
    ]
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": ends[node].interface,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # docs/use/multi-node.md says why
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(out / "inductor"),
    }
    with (out / f"node{node}.txt").open("a") as log:
        return subprocess.Popen(
            ends[node].command(command), env=environment, stdout=log, stderr=log, text=True
        )


def losses(out: Path) -> list[dict[str, Any]]:
    log = out / "losses.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def wait_for(has_come: Callable[[], bool], nodes: list[subprocess.Popen[str]], out: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not has_come():
        assert time.monotonic() < deadline and all(node.poll() is None for node in nodes), words(out)
        time.sleep(0.1)


def words(out: Path) -> str:
    """What the nodes said."""
    return "\n".join(f"{log.name}:\n{log.read_text()}" for log in sorted(out.glob("node*.txt")))


def kill(node: subprocess.Popen[str]) -> None:
    """As when a machine loses power: torchrun and its ranks end without a word."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(node.pid)], capture_output=True, text=True)
    for pid in [node.pid, *map(int, listed.stdout.split())]:
        os.kill(pid, signal.SIGKILL)
    node.wait()


@pytest.mark.slow
def test_training_goes_on_when_a_machine_is_lost_and_when_it_is_back(tmp_path: Path) -> None:
    """Four ranks on two machines, two ranks on one, four again; all losses are the unsharded model's."""
    with two_nodes() as ends:
        nodes = [start(node, ends, tmp_path, "--pause", "0.5") for node in range(2)]
        try:
            wait_for(lambda: len(losses(tmp_path)) >= 3, nodes, tmp_path)
            kill(nodes[1])
            wait_for(lambda: losses(tmp_path)[-1]["ranks"] == 2, nodes[:1], tmp_path)
            nodes[1] = start(1, ends, tmp_path, "--pause", "0.5")
            assert [node.wait(LIMIT_S) for node in nodes] == [0, 0], words(tmp_path)
        finally:
            for node in nodes:
                if node.poll() is None:
                    kill(node)
    said = re.findall(r"(\d) ranks on (\d) machines, from step (\d+)", words(tmp_path))
    assert [line[:2] for line in said] == [("4", "2"), ("2", "1"), ("4", "2")]
    assert int(said[0][2]) == 0 < int(said[1][2]) < int(said[2][2]) < STEPS
    assert f"ok: {STEPS} steps on [2, 4] ranks" in words(tmp_path)
