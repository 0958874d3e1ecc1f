"""The timeline's data: which steps are embedded, their events as packed lanes, and telemetry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from chopper import wording as fmt
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.replay.replay import Replay, lanes_of
from chopper.reports.lanes import MAX_DEPTH, MAX_THREADS, Kinds, Packer, RankColumns, Window
from chopper.reports.pack import pack
from chopper.reports.series import LARGEST_DRAWN, SAMPLED, Series, thin

DEVICE_BUDGET = 320_000
"""Device events embedded in one report, over all ranks and steps."""
HOST_BUDGET = 240_000
"""Host spans embedded in one report."""
MAX_WINDOWS = 400
_POINTS_PER_SERIES = 6_000
_PATH_BUDGET = 100_000


@dataclass(frozen=True, slots=True)
class Timeline:
    """Windows, packed columns and names from which the page draws timelines.

    Attributes:
        windows: one entry per embedded window: rank, step, times, id of its pack, what was kept.
        packs: id → packed columns.
        names: deflated JSON of names and kinds.
        telemetry: packed series.
        notes: what was left out and why, one sentence each.
        path: whether the critical path is marked.
    """

    windows: list[dict[str, Any]]
    packs: dict[str, str]
    names: str
    telemetry: str
    notes: list[str]
    path: bool = False


def build(
    run: Attribution,
    series: Iterable[Series] = (),
    *,
    replay: Replay | str = "it was not replayed",
    device_budget: int = DEVICE_BUDGET,
    host_budget: int = HOST_BUDGET,
) -> Timeline:
    """Choose the windows and pack them.

    Args:
        run: whose; of all kinds of steps.
        series: telemetry to stand below the lanes.
        replay: has the critical path; a reason where there is none.
        device_budget: device events in all packs.
        host_budget: host spans in all packs.
    """
    fields = ("rank", "step_index", "number", "start_ns", "end_ns")
    rows = zip(*(run.windows[field].to_pylist() for field in fields), strict=True)
    windows = [window for window in (Window(*row) for row in rows) if window.dur_ns > 0]
    ranks = {r: RankColumns(run, run.joined[r], r) for r in dict.fromkeys(w.rank for w in windows)}
    chosen, notes = _choose(windows, ranks, device_budget)
    lanes = {} if isinstance(replay, str) else lanes_of(replay.counting(run))
    spans = {w: len(ranks[w.rank].host_rows(w)) for w in chosen}
    # Each window keeps spans in proportion to what it has.
    kept_ratio = min(host_budget / max(sum(spans.values()), 1), 1.0)
    kinds = Kinds()
    packs: dict[str, str] = {}
    entries: list[dict[str, Any]] = []
    short = deep = 0
    for window in chosen:
        rank = ranks[window.rank]
        packer = Packer(window, rank, kinds, lanes.get(window.rank))
        packer.path(_PATH_BUDGET // len(chosen))
        packer.device()
        limit = max(int(spans[window] * kept_ratio), min(spans[window], 500))
        dropped, hidden = packer.host(limit)
        packer.clock()
        key = f"w{len(packs)}"
        packs[key] = packer.finish()
        short += dropped
        deep += hidden
        entries.append(
            {
                "id": key,
                "rank": window.rank,
                "step": window.number,
                "index": window.step_index,
                "start_ns": str(window.start_ns),
                "offset_ns": rank.offset_ns,
                "dur_ns": window.dur_ns,
                "events": packer.events,
                "host_dropped": dropped + hidden,
            }
        )
    if short:
        notes.append(
            f"{fmt.plural(short, 'host span')} are left out: the shortest of their step, to "
            "limit the size of the page. No device event is left out for being short."
        )
    if deep:
        notes.append(
            f"{fmt.plural(deep, 'host span')} are not drawn: nested more than {MAX_DEPTH} levels "
            f"deep, or on threads other than the {MAX_THREADS} busiest."
        )
    if isinstance(replay, str):
        notes.append(f"The critical path is not marked: {replay.rpartition('replayed: ')[2]}.")
    telemetry = _telemetry(series, entries)
    return Timeline(entries, packs, kinds.dump(), telemetry, notes, path=bool(lanes))


def _choose(
    windows: list[Window], ranks: dict[int, RankColumns], budget: int
) -> tuple[list[Window], list[str]]:
    """All windows when they fit, else the median and the slowest step of each rank.

    A first round takes each rank's median step, a second its slowest, as long as events fit; when
    not even the first round fits, ranks are taken slowest and fastest first.
    """
    size = {w: ranks[w.rank].count(w) for w in windows}
    if sum(size.values()) <= budget and len(windows) <= MAX_WINDOWS:
        return windows, []
    windows_by_length = sorted(windows, key=lambda w: w.dur_ns)
    by_rank: dict[int, list[Window]] = {}
    for window in windows_by_length:
        by_rank.setdefault(window.rank, []).append(window)
    medians = sorted((of[len(of) // 2] for of in by_rank.values()), key=lambda w: w.dur_ns)
    # Slowest, fastest, second slowest … : the spread of ranks is what one looks for.
    first = [w for pair in zip(reversed(medians), medians, strict=True) for w in pair]
    slowest = [by_rank[w.rank][-1] for w in first]
    chosen: dict[Window, None] = {}
    used = 0
    for window in (*first, *slowest, *reversed(windows_by_length)):
        if window in chosen or len(chosen) >= MAX_WINDOWS:
            continue
        if chosen and used + size[window] > budget:
            continue
        chosen[window] = None
        used += size[window]
    if len(chosen) == len(windows):
        return windows, []
    kept_ranks = len({w.rank for w in chosen})
    note = (
        f"{len(chosen)} of {fmt.plural(len(windows), 'step window')} are embedded event by "
        "event: the median step of each rank, then its slowest, then other slow steps"
    )
    if kept_ranks < len(by_rank):
        note += f"; {kept_ranks} of {len(by_rank)} ranks, slowest and fastest first"
    note += ". All figures and tables cover every step of every rank."
    return sorted(chosen, key=lambda w: (w.rank, w.step_index)), [note]


def _telemetry(series: Iterable[Series], entries: list[dict[str, Any]]) -> str:
    """Return the series near the windows, times as differences in µs from the first sample."""
    described: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    low = min((int(e["start_ns"]) for e in entries), default=0)
    high = max((int(e["start_ns"]) + e["dur_ns"] for e in entries), default=0)
    for one in series:
        first = max(int(np.searchsorted(one.time_ns, low)) - 1, 0)
        near = slice(first, int(np.searchsorted(one.time_ns, high, side="right")) + 1)
        value = np.where(np.abs(one.value[near]) < LARGEST_DRAWN, one.value[near], np.nan)
        if len(value) < 2 or not np.isfinite(value).any():
            continue
        cut = thin(replace(one, time_ns=one.time_ns[near], value=value), _POINTS_PER_SERIES)
        arrays[f"t{len(described)}"] = np.diff((cut.time_ns - cut.time_ns[0]) // 1000, prepend=0)
        arrays[f"v{len(described)}"] = cut.value.astype(np.float32)
        described.append(
            {
                "panel": cut.panel,
                "label": cut.label,
                "unit": cut.unit,
                "rank": cut.rank,
                "sampled": cut.panel in SAMPLED,
                "start_ns": str(int(cut.time_ns[0])),
            }
        )
    return pack({"series": described}, arrays)
