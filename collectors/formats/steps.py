"""Steps of a trace, from whatever marks them: ProfilerStep, named ranges, optimizers, loaders."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from chopper.collectors.formats.parsed import is_one_of, step_table, to_numpy
from chopper.storage.findings import finding
from chopper.storage.manifest import Finding
from chopper.wording import ratio

PROFILER_STEP = re.compile(r"ProfilerStep\s*#\s*(\d{1,18})$", re.ASCII)
_WORD = r"(?:step|iteration|iter|batch)"
_NUMBERED = re.compile(
    rf"(?:^|[\s/:_.-])(?:train(?:ing)?[\s_-]?)?{_WORD}[\s_:#=(-]{{0,8}}(\d{{1,12}})(?!\d)",
    re.I | re.A,
)
_PLAIN = re.compile(
    rf"(?:^|[^a-z])(?:train(?:ing)?[\s_-]?)?{_WORD}\s*+$|\bexecute_(?:model|context|\d)", re.I
)
_NOT_STEP = re.compile(
    r"optimizer|scheduler|zero_grad|forward|backward|micro|sample|load|fetch|next|transfer|copy",
    re.I,
)
_BESIDE = re.compile(r"(?<![a-z])(?:val(?!u)|eval|test|infer|predict|accum)", re.I)
"""Ranges beside or within the steps of a training: steps only where nothing else marks any."""
_DETAIL = re.compile(r"[\[({](?!\s*\d+\s*[\])}])[^\])}]*[\])}]?")
"""What a name says in brackets, unless that is its number: ``step[DECODE bs=8]``."""
_CALLS = (
    ("optimizer", re.compile(r"Optimizer\.step#")),
    ("zero_grad", re.compile(r"Optimizer\.zero_grad#")),
    ("loader", re.compile(r"DataLoader\)#[\w.]*?__next__")),
)
"""Calls that every step makes: a step ends with its optimizer, and begins with the others."""
_MOST_STEPS = 1_000_000
_LEAST_COVER = 0.5
"""What covers less of other calls' time, or of the trace's if it occurs once, marks a part."""
_SAME_COVER = 0.9
"""Ranges cover as much as others from this ratio of their time on."""


class _Spans(NamedTuple):
    """Annotations and operators of a process, by start."""

    names: Sequence[str | None]
    code: np.ndarray
    start: np.ndarray
    end: np.ndarray
    is_range: np.ndarray


class _Marker(NamedTuple):
    """Spans that mark steps, none overlapping: their numbers, if they have any, and their time."""

    source: str
    rows: np.ndarray
    numbers: list[int]
    time_ns: int
    is_outside_training: bool = False


def find_steps(
    host: pa.Table, source: str, pid: int | None = None
) -> tuple[pa.Table, list[Finding]]:
    """Find the steps of a process. HOST_SPAN -> STEP, and what marks them unless ProfilerStep does.

    ``ProfilerStep#3`` comes first; then ranges that are named like steps (``iteration 12``,
    ``train_step``, ``execute_model``); then the calls that every step makes, of which the least
    frequent is taken: several optimizers step for one batch, or several batches before one step.

    Args:
        host: spans, by start.
        source: of the trace, for messages.
        pid: process whose marks count, if it has any.
    """
    for spans in (_spans(host, pid), _spans(host, None)):
        if steps := _profiler_steps(spans):
            rows = np.array([*steps.values()], dtype=np.int64)
            return step_table([*steps], spans.start[rows], spans.end[rows], "profiler_step"), []
    spans = _spans(host, pid)
    if not len(spans.code):
        return step_table([], spans.start, spans.end, "range"), []
    begin_ns = int(to_numpy(host["start_ns"])[0])
    end_ns = int((to_numpy(host["start_ns"]) + to_numpy(host["dur_ns"])).max())
    marker = _marker(spans, end_ns - begin_ns)
    if marker is None:
        return step_table([], spans.start[:0], spans.end[:0], "range"), []
    first_ns, last_ns = spans.start[marker.rows], spans.end[marker.rows]
    if marker.source == "optimizer":
        first_ns = np.append(begin_ns, last_ns[:-1])
    elif marker.source in ("zero_grad", "loader"):
        last_ns = np.append(first_ns[1:], end_ns)
    steps = step_table(
        marker.numbers or [*range(len(marker.rows))], first_ns, last_ns, marker.source
    )
    cover_ratio = int(last_ns[-1] - first_ns[0]) / max(end_ns - begin_ns, 1)
    return steps, [_describe(spans, marker, source, cover_ratio)]


def _profiler_steps(spans: _Spans) -> dict[int, int]:
    """Return the row of each ``ProfilerStep#N``, by its number.

    A step recorded twice (as an operator and as an annotation) counts once.
    """
    named = ((i, PROFILER_STEP.match(n)) for i, n in enumerate(spans.names) if n)
    numbers = {i: int(match[1]) for i, match in named if match}
    rows: dict[int, int] = {}
    for row in np.flatnonzero(np.isin(spans.code, [*numbers])).tolist():
        rows.setdefault(numbers[int(spans.code[row])], row)
    return rows


def _describe(spans: _Spans, marker: _Marker, source: str, cover_ratio: float) -> Finding:
    """Say what marks the steps, and why."""
    codes = spans.code[marker.rows]
    name = f"{spans.names[codes[0]]}{' …' if (codes != codes[0]).any() else ''}"
    how, why = f"one for each range {name}", ""
    if marker.source not in ("range", "annotation"):
        each = "up to the end" if marker.source == "optimizer" else "from the start"
        how, why = f"each {each} of a call of {name}", " and no range named like a training step"
    return finding(
        "trace.steps_from",
        count=len(marker.rows),
        source=source,
        how=how,
        covered=ratio(cover_ratio),
        why=why,
    )


def _spans(host: pa.Table, pid: int | None) -> _Spans:
    """Return the annotations and operators of a process; of all processes if it has none."""
    names, category = host["name"].combine_chunks(), host["category"].combine_chunks()
    kinds = to_numpy(category.indices, -1), category.dictionary.to_pylist()
    rows = np.flatnonzero(is_one_of(kinds, "annotation", "cpu_op"))
    of_process = rows[to_numpy(host["pid"])[rows] == pid] if pid is not None else rows
    rows = of_process if len(of_process) else rows
    start = to_numpy(host["start_ns"])[rows]
    return _Spans(
        names.dictionary.to_pylist(),
        to_numpy(names.indices, -1)[rows],
        start,
        start + to_numpy(host["dur_ns"])[rows],
        is_one_of(kinds, "annotation")[rows],
    )


def _marker(spans: _Spans, whole_ns: int) -> _Marker | None:
    """Return what marks the steps: the ranges that cover most, else the least frequent call."""
    least_ns = _LEAST_COVER * whole_ns
    ranges = [m for m in _ranges(spans) if len(m.rows) > 1 or m.time_ns >= least_ns]
    calls = [m for m in _calls(spans) if len(m.rows) > 1]
    trained = [m for m in ranges if not m.is_outside_training]
    if trained or any(m.source != "loader" for m in calls):
        ranges = trained
    several = [m for m in ranges if len(m.rows) > 1]
    if several:
        least_ns = _SAME_COVER * max(m.time_ns for m in several)
        covering = (m for m in several if m.time_ns >= least_ns)
        return max(covering, key=lambda m: (bool(m.numbers), m.time_ns))
    if ranges:
        # A loader that is called several times within one step loads micro-batches.
        calls = [m for m in calls if m.source != "loader"]
    if calls:
        least_ns = _LEAST_COVER * max(m.time_ns for m in calls)
        # Of equally many, that which comes last before the next step.
        return min(
            (m for m in calls if m.time_ns >= least_ns),
            key=lambda m: (len(m.rows), m.source != "optimizer", -spans.start[m.rows[0]]),
        )
    return max(ranges, key=lambda m: m.time_ns, default=None)


def _ranges(spans: _Spans) -> Iterator[_Marker]:
    """Yield the kinds of ranges that are named like steps."""
    kinds: dict[int, tuple[str, int | None]] = {}
    for code in np.unique(spans.code[spans.is_range]).tolist():
        name = spans.names[code] or ""
        short = _DETAIL.sub("", name)
        # The last of several is the innermost: epoch_step 2/step 7.
        match = next(reversed([*_NUMBERED.finditer(short)]), None)
        if len(name) <= 200 and not _NOT_STEP.search(name) and (match or _PLAIN.search(short)):
            kind = re.sub(r"\d+", "#", short).strip().lower()
            kinds[code] = kind, int(match[1]) if match else None
    groups: dict[str, list[int]] = {}
    lasting = spans.is_range & (spans.end > spans.start) & np.isin(spans.code, [*kinds])
    for row in np.flatnonzero(lasting)[:_MOST_STEPS].tolist():
        groups.setdefault(kinds[int(spans.code[row])][0], []).append(row)
    for kind, members in groups.items():
        rows = _apart(members, spans)
        parsed = (kinds[int(code)][1] for code in spans.code[rows])
        numbers = [number for number in parsed if number is not None]
        numbers = numbers if len({*numbers}) == len(rows) else []
        time_ns = int((spans.end - spans.start)[rows].sum())
        outside = bool(_BESIDE.search(kind))
        yield _Marker("range" if numbers else "annotation", rows, numbers, time_ns, outside)


def _calls(spans: _Spans) -> Iterator[_Marker]:
    """Yield the calls that every step makes, by name; their time is from the first to the last."""
    for code in np.unique(spans.code).tolist():
        for source, pattern in _CALLS:
            if pattern.search(spans.names[code] or ""):
                rows = _apart(np.flatnonzero(spans.code == code).tolist(), spans)
                yield _Marker(source, rows, [], int(np.ptp(spans.start[rows])))


def _apart(rows: list[int], spans: _Spans) -> np.ndarray:
    """Return spans that begin after earlier ones ended: not the same on a second thread."""
    apart: list[int] = []
    for row in rows:
        if not apart or spans.start[row] >= spans.end[apart[-1]]:
            apart.append(row)
    return np.array(apart, dtype=np.int64)
