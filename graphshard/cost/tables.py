"""Measured times of collectives: read from CSV, and interpolated between rows.

Bytes are those of the larger of input and output, as in nccl-tests' column "size". Between rows the logarithm of the
time is linear in the logarithm of the bytes. If a row took longer than a larger one, the larger one gets its time.
"""

from __future__ import annotations

import csv
import itertools
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import OptionTypeError, TableError
from ..units import size_text

#: Kinds of collectives by their names in tables.
_KIND_OF_WORD = {
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
}
_COLUMNS = ("op", "bytes", "seconds")
_GROUP_COLUMNS = ("group", "group_size")

#: The name of a group, or its number of ranks.
GroupKey = str | int


@dataclass(frozen=True, slots=True)
class TableRows:
    """(bytes, seconds) of one collective on one group, bytes rising, seconds never falling."""

    rows: tuple[tuple[int, float], ...]

    @staticmethod
    def of(rows: Iterable[tuple[int, float]]) -> TableRows:
        """Sorts the rows, averages rows of one size, and raises times that fall to the time before."""
        by_bytes: dict[int, list[float]] = {}
        for num_bytes, seconds in rows:
            by_bytes.setdefault(num_bytes, []).append(seconds)
        sizes = sorted(by_bytes)
        times = itertools.accumulate((sum(by_bytes[size]) / len(by_bytes[size]) for size in sizes), max)
        return TableRows(tuple(zip(sizes, times, strict=True)))

    @property
    def range(self) -> tuple[int, int]:
        """The least and the most bytes measured."""
        return self.rows[0][0], self.rows[-1][0]

    def seconds(self, num_bytes: int) -> float:
        """Time of ``num_bytes``.

        Between rows it is interpolated. Below the first row it is the time of that row, which is latency. Above the
        last row it grows at the bandwidth between the last two rows, or at that of the last row if there is only one
        or the two took equally long.
        """
        if num_bytes <= self.rows[0][0]:
            return self.rows[0][1]
        last_bytes, last_seconds = self.rows[-1]
        if num_bytes >= last_bytes:
            return last_seconds + (num_bytes - last_bytes) / self._last_bandwidth()
        index = next(i for i, row in enumerate(self.rows) if row[0] > num_bytes)
        (x0, y0), (x1, y1) = self.rows[index - 1 : index + 1]
        return y0 * (y1 / y0) ** (math.log(num_bytes / x0) / math.log(x1 / x0))

    def _last_bandwidth(self) -> float:
        last_bytes, last_seconds = self.rows[-1]
        if len(self.rows) > 1:
            bytes_before, seconds_before = self.rows[-2]
            if last_seconds > seconds_before:
                return (last_bytes - bytes_before) / (last_seconds - seconds_before)
        return last_bytes / last_seconds


@dataclass(frozen=True, slots=True)
class CollectiveTables:
    """Measured rows by kind and group.

    Attributes:
        rows: by kind ("all_gather", ...) and by the group's name or number of ranks.
        source: the name of the file, for warnings.
    """

    rows: Mapping[tuple[str, GroupKey], TableRows]
    source: str = "the tables"

    def find(self, kind: str, group: str, num_ranks: int) -> TableRows | None:
        """The rows of a kind on a group: by the name of the group, else by its number of ranks."""
        return self.rows.get((kind, group)) or self.rows.get((kind, num_ranks))

    def seconds(self, kind: str, num_bytes: int, group: str, num_ranks: int) -> float | None:
        """Time of a collective; None if this kind was not measured on such a group.

        Warns (UserWarning) where ``num_bytes`` lies outside of what was measured.
        """
        rows = self.find(kind, group, num_ranks)
        if rows is None:
            return None
        if message := self.outside(kind, num_bytes, group, num_ranks):
            warnings.warn(message, UserWarning, stacklevel=2)
        return rows.seconds(num_bytes)

    def outside(self, kind: str, num_bytes: int, group: str, num_ranks: int) -> str:
        """The warning for a size outside the measured range; "" for a size inside it, or without rows."""
        rows = self.find(kind, group, num_ranks)
        least, most = (num_bytes, num_bytes) if rows is None else rows.range
        if least <= num_bytes <= most:
            return ""
        how = "above it the bandwidth of the last two rows" if num_bytes > most else "below it the first row"
        return (
            f"{self.source}: {kind} over {group} ({num_ranks} ranks) was measured from "
            f"{size_text(least)} to {size_text(most)}; {how} is used"
        )


