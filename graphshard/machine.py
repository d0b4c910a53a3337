"""The machine that a measurement holds for: a processor, and a number of threads.

Libraries choose other kernels on another processor, and with another number of threads. The processor's text names what
they choose by: model, cache and instructions, limits that the environment sets, torch's version and settings.
"""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: Lines of /proc/cpuinfo that tell processors apart (x86, then ARM).
_CPU_LINES = (
    "vendor_id", "model name", "cpu family", "model", "stepping", "cache size",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part",
)  # fmt: skip

#: Instruction sets for which libraries have kernels of their own.
_INSTRUCTIONS = re.compile(r"(avx|amx|sve|fma|vnni|bf16|i8mm|asimd|f16c)\w*")

#: Environment that limits what oneDNN and torch use.
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where a kernel runs.

    Attributes:
        processor: see :func:`this_processor`.
        num_threads: threads of the process.
    """

    processor: str
    num_threads: int

    @staticmethod
    def here() -> Machine:
        """This process."""
        import torch  # takes seconds; a card is read without it

        return Machine(processor=this_processor(), num_threads=torch.get_num_threads())

    def as_data(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Machine:
        """Reads :meth:`as_data` back; other entries are left alone.

        Raises:
            TypeError, KeyError, ValueError: it is no such data.
        """
        return Machine(processor=str(data["processor"]), num_threads=int(data["num_threads"]))


def this_processor() -> str:
    """The processor of this machine, and the settings of torch that choose its kernels, as one line."""
    limits = [f"{name}={os.environ[name]}" for name in _LIMITS if name in os.environ]
    import torch

    backend = torch.backends.mkldnn
    precisions = [f"{op}={getattr(backend, op).fp32_precision}" for op in ("matmul", "conv", "rnn")]
    torch_settings = [f"torch {torch.__version__}", torch.backends.cpu.get_cpu_capability()]
    onednn = precisions if backend.is_available() and backend.enabled else ["without oneDNN"]
    return ", ".join([_cpu_text(), *limits, *torch_settings, *onednn])


@functools.lru_cache(maxsize=1)
def _cpu_text() -> str:
    try:
        first, *_ = Path("/proc/cpuinfo").read_text().split("\n\n")
    except OSError:
        return f"{platform.processor()} {platform.machine()}"
    entries = dict(re.findall(r"(?m)^([^\t:]+)[\t ]*: (.*)$", first))
    names = [entries[name].strip() for name in _CPU_LINES if name in entries]
    flags = (entries.get("flags") or entries.get("Features") or "").split()
    return " ".join([*names, *sorted(filter(_INSTRUCTIONS.fullmatch, flags))])


def largest_cache_bytes() -> int:
    """Bytes of the processor's largest cache; 0 where the system does not say."""
    found = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KMG]?)\s*", file.read_text())
        found += [int(match[1]) * 1024 ** " KMG".index(match[2] or " ")] if match else []
    return max(found)
