"""Tables of a run under the names that SQL knows, and DuckDB connections that see nothing else.

Tables of single ranks begin with ``rank`` and ``row``. Tables of the attribution cover all traced
steps; ``selection`` says which of them the step time is taken from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from chopper.analyzers.attribution import Attribution
from chopper.analyzers.events.groups import rows_of
from chopper.analyzers.trace.columns import dictionary, ints
from chopper.analyzers.trace.phases import node_makers, span_modules
from chopper.analyzers.trace.rank_join import host_as_device
from chopper.analyzers.trace.tables import HostSpans
from chopper.causes import CODES
from chopper.storage import parquet
from chopper.storage.run import OF_MANIFEST, Run
from chopper.tables import GROUPS, TABLES

if TYPE_CHECKING:
    from collections.abc import Callable

RECORDED = frozenset(t.name for group in GROUPS if group != "analysis" for t in GROUPS[group])
"""Tables that are read, not derived."""
OF_RANK = RECORDED | {"event_link"}
"""Tables of single ranks: ``rank`` and ``row`` come before their columns."""


def connection(memory_bytes: int | None = None, threads: int | None = None) -> Any:
    """Return a database in memory that reads no files, loads nothing and cannot be set otherwise.

    Args:
        memory_bytes: what it may take; None for DuckDB's own limit.
        threads: what it runs on; None for all cores. With one, sums of floats are always the same.
    """
    import duckdb

    config: dict[str, Any] = {
        "temp_directory": "",
        "allow_persistent_secrets": False,
        "allow_community_extensions": False,
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "python_enable_replacements": False,  # variables of the program by their names
    }
    if memory_bytes is not None:
        config["memory_limit"] = f"{memory_bytes}B"
    if threads is not None:
        config["threads"] = threads
    database = duckdb.connect(":memory:", config=config)
    database.execute("SET enable_external_access = false")
    database.execute("SET lock_configuration = true")
    return database


def schema_of(name: str) -> pa.Schema:
    """Return the columns of a table as SQL sees them."""
    return parquet.schema_of(name) if name in OF_RANK else parquet.plain(TABLES[name].arrow)


def relation(run: Run | Attribution, name: str) -> pa.Table:
    """Return a table of a run by its name; those of the attribution need an attributed run."""
    if name in OF_MANIFEST:
        return OF_MANIFEST[name]((run if isinstance(run, Run) else run.recording).manifest)
    if name in RECORDED:
        recording = run if isinstance(run, Run) else run.recording
        return _of_ranks(name, {rank: recorded(recording, rank, name) for rank in recording.ranks})
    assert isinstance(run, Attribution)
    if name == "event_link":
        return _of_ranks(name, run.detail.all_steps.links)
    return _ATTRIBUTED[name](run)


def recorded(recording: Run, rank: int, name: str) -> pa.Table:
    """Return a recorded table of a rank; host work stands in for devices where there are none."""
    table = recording.table(rank, name)
    if name == "device_event" and not table.num_rows:
        return on_host(recording.table(rank, "host_span"))
    return table


def on_host(spans: pa.Table) -> pa.Table:
    """Return what stands in for device events on a trace without a device."""
    return host_as_device(HostSpans(spans))[0] if spans.num_rows else TABLES["device_event"].empty()


def _of_ranks(name: str, parts: dict[int, pa.Table]) -> pa.Table:
    """Return the tables of ranks as one, with ``rank`` and ``row`` before their columns."""
    numbered = [parquet.numbered(table, name, rank) for rank, table in parts.items()]
    return pa.concat_tables(numbered) if numbered else parquet.schema_of(name).empty_table()


def _selection(run: Attribution) -> pa.Table:
    """Return all traced steps, and which of them the step time and the details are about."""
    windows = run.all_steps.windows

    def keys(table: pa.Table) -> list[np.ndarray]:
        return [ints(table, name) for name in ("rank", "start_ns")]

    return TABLES["selection"].of(
        {
            **{name: windows[name] for name in ("rank", "step_index", "number")},
            "in_step_time": rows_of(keys(run.windows), keys(windows)) >= 0,
            "in_detail": rows_of(keys(run.detail.all_steps.windows), keys(windows)) >= 0,
        }
    )


def _causes(run: Attribution) -> pa.Table:
    rows = run.causes()
    return TABLES["cause"].of_rows(
        [
            {
                "id": row.id,
                "parent": row.parent,
                "label": row.label,
                "is_leaf": row.id in CODES,
                "time_ns": row.time_ns,
                "share_ratio": row.share_ratio,
                "ci95_low_ns": row.ci95_ns[0] if row.ci95_ns else None,
                "ci95_high_ns": row.ci95_ns[1] if row.ci95_ns else None,
                "basis": row.basis,
                "measured": row.measured,
            }
            for row in rows
        ]
    )


def _operator_modules(run: Attribution) -> pa.Table:
    """Return the module of each host span that is in one. HOST_SPAN -> OPERATOR_MODULE."""
    table = TABLES["operator_module"]
    parts = []
    for rank, joined in run.detail.joined.items():
        host = HostSpans(joined.host_span)
        codes, paths = span_modules(host, node_makers(host))
        row = np.flatnonzero(codes >= 0)
        module = dictionary(codes[row], paths)
        parts.append(table.of({"rank": np.full(len(row), rank), "row": row, "module": module}))
    return table.joined(parts)


def _unmeasured_factors(run: Attribution) -> pa.Table:
    return TABLES["unmeasured_factor"].of_rows(
        [
            {"rank": rank, "factor": name, "reason": reason}
            for rank, factors in run.detail.factors.items()
            for name, reason in factors.unmeasured.items()
        ]
    )


_ATTRIBUTED: dict[str, Callable[[Attribution], pa.Table]] = {
    "piece": lambda run: run.detail.all_steps.pieces,
    "gap": lambda run: run.detail.all_steps.gaps,
    "communication": lambda run: run.detail.all_steps.communication,
    "window": lambda run: run.all_steps.windows,
    "selection": _selection,
    "cause": _causes,
    "operator_module": _operator_modules,
    "unmeasured_factor": _unmeasured_factors,
}
"""Tables of the attribution that are not of single ranks."""
