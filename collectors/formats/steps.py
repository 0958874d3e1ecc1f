"""Steps of a trace, from whatever marks them: ProfilerStep, named ranges, optimizers, loaders."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from chopper.collectors.formats.arrays import to_numpy
from chopper.collectors.formats.parsed import step_table
from chopper.storage.manifest import Finding
from chopper.wording import plural, ratio

PROFILER_STEP = re.compile(r"ProfilerStep\s*#\s*(\d{1,18})$")
_NUMBERED = re.compile(
    r"(?:^|[\s/:_.-])(?:train(?:ing)?[\s_-]?(?:step|iteration|iter|batch)|step|iteration|iter|batch)"
    r"[\s_:#=(-]{0,8}(\d{1,12})(?!\d)",
    re.IGNORECASE,
)
_PLAIN = re.compile(
    r"(?:.*[^a-z])?(?:train(?:ing)?[\s_-]?)?(?:step|iteration|iter|batch)\s*|.*\bexecute_(?:model|context|\d).*",
    re.IGNORECASE,
)
_NOT_STEP = re.compile(
    r"optimizer|scheduler|zero_grad|forward|backward|micro|sample|load|fetch|next|transfer|copy",
    re.IGNORECASE,
)
_DETAIL = re.compile(r"[\[({](?!\s*\d+\s*[\])}])[^\])}]*[\])}]?")
"""What a name says in brackets, unless that is its number: ``step[DECODE bs=8]``."""
_BOUNDARIES = (
    ("optimizer", re.compile(r"Optimizer\.step#")),
    ("zero_grad", re.compile(r"Optimizer\.zero_grad#")),
    ("loader", re.compile(r"DataLoader.*__next__")),
)
"""Calls that every step makes: a step ends with its optimizer, and begins with the others."""
_MOST_STEPS = 1_000_000
_LEAST_COVER = 0.5
"""A marker that covers less of what another covers, or of the trace if it occurs once, marks a
part."""


@dataclass(frozen=True)
class _Marker:
    """Ranges or calls of one kind that mark steps; ``rows`` of the host's spans, none overlapping.

    Attributes:
        numbers: as the names count; None if they do not.
        span_ns: time from the first to the last, or of all ranges.
    """

    source: str
    name: str
    rows: np.ndarray
    numbers: list[int] | None
    span_ns: int


def find_steps(
    host: pa.Table, source: str, pid: int | None = None
) -> tuple[pa.Table, list[Finding]]:
    """Find the steps of a process. HOST_SPAN -> STEP, and what marked them unless ProfilerStep did.

    ``ProfilerStep#3`` comes first; then ranges that are named like steps (``iteration 12``,
    ``train_step``, ``execute_model``); then the calls that every step makes, of which the least
    frequent is taken: several optimizers step for one batch, or several batches before one step.

    Args:
        host: spans, by start.
        source: of the trace, for messages.
        pid: process whose marks count, if it has any.
    """
    start, dur = to_numpy(host["start_ns"]), to_numpy(host["dur_ns"])
    column = host["name"].combine_chunks()
    names, codes = column.dictionary.to_pylist(), to_numpy(column.indices, -1)
    numbers = {i: int(m[1]) for i, n in enumerate(names) if n and (m := PROFILER_STEP.match(n))}
    rows = _of_process(np.flatnonzero(np.isin(codes, list(numbers))), host, pid)
    if len(rows):
        # A step recorded twice (as an operator and as an annotation) counts once.
        by_number: dict[int, int] = {}
        for row in rows.tolist():
            by_number.setdefault(numbers[int(codes[row])], row)
        first = np.array([*by_number.values()], dtype=np.int64)
        bounds = start[first], start[first] + dur[first]
        return step_table([*by_number], *bounds, "profiler_step"), []
    category = host["category"].combine_chunks()
    kinds = category.dictionary.to_pylist()
    wanted = [i for i, c in enumerate(kinds) if c in ("annotation", "cpu_op")]
    rows = np.flatnonzero(np.isin(to_numpy(category.indices, -1), wanted))
    is_range = np.array([kinds[i] == "annotation" for i in to_numpy(category.indices, -1)[rows]])
    own = np.isin(rows, _of_process(rows, host, pid))
    rows, is_range = rows[own], is_range[own]
    if not len(rows):
        return step_table([], start[:0], start[:0], "range"), []
    begin_ns, end_ns = int(start[0]), int((start + dur).max())
    ranges = _ranges(rows[is_range], names, codes, start, dur)
    marker = _best([m for m in ranges if len(m.rows) > 1])
    once = _best([m for m in ranges if m.span_ns >= _LEAST_COVER * (end_ns - begin_ns)])
    if marker is None:
        calls = [m for m in _calls(rows, names, codes, start, dur) if len(m.rows) > 1]
        longest = max((m.span_ns for m in calls), default=0)
        calls = [m for m in calls if m.span_ns >= _LEAST_COVER * longest]
        # Of equally many, that which comes last before the next step.
        marker = min(
            calls,
            key=lambda m: (len(m.rows), m.source != "optimizer", -start[m.rows[0]]),
            default=once,
        )
    if marker is None:
        return step_table([], start[:0], start[:0], "range"), []
    first_ns, last_ns = start[marker.rows], start[marker.rows] + dur[marker.rows]
    if marker.source == "optimizer":
        first_ns = np.append(begin_ns, last_ns[:-1])
    elif marker.source in ("zero_grad", "loader"):
        last_ns = np.append(first_ns[1:], end_ns)
    count = len(marker.rows)
    steps = step_table(marker.numbers or [*range(count)], first_ns, last_ns, marker.source)
    cover = ratio(int(last_ns[-1] - first_ns[0]) / max(end_ns - begin_ns, 1))
    return steps, [_said(marker, source, cover)]


def _said(marker: _Marker, source: str, cover: str) -> Finding:
    """Say what marks the steps, and why."""
    count, name = len(marker.rows), marker.name
    how, why = f"{plural(count, 'step')}, one for each range {name}", ""
    if marker.source not in ("range", "annotation"):
        each = "up to the end" if marker.source == "optimizer" else "from the start"
        how = f"{plural(count, 'step')}, each {each} of a call of {name}"
        why = " and no range that is named like a step"
    message = f"{source}: {how} ({cover} of the recording): it has no ProfilerStep{why}"
    return Finding(code="trace.steps_from", severity="info", message=message, count=count)


def _of_process(rows: np.ndarray, host: pa.Table, pid: int | None) -> np.ndarray:
    """Return the rows of a process; all of them if it has none."""
    own = to_numpy(host["pid"])[rows] == pid if pid is not None else np.zeros(len(rows), bool)
    return rows[own] if own.any() else rows


def _ranges(
    rows: np.ndarray, names: list[str | None], codes: np.ndarray, start: np.ndarray, dur: np.ndarray
) -> Iterable[_Marker]:
    """Yield the kinds of ranges that are named like steps."""
    kinds: dict[int, tuple[str, int | None]] = {}
    for code in np.unique(codes[rows]).tolist():
        name = names[code]
        if name is None or len(name) > 200 or _NOT_STEP.search(name):
            continue
        short = _DETAIL.sub("", name)
        # The last of several is the innermost: epoch_step 2/step 7.
        match = next(reversed([*_NUMBERED.finditer(short)]), None)
        if match or _PLAIN.fullmatch(short):
            number = int(match[1]) if match else None
            kinds[code] = (re.sub(r"\d+", "#", short).strip().lower(), number)
    groups: dict[str, list[int]] = {}
    for row in rows[np.isin(codes[rows], list(kinds))][:_MOST_STEPS].tolist():
        groups.setdefault(kinds[int(codes[row])][0], []).append(row)
    for members in groups.values():
        lasting = np.array(members)[dur[members] > 0]
        apart = _apart(lasting, start, dur)
        numbers = [number for row in apart if (number := kinds[int(codes[row])][1]) is not None]
        if len(apart):
            numbered = len({*numbers}) == len(apart)
            name = names[int(codes[apart[0]])] or ""
            yield _Marker(
                source="range" if numbered else "annotation",
                name=name + (" …" if len(np.unique(codes[apart])) > 1 else ""),
                rows=apart,
                numbers=numbers if numbered else None,
                span_ns=int(dur[apart].sum()),
            )


def _best(markers: list[_Marker]) -> _Marker | None:
    """Return numbered ranges before others, then those that cover most time; None of none."""
    most = max((m.span_ns for m in markers), default=0)
    covering = [m for m in markers if m.span_ns >= _LEAST_COVER * most]
    return max(covering, key=lambda m: (m.numbers is not None, m.span_ns), default=None)


def _calls(
    rows: np.ndarray, names: list[str | None], codes: np.ndarray, start: np.ndarray, dur: np.ndarray
) -> Iterable[_Marker]:
    """Yield the calls that every step makes, by name."""
    for source, pattern in _BOUNDARIES:
        for code in np.unique(codes[rows]).tolist():
            name = names[code]
            if name is not None and pattern.search(name):
                calls = _apart(rows[codes[rows] == code], start, dur)
                if len(calls):
                    yield _Marker(
                        source, name, calls, None, int(start[calls[-1]] - start[calls[0]])
                    )


def _apart(rows: np.ndarray, start: np.ndarray, dur: np.ndarray) -> np.ndarray:
    """Return ranges that begin after earlier ones ended: not the same on a second thread."""
    apart = []
    end = np.iinfo(np.int64).min
    for row in rows.tolist():
        if start[row] >= end:
            apart.append(row)
            end = start[row] + dur[row]
    return np.array(apart, dtype=np.int64)
