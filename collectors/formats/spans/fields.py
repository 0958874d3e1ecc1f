"""Columns of tables of spans: what each may be, and the names that say so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from chopper.errors import UsageError, printable
from chopper.quantities import one_of

FIELDS: dict[str, tuple[str, ...]] = {
    "rank": ("rank", "globalrank", "worker", "workerid", "pid"),
    "op": ("op", "optype", "operation", "name", "event"),
    "start": ("start", "startts", "starttime", "begin", "ts", "timestamp"),
    "duration": ("duration", "dur", "elapsed"),
    "end": ("end", "endts", "endtime", "finish"),
    "step": ("step", "iteration", "iter", "globalstep"),
    "stage": ("stage", "stageid", "pipelinestage", "pprank", "pipelinerank"),
    "data_rank": ("datarank", "dprank", "replica"),
    "micro_batch": ("microbatch", "microbatchid", "mbid", "mb"),
    "chunk": ("chunk", "modelchunk", "chunkid", "mc"),
    "global_chunk": ("globalchunk", "globalmodelchunk", "gmc"),
    "sequence": ("sequence", "sequenceid", "seqid", "seq"),
    "group": ("group", "processgroup", "groupname"),
}
"""What a column may be, and the letters of the names that say so."""
UNITS = {"s": 1e9, "ms": 1e6, "us": 1e3, "ns": 1.0}
"""Units of times, in ns."""
Columns = Mapping[str, str]
"""Field → column; and ``unit``, that of the times."""


def columns_of(texts: Sequence[str]) -> dict[str, str]:
    """Read ``rank=worker,unit=ms`` -> field → column.

    Raises:
        UsageError: it is written otherwise, names a field twice, or one that there is not.
    """
    columns: dict[str, str] = {}
    for part in (part for text in texts for part in text.split(",")):
        field, equals, column = (word.strip() for word in part.partition("="))
        if not equals or not field or not column:
            raise UsageError(f"--map {printable(part)!r}: expected FIELD=COLUMN, as rank=worker")
        if field in columns:
            raise UsageError(f"--map: {field} twice, as {columns[field]} and {column}; name one")
        columns[field] = column
    return checked_columns(columns)


def checked_columns(columns: Columns) -> dict[str, str]:
    """Check the fields that columns are mapped to, and the unit of times.

    Raises:
        UsageError: there is no such field or unit.
    """
    checked = {
        one_of("field of spans", field, (*FIELDS, "unit")): column
        for field, column in columns.items()
    }
    if "unit" in checked:
        checked["unit"] = one_of("unit of times", checked["unit"], UNITS)
    return checked