def load_tables(path: str | Path) -> CollectiveTables:
    """Reads a CSV file with the columns ``group`` or ``group_size`` (or both), ``op``, ``bytes`` and ``seconds``.

    - ``group`` is the name of a mesh axis ("shard") or torch's name of a group ("0").
    - ``group_size`` is a number of ranks, at least 2. It is read where ``group`` is empty or missing, and holds for
      every group of that size without rows of its own. Without this column, numbers in ``group`` are names first, and
      sizes for the groups that no row names.
    - ``op`` is a name of torch (coalesced, in place and ``out=`` too), of NCCL, or one of
      :data:`graphshard.cost.cards.COLLECTIVE_KINDS`.
    - ``bytes`` is the larger of input and output.
    - ``seconds`` may be called ``time``.

    Further columns are ignored.

    Raises:
        TableError: no such file, missing or repeated columns, no rows, or rows that cannot be read, with their lines.
        OptionTypeError: ``path`` is not a path.
    """
    if not isinstance(path, (str, Path)):
        raise OptionTypeError(f"tables={path!r} must be the path of a CSV file, or what load_tables returns")
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: not text, or an impossible file name
        reason = getattr(error, "strerror", None) or error
        raise TableError(f"the table {str(path)!r} cannot be read: {reason}") from error
    return parse_tables(text, where=str(path))


def tables_of(tables: str | Path | CollectiveTables | None) -> CollectiveTables | None:
    """Tables as they are, or read from a file; None without any.

    Raises:
        TableError, OptionTypeError: see :func:`load_tables`.
    """
    return tables if tables is None or isinstance(tables, CollectiveTables) else load_tables(tables)


def parse_tables(text: str, *, where: str) -> CollectiveTables:
    """Reads the CSV text of :func:`load_tables`; ``where`` names it in errors and warnings."""
    reader = csv.DictReader(text.splitlines())
    found: dict[tuple[str, GroupKey], list[tuple[int, float]]] = {}
    problems = []
    try:
        reader.fieldnames = _columns(reader.fieldnames or (), where)
        for row in reader:
            try:
                kind, keys, num_bytes, seconds = _parse_row(row)
            except ValueError as error:
                problems.append(f"line {reader.line_num}: {error}")
                continue
            for key in keys:
                found.setdefault((kind, key), []).append((num_bytes, seconds))
    except csv.Error as error:
        problems.append(f"line {reader.line_num + 1}: {error}")
    if problems:
        raise TableError(f"{where}: {'; '.join(problems)}")
    if not found:
        raise TableError(f"{where}: no rows")
    return CollectiveTables({key: TableRows.of(rows) for key, rows in found.items()}, where)


def _columns(header: Iterable[str], where: str) -> list[str]:
    """The names of the columns, checked."""
    words = [name.strip().lower() for name in header]
    columns = ["seconds" if word == "time" and "seconds" not in words else word for word in words]
    missing = [name for name in _COLUMNS if name not in columns]
    if not any(name in columns for name in _GROUP_COLUMNS):
        missing.insert(0, "group (or group_size)")
    if missing:
        raise TableError(
            f"{where}: missing columns {', '.join(missing)}; there are {', '.join(columns) or 'none'}"
        )
    if repeated := [name for name in (*_GROUP_COLUMNS, *_COLUMNS) if columns.count(name) > 1]:
        raise TableError(f"{where}: more than one column {', '.join(repeated)}: leave the one that counts")
    return columns


def _parse_row(row: dict[str, str | None]) -> tuple[str, list[GroupKey], int, float]:
    """Raises ValueError, with the reason, for a row that cannot be read."""
    word = (row["op"] or "").strip().lower()
    stem = word.rstrip("_").removesuffix("_out").removesuffix("_coalesced")
    if stem not in _KIND_OF_WORD:
        raise ValueError(f"op {word!r} is none of {', '.join(_KIND_OF_WORD)}")
    keys = _group_keys({name: (row[name] or "").strip() for name in _GROUP_COLUMNS if name in row})
    numbers = {name: _positive(row[name], name) for name in ("bytes", "seconds")}
    if numbers["bytes"] != int(numbers["bytes"]):
        raise ValueError(f"bytes must be a whole number, not {row['bytes']}")
    return _KIND_OF_WORD[stem], keys, int(numbers["bytes"]), numbers["seconds"]


def _group_keys(cells: Mapping[str, str]) -> list[GroupKey]:
    """The keys of the groups for which a row holds."""
    if name := cells.get("group"):
        is_size = "group_size" not in cells and name.isdecimal() and int(name) > 1
        return [name, int(name)] if is_size else [name]
    size = cells.get("group_size")
    if not size:
        raise ValueError(f"{' and '.join(cells)} {'is' if len(cells) == 1 else 'are'} empty")
    if not size.isdecimal():
        raise ValueError(f"group_size {size!r} is not a whole number")
    if int(size) < 2:
        raise ValueError(f"group_size {size} is no group that communicates: it has 2 ranks or more")
    return [int(size)]


def _positive(text: str | None, name: str) -> float:
    try:
        number = float(text or "")
    except ValueError:
        raise ValueError(f"{name} {text!r} is not a number") from None
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be positive, not {text}")
    return number
