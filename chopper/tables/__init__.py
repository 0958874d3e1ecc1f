"""Every table that a run can hold, declared once.

``TABLES`` maps a table's name to its declaration. The data dictionary in the documentation and
``chopper schema`` are printed from it.
"""

from __future__ import annotations

from chopper.tables._base import Column, Table
from chopper.tables.analysis import ANALYSIS_TABLES
from chopper.tables.memory import MEMORY_TABLES
from chopper.tables.sensors import SENSOR_TABLES
from chopper.tables.telemetry import TELEMETRY_TABLES
from chopper.tables.trace import TRACE_TABLES
from chopper.tables.views import VIEW_TABLES

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        *TRACE_TABLES,
        *TELEMETRY_TABLES,
        *SENSOR_TABLES,
        *MEMORY_TABLES,
        *ANALYSIS_TABLES,
        *VIEW_TABLES,
    )
}

__all__ = [
    "ANALYSIS_TABLES",
    "MEMORY_TABLES",
    "SENSOR_TABLES",
    "TABLES",
    "TELEMETRY_TABLES",
    "TRACE_TABLES",
    "VIEW_TABLES",
    "Column",
    "Table",
]
