"""What kernels were measured to allocate, as data: by machine and call, in a JSON file, and as other ranks read it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import TableError
from ..machine import Machine

#: The end of the name of a file of measured bytes, which lies beside that of a card.
TABLE_END = ".scratch.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScratchTable:
    """Measured bytes of scratch.

    Attributes:
        rows: by machine, then by the text of the call (:class:`~graphshard.memory.scratch_calls.KernelCall`).
    """

    rows: Mapping[Machine, Mapping[str, int]] = field(default_factory=dict)

    def known(self, machine: Machine) -> Mapping[str, int]:
        """The rows of one machine; those of others say nothing about it."""
        return self.rows.get(machine, {})

    def updated(self, other: ScratchTable) -> ScratchTable:
        """Both tables; where both have a row, that of ``other``."""
        machines = dict.fromkeys([*self.rows, *other.rows])
        return ScratchTable(
            rows={machine: {**self.known(machine), **other.known(machine)} for machine in machines}
        )

    def as_data(self) -> list[dict[str, Any]]:
        """As JSON can hold it."""
        return [{**machine.as_data(), "bytes": dict(rows)} for machine, rows in self.rows.items()]

    @staticmethod
    def from_data(data: Any) -> ScratchTable:
        """Reads :meth:`as_data` back.

        Raises:
            TypeError, KeyError, ValueError: it is no such data.
        """
        rows: dict[Machine, dict[str, int]] = {}
        for entry in data:
            machine = Machine.from_data(entry)
            rows[machine] = {str(call): int(num_bytes) for call, num_bytes in entry["bytes"].items()}
            if any(num_bytes < 0 for num_bytes in rows[machine].values()):
                raise ValueError("negative bytes")
        return ScratchTable(rows=rows)

    def save(self, path: Path) -> None:
        """Writes the table as JSON, in one step: a reader finds the old file or the new one.

        Raises:
            OSError: the file cannot be written.
        """
        text = json.dumps(self.as_data(), indent=1) + "\n"
        written = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            written.write_text(text)  # readable by whoever may read the card, unlike a file of tempfile
            os.replace(written, path)
        finally:
            written.unlink(missing_ok=True)

    @staticmethod
    def load(path: Path) -> ScratchTable:
        """The table of a file; an empty one if there is no such file.

        Raises:
            TableError: the file cannot be read, or is no table.
        """
        if not path.exists():
            return ScratchTable()
        try:
            return ScratchTable.from_data(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise TableError(
                f"{path} is no table of measured kernels ({error!r}): delete it, and they are measured again"
            ) from error


def table_beside(card: Path) -> Path:
    """The file of the table that belongs to a card's file: ``here.scratch.json`` beside ``here.json``."""
    return card.with_name(card.stem + TABLE_END)
