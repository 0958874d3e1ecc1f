"""Tables that a run holds or that its attribution makes, declared once.

``TABLES`` maps a table's name to its declaration. Views declare their own, in
``chopper.analyzers.views``.
"""

from __future__ import annotations

from chopper.tables._base import Column, Table, column, count, ns, optional
from chopper.tables.analysis import ANALYSIS_TABLES
from chopper.tables.memory import MEMORY_TABLES
from chopper.tables.telemetry import SENSOR_TABLES, TELEMETRY_TABLES
from chopper.tables.trace import TRACE_TABLES

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        *TRACE_TABLES,
        *TELEMETRY_TABLES,
        *SENSOR_TABLES,
        *MEMORY_TABLES,
        *ANALYSIS_TABLES,
    )
}

__all__ = [
    "ANALYSIS_TABLES",
    "MEMORY_TABLES",
    "SENSOR_TABLES",
    "TABLES",
    "TELEMETRY_TABLES",
    "TRACE_TABLES",
    "Column",
    "Table",
    "column",
    "count",
    "ns",
    "optional",
]
