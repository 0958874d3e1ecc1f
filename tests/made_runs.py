"""Runs that a test makes by hand, table by table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chopper.tables import TABLES

if TYPE_CHECKING:
    import pyarrow as pa


def put_table(run: Any, rank: int, name: str, table: pa.Table) -> None:
    """Add a table to a run that is being made, validated against its declaration."""
    with_it = run.tables.with_tables({(rank, name): TABLES[name].validate(table)})
    object.__setattr__(run, "store", with_it)
