"""Small tables built by hand for analyzers' tests. Times are given in nanoseconds."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pyarrow as pa

from chopper.analyzers.causes.attribute import RankResult, attribute_rank
from chopper.analyzers.relations import connection
from chopper.analyzers.trace.rank_join import JoinedRank, join_rank
from chopper.analyzers.trace.tables import RankTables
from chopper.tables import TABLES
from chopper.views import SHARED_QUERIES, VIEWS, typed


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


def op(start: int, end: int, name: str, *dims: list[int], **more: Any) -> dict[str, Any]:
    """An operator whose tensors have these sizes."""
    return span(
        start,
        end,
        name,
        input_dims=json.dumps(dims),
        input_types=json.dumps(["float"] * len(dims)),
        **more,
    )


def launch(at: int, correlation: int, **more: Any) -> dict[str, Any]:
    return span(at, at + 1, "cudaLaunchKernel", "runtime", correlation_id=correlation, **more)


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
                "profiled": True,
            }
            for i, (a, b) in enumerate(bounds)
        ],
    )


def joined(
    host: pa.Table,
    device: pa.Table | None = None,
    step: pa.Table | None = None,
    collective: pa.Table | None = None,
    **known: Any,
) -> JoinedRank:
    """One rank whose device events are joined to the host; without a device, the host's own."""
    values: dict[str, Any] = {"ceiling": None, "devices_listed": device is not None, **known}
    return join_rank(
        RankTables(
            rank=0,
            host_span=host,
            device_event=TABLES["device_event"].empty() if device is None else device,
            step=TABLES["step"].empty() if step is None else step,
            collective=TABLES["collective"].empty() if collective is None else collective,
            no_peak_remedy="",
            **values,
        )
    )


def attributed(
    host: pa.Table, device: pa.Table | None = None, step: pa.Table | None = None, **known: Any
) -> RankResult:
    """One rank; without a device, of what the host computes."""
    return attribute_rank(joined(host, device, step, **known))


def by_cause(result: RankResult) -> dict[str, int]:
    """Time of each cause, which sum to the observed time."""
    times: defaultdict[str, int] = defaultdict(int)
    for row in result.piece.to_pylist():
        times[row["cause"]] += row["time_ns"]
    assert sum(times.values()) == result.observed_ns
    return times


def answered(name: str, **tables: pa.Table) -> list[dict[str, Any]]:
    """What the query of a view, or of a table that views share, returns of some tables."""
    shared = SHARED_QUERIES.get(name)
    with connection(threads=1) as database:
        for table_name, values in tables.items():
            database.register(table_name, values)
        sql = VIEWS[name].sql if shared is None else shared.read_text(encoding="utf-8")
        found = database.sql(sql).to_arrow_table()
    if shared is None:
        found = typed(found, VIEWS[name], name)
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows
