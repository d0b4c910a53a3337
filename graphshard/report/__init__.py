"""What a training step costs, as data and in a few renderings; see docs/inspect.md.

``data`` is the report, ``half`` and ``step`` make it, ``summary``, ``text`` and ``trace`` show it.
"""

from .data import CATEGORIES, SCHEMA_VERSION, HalfReport, Report, report_schema

__all__ = ["CATEGORIES", "SCHEMA_VERSION", "HalfReport", "Report", "report_schema"]
