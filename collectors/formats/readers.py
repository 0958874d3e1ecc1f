"""Every kind of file that can be imported: how it is recognized, and which module reads it.

What a file is, is read from its first bytes, not from its name; only whether it is a CSV is not.
A database's module is loaded when the first file of its kind comes.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from chopper.collectors.formats.unpack import cells_of, head_of, refuse_other
from chopper.errors import InputError

_CSV = re.compile(r"\.csv(\.gz|\.zst)?$", re.IGNORECASE)
_TRACE = re.compile(
    r"\.(json|sqlite3?|rpd|db|pickle|pkl|parquet|et)(\.gz|\.zst)?$",
    re.IGNORECASE,
)
Kind = Literal["trace", "counters", "log", "memory", "run"]


@dataclass(frozen=True, slots=True)
class Reader:
    """One kind of file.

    Attributes:
        kind: a trace is what the others are joined to: counters of kernels, logs of devices,
            snapshots of memory. A run is whole: a timeline that carries one.
        module: has ``sniff(head)``, which looks at the first bytes (unpacked), and for traces
            ``read(files)``, which gives the ``ParsedTrace`` of each rank of one recording.
        csv: whether its files are CSV.
        grouped: whether several files are one recording; the module has ``group_of(path)``.
    """

    kind: Kind
    module: str
    csv: bool = False
    grouped: bool = False

    def load(self) -> Any:
        """Its module."""
        return importlib.import_module(self.module)


READERS = (
    Reader("run", "chopper.collectors.formats.exported"),
    Reader("trace", "chopper.collectors.formats.sqlite"),
    Reader("trace", "chopper.collectors.formats.rocprof_json"),
    Reader("memory", "chopper.collectors.snapshot"),
    Reader("counters", "chopper.collectors.formats.counters", csv=True),
    Reader("log", "chopper.collectors.formats.telemetry_csv", csv=True),
    Reader("trace", "chopper.collectors.formats.rocprof_csv", csv=True, grouped=True),
    Reader("trace", "chopper.collectors.formats.chakra"),
    Reader("trace", "chopper.collectors.formats.spans.primus", grouped=True),
    Reader("trace", "chopper.collectors.formats.spans.tables", grouped=True),
    Reader("trace", "chopper.collectors.formats.spans.tables", csv=True, grouped=True),
)
MAPPED = READERS[-2]
"""Reads files whose columns the user names, whatever they are."""
KINETO = Reader("trace", "chopper.collectors.formats.kineto")
"""What everything else is taken for: its reader says what a file is instead."""


def is_csv(path: Path) -> bool:
    """Return whether a file has the name of a CSV."""
    return bool(_CSV.search(path.name))


def may_hold_traces(path: Path) -> bool:
    """Return whether a file in a directory is worth looking into."""
    return bool(_TRACE.search(path.name))


def reader_of(path: Path) -> Reader | None:
    """Return the reader of a file; None for a CSV of no known kind.

    Raises:
        OSError: it cannot be read.
        InputError: it is known, and known not to be readable as it is.
    """
    head = head_of(path)
    reader = next((r for r in READERS if r.csv == is_csv(path) and r.load().sniff(head)), None)
    if reader is not None:
        return reader
    if is_csv(path) or path.name.lower().endswith(_DATABASES):
        refuse_other(path, head)
    if is_csv(path):
        return None
    _refuse(path, head)
    return KINETO


def has_times(path: Path) -> bool:
    """Return whether a table of counters also says when its kernels ran, as a trace does."""
    from chopper.collectors.formats import rocprof_csv

    return rocprof_csv.part_of(head_of(path)) == rocprof_csv.KERNELS


_EXPORT = {
    ".nsys-rep": "nsys export --type sqlite",
    ".qdrep": "nsys export --type sqlite",
    ".ncu-rep": "ncu --import … --csv --page raw",
    ".pftrace": "rocprofv3 --output-format json (or rocpd, csv)",
    ".otf2": "rocprofv3 --output-format json (or rocpd, csv)",
}
_DATABASES = (".sqlite", ".sqlite3", ".rpd", ".db")


def _refuse(path: Path, head: bytes) -> None:
    """Explain that a file can only be read by the tool that wrote it."""
    name = path.name.lower().removesuffix(".gz").removesuffix(".zst")
    for suffix, command in _EXPORT.items():
        if name.endswith(suffix):
            raise InputError(
                f"{path}: a report that only its own tool can read; export it and pass the result: "
                f"{command}"
            )
    if name.endswith(_DATABASES) and head:
        raise InputError(
            f"{path}: named as a database, but does not begin as SQLite's do: encrypted, cut off "
            f"at its start, or another format (begins with {head[:8]!r})"
        )


def what_else(path: Path) -> str:
    """Describe what an unknown CSV seems to be, for the message that refuses it."""
    try:
        first = head_of(path).decode("utf-8-sig", "replace").partition("\n")[0].strip()
    except OSError:
        return ""
    if "(ns)" in first and "Name" in first:
        return (
            " (a table of `nsys stats`? Pass the report's database instead: nsys export --type "
            "sqlite)"
        )
    from chopper.collectors.formats.spans.tables import hint

    heading = f" (its heading: {first[:80]!r})" if first else ""
    return hint(cells_of(first)) or heading
