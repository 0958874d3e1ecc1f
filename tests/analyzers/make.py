"""Small tables built by hand for analyzers' tests. Times are given in nanoseconds."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from chopper.tables import TABLES


def table(name: str, rows: list[dict[str, Any]]) -> pa.Table:
    """Rows as a declared table; columns that a row does not name are null."""
    declared = TABLES[name]
    return pa.table(
        {f.name: pa.array([r.get(f.name) for r in rows], type=f.type) for f in declared.arrow},
        schema=declared.arrow,
    )


def span(start: int, end: int, name: str, category: str = "cpu_op", **more: Any) -> dict[str, Any]:
    return {
        "start_ns": start,
        "dur_ns": end - start,
        "pid": 1,
        "tid": 1,
        "category": category,
        "name": name,
        **more,
    }


def kernel(start: int, end: int, name: str = "k", stream: int = 7, **more: Any) -> dict[str, Any]:
    return {
        "start_ns": start,
        "dur_ns": end - start,
        "device_id": 0,
        "stream_id": stream,
        "kind": "kernel",
        "name": name,
        **more,
    }


def spans(*rows: dict[str, Any]) -> pa.Table:
    return table("host_span", sorted(rows, key=lambda r: (r["start_ns"], -r["dur_ns"])))


def kernels(*rows: dict[str, Any]) -> pa.Table:
    return table("device_event", sorted(rows, key=lambda r: (r["start_ns"], -r["dur_ns"])))


def steps(*bounds: tuple[int, int], first: int = 0) -> pa.Table:
    return table(
        "step",
        [
            {
                "number": first + i,
                "start_ns": a,
                "end_ns": b,
                "source": "profiler_step",
                "traced": True,
            }
            for i, (a, b) in enumerate(bounds)
        ],
    )
