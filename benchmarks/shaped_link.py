"""Two network namespaces joined by a rate-limited veth pair: a slow network on one machine.

Over loopback a collective is a memory copy, so hiding it behind compute gains little. Between these
namespaces a token bucket filter on both ends makes it take wire time that costs the CPU next to nothing,
as on a cluster.
Devices and addresses exist only inside the namespaces, which are removed on leaving the context.
Needs Linux and root.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

COMMAND_LIMIT_S = 20
# 198.18.0.0/15 is set aside for benchmarks (RFC 2544); it is visible only inside the two namespaces.
ADDRESSES = ("198.18.0.1", "198.18.0.2")


class ShapedLinkError(RuntimeError):
    """The namespaces or the rate limit could not be set up; the message names the command and its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEnd:
    """One namespace: its name, the device inside it and that device's address."""

    namespace: str
    interface: str
    address: str

    def command(self, argv: list[str]) -> list[str]:
        """`argv` as a command that runs inside this namespace."""
        return ["ip", "netns", "exec", self.namespace, *argv]


def check_rate(rate: str) -> str:
    """Return `rate` when tc will read it (1gbit, 500mbit, 2.5gbit), else raise ValueError."""
    if not re.fullmatch(r"\d+(\.\d+)?[kmg]bit", rate):
        raise ValueError(f"rate {rate!r} is not a number followed by kbit, mbit or gbit, such as 1gbit")
    if float(rate[:-4]) == 0:
        raise ValueError(f"rate {rate!r} must be more than zero")
    return rate


def find_obstacle() -> str | None:
    """Why no shaped link can be made here, or None."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "making network namespaces needs root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not found (install iproute2)" if missing else None


def _try(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, check=False, capture_output=True, text=True, timeout=COMMAND_LIMIT_S)


def _run(*argv: str) -> None:
    done = _try(*argv)
    if done.returncode:
        raise ShapedLinkError(f"`{' '.join(argv)}` failed: {done.stderr.strip() or done.stdout.strip()}")


def _join(ends: tuple[LinkEnd, LinkEnd], rate: str) -> None:
    for end in ends:
        _run("ip", "netns", "add", end.namespace)
    first, second = ends
    # Created straight into the namespaces: the machine's own namespace never sees the devices.
    _run("ip", "-n", first.namespace, "link", "add", first.interface, "type", "veth",
         "peer", "name", second.interface, "netns", second.namespace)  # fmt: skip
    for end in ends:
        _run("ip", "-n", end.namespace, "address", "add", f"{end.address}/30", "dev", end.interface)
        _run("ip", "-n", end.namespace, "link", "set", "lo", "up")
        _run("ip", "-n", end.namespace, "link", "set", end.interface, "up")
        _run("tc", "-n", end.namespace, "qdisc", "add", "dev", end.interface,
             "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")  # fmt: skip


@contextmanager
def shaped_link(rate: str) -> Iterator[tuple[LinkEnd, LinkEnd]]:
    """Yield the two ends of a link of `rate` each way; remove both namespaces on the way out.

    Raises ShapedLinkError when the system refuses. Processes inside must have ended before the context is
    left, or their namespace lives on without a name.
    """
    tag = secrets.token_hex(3)
    first, second = (
        LinkEnd(namespace=f"shaped-{tag}-{i}", interface=f"veth{i}", address=ADDRESSES[i]) for i in range(2)
    )
    try:
        _join((first, second), check_rate(rate))
        yield first, second
    finally:
        for end in (first, second):
            # One that was never made is no error here; the first failure has already been raised.
            _try("ip", "netns", "delete", end.namespace)
