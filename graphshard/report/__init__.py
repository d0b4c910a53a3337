"""Reports as data, and their renderings: text, HTML, trace, summary, tables. ``graphshard.inspection`` makes reports.

Imports: ``errors``, ``units``.

Read first: ``data`` (the report and its JSON schema); then ``summary``, ``text``, ``html`` (``html_parts``,
``html_passes``, ``page/``), ``trace``, ``formulas``, ``compare`` (``compare_tables``), ``sweep_data``,
``sweep_views``, ``line_diff``, ``fold_blocks``.
"""

from ..units import size_text
from .compare import diff_reports
from .compare_tables import diff_tables
from .data import (
    CATEGORIES,
    SCHEMA_VERSION,
    CollectiveCount,
    CollectiveEvent,
    CollectivePrice,
    ComputeEvent,
    Exposure,
    HalfReport,
    MemoryPoint,
    MemoryReport,
    ModelSummary,
    PassStep,
    Report,
    ScheduleStep,
    Throughput,
    UnitSummary,
    World,
    report_schema,
)
from .formulas import Formulas, formulas_text
from .html import write_html
from .placements import PlacedParameters, PlacementCandidate, ReshardCount
from .summary import print_summary
from .sweep_data import Sweep, SweepPoint, sweep_point
from .sweep_views import sweep_plot, sweep_table
from .text import report_text
from .trace import write_trace

__all__ = [
    "CATEGORIES",
    "SCHEMA_VERSION",
    "CollectiveCount",
    "CollectiveEvent",
    "CollectivePrice",
    "ComputeEvent",
    "Exposure",
    "Formulas",
    "HalfReport",
    "MemoryPoint",
    "MemoryReport",
    "ModelSummary",
    "PassStep",
    "PlacedParameters",
    "PlacementCandidate",
    "Report",
    "ReshardCount",
    "ScheduleStep",
    "Sweep",
    "SweepPoint",
    "Throughput",
    "UnitSummary",
    "World",
    "diff_reports",
    "diff_tables",
    "formulas_text",
    "print_summary",
    "report_schema",
    "report_text",
    "size_text",
    "sweep_plot",
    "sweep_point",
    "sweep_table",
    "write_html",
    "write_trace",
]
