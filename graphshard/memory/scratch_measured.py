"""Measures what a library's kernel on the CPU allocates for itself: the call runs once, here, under torch's profiler.

It runs on tensors of zeros with the sizes, strides and dtypes of the call, in a thread of its own. The caller's
profiler, modes, autocast and autograd are not active in that thread; its number of threads is. The state of the random
generator is put back, and nothing stays allocated. What a kernel allocates does not depend on values, with one
exception: a call that reads integers (offsets, indices) is not measured.

The profiler reports what the calling thread allocates. Kernels allocate the buffers of all their threads there, with
few exceptions: attention's backward in 16 bits packs blocks in each thread.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from .._compat import allocated_bytes
from ..errors import TableError
from ..ir import tensor_bytes
from ..machine import Machine
from ..progress import LOGGER
from .scratch import UNMEASURED, KernelScratch
from .scratch_bound import is_blas
from .scratch_calls import KernelCall, TensorSpec, kernel_calls
from .scratch_table import ScratchTable, table_beside

#: Of the memory that is free, what operands and results of a call that is measured may take.
_SHARE = 0.5


class KernelMeasurements:
    """What is known of one model's kernels on this machine: what was measured here, or by the rank that plans.

    Args:
        file: where measurements are kept from one process to the next; None to keep none.
        is_cached: the file lies in the user's cache, which no user reads: what is no table there counts as none.

    Raises:
        TableError: the file cannot be read, or is no table, and does not lie in the user's cache.
    """

    def __init__(self, file: Path | None = None, *, is_cached: bool = False) -> None:
        self._file, self._is_cached = file, is_cached
        self.table = ScratchTable() if file is None else self._kept(file)

    def _kept(self, file: Path) -> ScratchTable:
        try:
            return ScratchTable.load(file)
        except TableError as error:
            if not self._is_cached:
                raise
            LOGGER.info("measured again: %s", error)
            return ScratchTable()

    def scratch(self) -> KernelScratch:
        """What kernels of this process allocate, as far as it was measured; nothing is run."""
        machine = Machine.here()
        return KernelScratch(known=self.table.known(machine), num_threads=machine.num_threads)

    def of(self, gm: fx.GraphModule, device_type: str | None = None) -> KernelScratch:
        """As :meth:`scratch`; the graph's kernels that are not known yet are measured first.

        Args:
            gm: a graph whose values carry ``meta["val"]``.
            device_type: where it will run; None for where its values are. Only the CPU's kernels are measured.
        """
        machine = Machine.here()
        measured = _measured_of(gm, device_type, self.table.known(machine), machine)
        if measured:
            new = ScratchTable(rows={machine: measured})
            self.table = self.table.updated(new)
            self._keep(new)
        return self.scratch()

    def rows_of(self, gm: fx.GraphModule, device_type: str | None = None) -> ScratchTable:
        """What is known of a graph's kernels: for ranks that follow the plan of this one."""
        machine = Machine.here()
        known = self.table.known(machine)
        found = {key: known[key] for key in map(str, kernel_calls(gm, device_type)) if key in known}
        return ScratchTable(rows={machine: found} if found else {})

    def adopt(self, table: ScratchTable) -> None:
        """Takes over what the rank that plans has measured; on another processor it says nothing and is not used."""
        self.table = self.table.updated(table)

    def _keep(self, new: ScratchTable) -> None:
        if self._file is None:
            return
        try:
            self._kept(self._file).updated(new).save(self._file)
        except OSError as error:
            if self._is_cached:
                LOGGER.info("%s cannot be written (%s), so it is not kept", self._file, error)
                return
            warnings.warn(
                f"graphshard: what kernels allocate was measured, but cannot be kept in {self._file} "
                f"({error.strerror}), so the next process measures it again; make the folder of the card writable",
                stacklevel=2,
            )


def scratch_of_card(
    machine: Machine | None, card: Path | None, gm: fx.GraphModule | None = None, device_type: str = "cpu"
) -> KernelScratch:
    """What kernels allocate on the machine of a card: what is kept beside the card's file, else the bound.

    Args:
        machine: that the card was measured on; None if it is not known.
        card: the card's file; None if it has none.
        gm: a graph whose kernels are measured where that is this very machine. On any other nothing is run.
        device_type: of the card.
    """
    if machine is None:
        return UNMEASURED
    table = ScratchTable() if card is None else ScratchTable.load(table_beside(card))
    known = table.known(machine)
    if gm is not None and machine == Machine.here():
        known = {**_measured_of(gm, device_type, known, machine), **known}
    return KernelScratch(known=known, num_threads=machine.num_threads)


def _measured_of(
    gm: fx.GraphModule, device_type: str | None, known: Mapping[str, int], machine: Machine
) -> dict[str, int]:
    """Of a graph's kernels that are not known yet and can be run."""
    missing = {str(call): call for call in kernel_calls(gm, device_type)}
    found = {text: measure(call, machine) for text, call in missing.items() if text not in known}
    return {text: num_bytes for text, num_bytes in found.items() if num_bytes is not None}


def measure(call: KernelCall, machine: Machine) -> int | None:
    """Bytes that a call allocates beside its operands and its results; None where it cannot be run.

    Args:
        call: what to run; it runs once in a process, and is remembered.
        machine: this one.
    """
    if is_blas(call):
        return 0
    if not _is_runnable(call):
        return None
    return _measured(call, machine)


@functools.lru_cache(maxsize=4096)
def _measured(call: KernelCall, machine: Machine) -> int | None:
    found: list[int] = []

    def run() -> None:
        # Not on this machine, or not on zeros: the bound holds.
        with contextlib.suppress(RuntimeError, ValueError, TypeError):
            found.append(_peak_of(call))

    state = torch.get_rng_state()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    torch.set_rng_state(state)
    return found[0] if found else None


def _peak_of(call: KernelCall) -> int:
    args, kwargs = _real(call.args), {name: _real(value) for name, value in call.kwargs}
    peak, result = allocated_bytes(lambda: call.op(*args, **kwargs))
    return max(0, peak - tensor_bytes(result))


def _is_runnable(call: KernelCall) -> bool:
    if any(_is_integer(each.dtype) for each in call.tensors):
        return False
    stored = sum(each.num_stored * each.dtype.itemsize for each in call.tensors)
    return stored <= _SHARE * _available_bytes()


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _available_bytes() -> int:
    """Memory that this machine has left, caches of files included where the system tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _real(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        flat = torch.zeros(value.num_stored, dtype=value.dtype, device="cpu")
        return flat.as_strided(value.shape, value.strides)
    return [*map(_real, value)] if isinstance(value, tuple) else value
