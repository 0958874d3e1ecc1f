"""Tables of spans: Parquet, CSV, and events of Chrome's JSON where their columns are named.

Columns are recognized by their names, or mapped: ``{"rank": "worker", "unit": "ms"}``. Several
files of one folder whose names differ in numbers alone are one job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper.collectors.formats.parsed import ParsedTrace, to_arrow, to_numpy
from chopper.collectors.formats.spans.columns import Spans
from chopper.collectors.formats.spans.fields import FIELDS, UNITS, Columns
from chopper.collectors.formats.spans.traces import traces_of
from chopper.collectors.formats.unpack import cells_of, letters_of, read_bytes
from chopper.errors import JSON_ERRORS, InputError
from chopper.storage.findings import finding
from chopper.storage.manifest import Finding
from chopper.tables.ranges import TIME_MOST_NS
from chopper.wording import plural, some

_SUFFIX = re.compile(r"[_ (\[]+(?:(s|secs?|seconds)|(ms)|(us|µs)|(ns))[)\]]?$", re.IGNORECASE)
_RANK_IN_NAME = re.compile(r"(?:rank|worker)[-_.]?([0-9]{1,6})(?![0-9])", re.IGNORECASE)
_LONGEST_NAME = 100
_PLACES = ("stage", "data_rank")
_NUMBERS = ("rank", "step", *_PLACES, "micro_batch", "chunk", "global_chunk", "sequence")


def sniff(head: bytes) -> bool:
    """Return whether a file is Parquet, or a CSV whose heading names the columns of spans."""
    if head.startswith(b"PAR1"):
        return True
    names = cells_of(head.decode("utf-8-sig", "replace"))
    # Tables of other tools have processes, too.
    found = _recognized([name for name in names if letters_of(name) != "pid"])
    return bool({"rank", "step", "stage"} & found.keys()) and not _missing(found)


def hint(names: Sequence[str]) -> str:
    """Return how the columns of what may be a table of spans are named; empty where it is none."""
    found = _recognized(names)
    missing = ["rank"] * ("rank" not in found) + _missing(found)
    if not {"step", "stage", "data_rank", "micro_batch"} & found.keys() or len(missing) > 3:
        return ""
    return f" (spans whose {_and(missing)} no name tells? --map {_wanted(missing)})"


def _wanted(missing: Sequence[str]) -> str:
    return ",".join(f"{name}=COLUMN" for name in missing)


def group_of(path: Path) -> str:
    """Return what the files of one job share: the folder, and the name without its numbers."""
    return f"{path.parent}/{re.sub(r'[0-9]+', '#', path.name)}"


def read(files: Sequence[Path], columns: Columns | None = None) -> list[ParsedTrace]:
    """Read the spans of one job.

    Args:
        files: of the job: Parquet, CSV, or with ``columns`` JSON.
        columns: which column is what; others are recognized by their names.

    Raises:
        InputError: a file cannot be read, or its columns are not those of spans.
    """
    findings: list[Finding] = []
    tables = [_Table(path, columns or {}, findings) for path in sorted(files)]
    for table in tables[1:]:
        if table.found.keys() != tables[0].found.keys():
            differing = sorted(table.found.keys() ^ tables[0].found.keys())
            raise InputError(
                f"{table.path}: another set of columns than {tables[0].path} ({differing[0]}); "
                "expected the same in all files of a job; pass them separately"
            )
    every = pa.concat_tables([table.spans() for table in tables]).unify_dictionaries()
    if not every.num_rows:
        raise InputError(f"{tables[0].path}: a table of spans without a single usable row")
    values: dict[str, Any] = {}
    for name in every.column_names:
        column = every[name].combine_chunks()
        is_text = pa.types.is_dictionary(column.type)
        values[name] = _codes(column) if is_text else to_numpy(column)
        if is_text:
            values["names" if name == "op" else "groups"] = column.dictionary.to_pylist()
    stage, rank = values.get("stage"), values["rank"]
    if stage is not None and stage.min() == 1 and rank.min() == 0:
        values["stage"] = stage - 1  # counted from 1
    lacks = {"step": "steps", "stage": "pipeline stages", "data_rank": "data-parallel ranks"}
    return traces_of(
        Spans(
            path=tables[0].path,
            tool="spans of another tool",
            sources={
                name: f"column {tables[0].found[name]} of {tables[0].path.name}"
                for name in _PLACES
                if name in tables[0].found
            },
            lacks=[words for name, words in lacks.items() if name not in values],
            findings=findings,
            **values,
        )
    )


def _codes(texts: pa.DictionaryArray) -> np.ndarray:
    return to_numpy(texts.indices, missing=-1).astype(np.int64)


def _recognized(names: Sequence[str]) -> dict[str, str]:
    """Return field → the column whose name says that it is that."""
    # Whatever is longer names nothing that is known, and takes long to look at.
    letters = {n: letters_of(_SUFFIX.sub("", n)) for n in names if len(n) <= _LONGEST_NAME}
    found: dict[str, str] = {}
    for field, known in FIELDS.items():
        for name, told in letters.items():
            if told in known:
                found.setdefault(field, name)
    return found


def _missing(found: Mapping[str, str]) -> list[str]:
    lacking = [name for name in ("op", "start") if name not in found]
    return lacking + ["duration"] * (not {"duration", "end"} & found.keys())


class _Table:
    """One file: its columns, and which of them is what.

    Attributes:
        found: field → column.
    """

    def __init__(self, path: Path, columns: Columns, findings: list[Finding]) -> None:
        self.path, self._findings = path, findings
        self._stated_unit, self._is_chrome = columns.get("unit"), False
        self._table = self._loaded()
        names = self._table.column_names
        mapped = {field: column for field, column in columns.items() if field != "unit"}
        for field, column in mapped.items():
            if column not in names:
                raise InputError(
                    f"{path}: no column {column!r} (--map {field}={column}); found {some(names)}"
                )
        self.found = _recognized([n for n in names if n not in mapped.values()]) | mapped
        if "end" in mapped and "duration" not in mapped:
            self.found.pop("duration", None)
        self._check()

    def _check(self) -> None:
        """Refuse a table whose columns do not tell what a span needs."""
        missing = _missing(self.found)
        if "rank" not in self.found and self._rank_of_name() is None:
            missing.insert(0, "rank")
        if not missing:
            return
        known = "; ".join(f"{n}: {FIELDS[n][0]}, {FIELDS[n][1]} …" for n in missing)
        raise InputError(
            f"{self.path}: a table whose columns do not tell {_and(missing)} of spans; found "
            f"{some(self._table.column_names)}; expected names as {known}; name them: "
            f"--map {_wanted(missing)}"
        )

    def _rank_of_name(self) -> int | None:
        match = _RANK_IN_NAME.search(self.path.name)
        return int(match[1]) if match else None

    def _loaded(self) -> pa.Table:
        """Return the table in the file.

        Raises:
            InputError: it cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                if file.read(4) == b"PAR1":
                    import pyarrow.parquet as pq

                    return pq.ParquetFile(self.path).read()  # read_table() loads pandas
            data, findings = read_bytes(self.path)
            self._findings += findings
            if data.lstrip()[:1] in (b"[", b"{"):
                self._is_chrome = True
                return _of_chrome(data)
            return self._of_csv(data)
        except OSError as exc:
            raise InputError(f"{self.path}: cannot be read ({exc.strerror or exc})") from exc
        except (pa.ArrowException, *JSON_ERRORS) as exc:
            what = str(exc).partition("\n")[0]
            raise InputError(f"{self.path}: not a whole table of spans ({what})") from exc

    def _of_csv(self, data: bytes) -> pa.Table:
        from pyarrow import csv

        bad: list[int] = []

        def skip(row: Any) -> str:
            bad.append(row.number or 0)
            return "skip"

        table = csv.read_csv(
            pa.BufferReader(data),
            parse_options=csv.ParseOptions(invalid_row_handler=skip),
            convert_options=csv.ConvertOptions(strings_can_be_null=True),
        )
        self._left_out(len(bad), "are cut short or too long")
        return table.rename_columns([name.strip() for name in table.column_names])

    def _left_out(self, count: int, why: str) -> None:
        if count:
            problems = f"{plural(count, 'row')} {why} and {'is' if count == 1 else 'are'} left out"
            note = finding(
                "trace.damaged_table", "csv", count=count, source=self.path.name, problems=problems
            )
            self._findings.append(note)

    def spans(self) -> pa.Table:
        """Return the columns of ``Spans``, without rows that tell no operation, worker or time."""
        columns: dict[str, np.ndarray] = {}
        if "rank" not in self.found:
            columns["rank"] = np.full(self._table.num_rows, self._rank_of_name(), dtype=np.int64)
        for name in _NUMBERS:
            if name in self.found:
                columns[name] = self._whole(name)
        start_ns, usable, resolution_ns = self._times("start")
        by_end = "duration" not in self.found
        other_ns, known, of_other = self._times("end" if by_end else "duration")
        end_ns = other_ns if by_end else start_ns + other_ns
        usable = usable & known & (end_ns >= start_ns)
        for name in {"rank", "step"} & columns.keys():
            usable &= columns[name] >= 0
        texts = {name: self._texts(name) for name in ("op", "group") if name in self.found}
        usable &= texts["op"].is_valid().to_numpy(zero_copy_only=False)
        self._left_out(int((~usable).sum()), "without operation, worker, step or times")
        columns |= {"start_ns": start_ns, "end_ns": end_ns}
        columns["resolution_ns"] = resolution_ns + of_other
        table = pa.table({name: to_arrow(values) for name, values in columns.items()})
        for name, text in texts.items():
            table = table.append_column(name, text)
        return table.filter(to_arrow(usable))

    def _texts(self, name: str) -> pa.DictionaryArray:
        column = self._table[self.found[name]]
        if pa.types.is_dictionary(column.type):
            column = column.cast(pa.dictionary(pa.int32(), pa.string()))
        else:
            column = column.cast(pa.string()).dictionary_encode()
        return column.unify_dictionaries().combine_chunks()

    def _whole(self, name: str) -> np.ndarray:
        """Return a column of whole numbers, -1 where it is null.

        Raises:
            InputError: it holds something else.
        """
        column = self._table[self.found[name]]
        try:
            whole = column.cast(pa.int64())
        except pa.ArrowInvalid as exc:
            raise InputError(
                f"{self.path}: column {self.found[name]} holds what is no whole number ({exc}); "
                f"expected the {name.replace('_', ' ')} of each span; name another column: "
                f"--map {name}=COLUMN"
            ) from exc
        return to_numpy(whole, missing=-1)

    def _times(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a column of times in ns, a mask of those told, and how far rounding is off.

        Raises:
            InputError: it holds something else, no unit is told, or times that cannot be.
        """
        column = self._table[self.found[name]].combine_chunks()
        exact = np.zeros(len(column))
        if pa.types.is_temporal(column.type):
            kind = pa.duration("ns") if pa.types.is_duration(column.type) else pa.timestamp("ns")
            column = column.cast(kind).cast(pa.int64())
            return to_numpy(column), _valid(column), exact
        is_whole = pa.types.is_integer(column.type)
        if not is_whole and not pa.types.is_floating(column.type):
            raise InputError(
                f"{self.path}: column {self.found[name]} holds {column.type}, expected times as "
                f"numbers; name another column: --map {name}=COLUMN"
            )
        factor = UNITS[self._unit(name)]
        values = to_numpy(column.cast(pa.int64() if is_whole else pa.float64()))
        known = _valid(column) & np.isfinite(values)
        values = np.where(known, values, values.dtype.type(0))
        most = float(np.abs(values).max(initial=0)) * factor
        if most > TIME_MOST_NS:
            raise InputError(
                f"{self.path}: column {self.found[name]} holds {most / 1e9:.3g} s, no time; name "
                "its unit: --map unit=s (or ms, us, ns)"
            )
        if is_whole:
            return values * int(factor), known, exact
        times_ns = np.rint(values * factor).astype(np.int64)
        if column.type != pa.float32():
            return times_ns, known, exact
        resolution = np.spacing(np.abs(values).astype(np.float32))
        return times_ns, known, resolution.astype(np.float64) * factor

    def _unit(self, name: str) -> str:
        """Return the unit of a column of times: as named, else as its numbers tell.

        Raises:
            InputError: nothing tells it.
        """
        if self._stated_unit is not None:
            return self._stated_unit
        times = [name, *(n for n in ("start", "duration", "end") if n in self.found)]
        for match in (_SUFFIX.search(self.found[n]) for n in times):
            if match is not None:
                return next(u for u, text in zip(UNITS, match.groups(), strict=True) if text)
        if self._is_chrome:
            return "us"
        column = self._table[self.found["start"]]
        if pa.types.is_floating(column.type):
            return "s"
        first = pc.max(column).as_py() or 0
        for unit, factor in UNITS.items():
            # Since 1970: 2001 to 2128.
            if 1e18 <= first * factor <= 5e18:
                return unit
        raise InputError(
            f"{self.path}: column {self.found[name]} holds whole numbers and names no unit, "
            "expected one; name it: --map unit=us (or s, ms, ns)"
        )


def _valid(column: pa.Array) -> np.ndarray:
    return np.asarray(column.is_valid().to_numpy(zero_copy_only=False))


def _of_chrome(data: bytes) -> pa.Table:
    """Return the complete events of Chrome's JSON as a table: their fields, and their arguments."""
    document = msgspec.json.decode(data)
    listed = document.get("traceEvents") if isinstance(document, dict) else document
    events = [e for e in listed or () if isinstance(e, dict) and e.get("ph") == "X"]
    rows = []
    for event in events:
        arguments = event.pop("args", None)
        rows.append({**(arguments if isinstance(arguments, dict) else {}), **event})
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: _array([row.get(name) for row in rows]) for name in names})


def _array(values: list[Any]) -> pa.Array:
    """Return values of one type as they are, of several as text."""
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):
        return pa.array([None if value is None else str(value) for value in values])


def _and(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + f" and {words[-1]}" if len(words) > 1 else words[0]
