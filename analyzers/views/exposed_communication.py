"""Exposed and hidden communication by collective, group, phase and layer.

Summed over ranks and steps: exposed and hidden time.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from chopper.analyzers.attributed import Attributed
from chopper.analyzers.events.collectives import CAUSES, details_of
from chopper.analyzers.events.groups import Groups, text_rows, time_in
from chopper.analyzers.events.steps import windows_of
from chopper.analyzers.trace.columns import ints, matching, strings
from chopper.analyzers.trace.intervals import union
from chopper.analyzers.views import View, column, optional

VIEW = View(
    "exposed_communication",
    __doc__,
    (
        column("collective", "Normalized name of the collective, as allreduce."),
        optional("ranks", "Global ranks that take part; null where not recorded."),
        column("phase", "Phase of the communication events."),
        optional("layer", "Module path of the layer of the communication events."),
        column("event_count", "Number of communication events."),
        column("exposed_ns", "Exposed communication: time without overlapping compute."),
        column("share_ratio", "Exposed communication as a share of the observed time."),
        column("hidden_ns", "Hidden communication: time with overlapping compute."),
        column("elapsed_ns", "Sum of the events' durations in the steps, including overlap."),
        column("waiting_ns", "Part of the exposed time before the last rank arrived."),
        column("at_peak_ns", "Part of the exposed time that the bytes need at the link's peak."),
        column("below_peak_ns", "Part of the exposed transfer beyond what the link's peak needs."),
        column("no_peak_ns", "Part of the exposed transfer with an unknown link peak or size."),
        column("unseparated_ns", "Exposed time of unmatched collectives, wait and transfer alike."),
        optional("group", "Name of the process group; null where not recorded."),
    ),
    title="Exposed and hidden communication",
    section="Communication",
    needs="no communication was recorded",
)


def exposed_communication(run: Attributed) -> pa.Table:
    """COMMUNICATION, PIECE, EVENT_LINK -> EXPOSED_COMMUNICATION, the most exposed first."""
    table = run.communication.combine_chunks()
    rank, row = ints(table, "rank"), ints(table, "event_row")
    ran, hidden = _hidden(run, rank, row)
    inside = ran >= 0
    table, rank, row = table.filter(pa.array(inside)), rank[inside], row[inside]
    details = details_of(run, rank, row)
    keys = {name: strings(table, name) for name in ("ranks", "group", "collective")}
    keys |= {name: strings(details, name) for name in ("phase", "layer")}
    groups = Groups([codes for codes, _ in keys.values()])
    wait, at_peak, below_peak, no_peak, unseparated = (
        groups.sum(time_in(run.pieces, rank, row, cause)) for cause in CAUSES
    )
    exposed = wait + at_peak + below_peak + no_peak + unseparated
    elapsed = groups.sum(ran[inside])
    columns = {
        **{name: text_rows(texts, groups.first) for name, texts in keys.items()},
        "event_count": groups.count,
        "exposed_ns": exposed,
        "share_ratio": exposed / max(run.observed_ns, 1),
        "hidden_ns": groups.sum(hidden[inside]),
        "elapsed_ns": elapsed,
        "waiting_ns": wait,
        "at_peak_ns": at_peak,
        "below_peak_ns": below_peak,
        "no_peak_ns": no_peak,
        "unseparated_ns": unseparated,
    }
    return VIEW.of(columns).take(np.lexsort((-elapsed, -exposed)))


def _hidden(run: Attributed, rank: np.ndarray, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(time of each event inside the windows, -1 outside of them; part of it under computing)."""
    ran = np.full(len(rank), -1, dtype=np.int64)
    hidden = np.zeros(len(rank), dtype=np.int64)
    for one in np.unique(rank).tolist():
        windows = windows_of(run, one)
        if not windows.num_rows:
            continue
        low, high = int(ints(windows, "start_ns").min()), int(ints(windows, "end_ns").max())
        events = run.joined[one].device_event
        start = ints(events, "start_ns")
        end = start + ints(events, "dur_ns")
        work_class = strings(run.links[one], "work_class")
        computing = matching(*work_class, "compute".__eq__)
        at = np.flatnonzero(rank == one)
        begin = np.clip(start[row[at]], low, high)
        stop = np.clip(end[row[at]], low, high)
        seen = (end[row[at]] > low) & (start[row[at]] < high)
        ran[at] = np.where(seen, stop - begin, -1)
        hidden[at] = union(start[computing], end[computing]).within(begin, stop)
    return ran, hidden
