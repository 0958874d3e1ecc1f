"""One step of one rank as a figure: what its device did, stream by stream, and why it was idle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chopper import wording as fmt
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.trace.columns import ints, strings
from chopper.causes import LEAVES
from chopper.errors import UsageError
from chopper.reports.figures import GREY, Figure, layout, plain, significant
from chopper.reports.labels import color, full_label
from chopper.wording import ranges

MAX_EVENTS = 4000
"""Device events that are drawn: the longest of a step with more."""
_IDLE = "idle"
_OVERLAPPED = "hidden: another stream has the time"


@dataclass(frozen=True)
class _Bars:
    """Intervals of one step: lane and cause of each, with the text shown on hovering."""

    lane: list[str]
    cause: list[str | None]
    start_ns: np.ndarray
    dur_ns: np.ndarray
    text: list[str]


def timeline(run: Attribution, rank: int | None = None, step: int | None = None) -> Figure:
    """Return a step of a rank: a lane for each stream, coloured by cause, and one of idle time.

    Args:
        run: the attributed run; the figure is of the ranks and steps that it has tables of.
        rank: by default the first of them.
        step: number of the step; by default the one of median length.

    Raises:
        UsageError: there is no such rank or step, or nothing was attributed.
    """
    near = run.detail
    window, label = _window(near, rank, step)
    events, count = _events(near, window)
    gaps = _gaps(near, window)
    lanes = [*dict.fromkeys(sorted({*events.lane})), _IDLE]
    data = []
    for cause in sorted({*events.cause, *gaps.cause}, key=_order):
        base, length, place, text = [], [], [], []
        for bars in (events, gaps):
            for i in [i for i, of in enumerate(bars.cause) if of == cause]:
                base.append((int(bars.start_ns[i]) - window["start_ns"]) / 1e6)
                length.append(int(bars.dur_ns[i]) / 1e6)
                place.append(bars.lane[i])
                text.append(bars.text[i])
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": _OVERLAPPED if cause is None else full_label(cause),
                "base": significant(base),
                "x": significant(length),
                "y": place,
                "customdata": text,
                "marker": {"color": GREY if cause is None else color(cause), "line": {"width": 0}},
                "hovertemplate": "%{customdata}<br>from %{base:.4f} ms<extra></extra>",
            }
        )
    shown = layout(
        140 + 46 * len(lanes),
        110,
        16,
        legend=True,
        title={"text": plain(label), "font": {"size": 14}},
        barmode="overlay",
        bargap=0.2,
        xaxis={"title": {"text": "ms since the step began"}, "rangemode": "tozero"},
        yaxis={"type": "category", "categoryarray": lanes[::-1], "automargin": True},
    )
    shown["margin"] |= {"t": 44, "b": 110}
    if count > MAX_EVENTS:
        shown["title"]["text"] += f" (the {MAX_EVENTS} longest of {count} events)"
    return {"data": data, "layout": shown}


def _order(cause: str | None) -> int:
    return len(LEAVES) if cause is None else LEAVES.index(cause)


def _window(run: Attribution, rank: int | None, step: int | None) -> tuple[dict[str, int], str]:
    """Return the window to draw, and its title."""
    windows = run.windows
    known = sorted({*ints(windows, "rank").tolist()})
    if not known:
        raise UsageError(f"{run.source}: no timeline: no step was attributed")
    rank = known[0] if rank is None else rank
    if rank not in known:
        raise UsageError(
            f"{run.source}: no timeline of rank {rank!r}: there are tables of {ranges(known)}; "
            "chopper.attribute(run, ranks=[…]) chooses others"
        )
    rows = windows.filter(
        pc.equal(windows["rank"], pa.scalar(rank, windows["rank"].type))
    ).to_pylist()
    if step is None:
        rows.sort(key=lambda row: row["end_ns"] - row["start_ns"])
        chosen = rows[(len(rows) - 1) // 2]
    else:
        found = [row for row in rows if row["number"] == step]
        if not found:
            numbers = sorted(row["number"] for row in rows if row["number"] is not None)
            has = f"it has {ranges(numbers)}" if numbers else "its steps have no numbers"
            raise UsageError(f"{run.source}: no timeline of step {step!r} of rank {rank}: {has}")
        chosen = found[0]
    number = chosen["number"]
    name = "whole trace" if number is None else f"step {number}"
    length = fmt.duration(chosen["end_ns"] - chosen["start_ns"])
    return chosen, f"Rank {rank}, {name}: {length}"


def _events(run: Attribution, window: dict[str, int]) -> tuple[_Bars, int]:
    """Return the device events of a window, at most :data:`MAX_EVENTS`, and how many there are."""
    rank = window["rank"]
    table, links = run.joined[rank].device_event, run.links[rank]
    mine = np.flatnonzero(ints(links, "step_index", null=-1) == window["step_index"])
    dur_ns = ints(table, "dur_ns")
    count = len(mine)
    if count > MAX_EVENTS:
        mine = np.sort(mine[np.argsort(-dur_ns[mine], kind="stable")[:MAX_EVENTS]])
    cause = _largest_cause(run.pieces, window)
    stream = ints(table, "stream_id", null=-1)[mine].tolist()
    codes, names = strings(table, "name")
    text = []
    for row in mine.tolist():
        name = plain(fmt.kernel_name(names[codes[row]])) if codes[row] >= 0 else "event"
        text.append(f"{name}: {fmt.duration(int(dur_ns[row]))}")
    bars = _Bars(
        ["device" if s < 0 else f"stream {s}" for s in stream],
        [cause.get(row) for row in mine.tolist()],
        ints(table, "start_ns")[mine],
        dur_ns[mine],
        text,
    )
    return bars, count


def _largest_cause(pieces: pa.Table, window: dict[str, int]) -> dict[int, str]:
    """Return, for each device event of a window, the cause that most of its time went to."""
    inside = (ints(pieces, "rank") == window["rank"]) & (
        ints(pieces, "step_index") == window["step_index"]
    )
    row = ints(pieces, "event_row", null=-1)
    codes, names = strings(pieces, "cause")
    busy = np.array([not name.startswith("idle") for name in names], dtype=bool)[codes]
    at = np.flatnonzero(inside & (row >= 0) & busy)
    at = at[np.argsort(ints(pieces, "time_ns")[at], kind="stable")]
    return {int(row[i]): names[codes[i]] for i in at.tolist()}


def _gaps(run: Attribution, window: dict[str, int]) -> _Bars:
    """Return the idle time of a window, by cause."""
    gaps = run.gaps
    inside = (ints(gaps, "rank") == window["rank"]) & (
        ints(gaps, "step_index") == window["step_index"]
    )
    at = np.flatnonzero(inside)
    codes, names = strings(gaps, "cause")
    start_ns = ints(gaps, "start_ns")[at]
    dur_ns = ints(gaps, "end_ns")[at] - start_ns
    causes = [names[codes[i]] for i in at.tolist()]
    text = [
        f"{plain(full_label(cause))}: {fmt.duration(int(length))}"
        for cause, length in zip(causes, dur_ns.tolist(), strict=True)
    ]
    return _Bars([_IDLE] * len(at), [*causes], start_ns, dur_ns, text)
