from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from chopper import pipeline
from chopper.analyzers.replay.replay import replay_or_reason
from chopper.reports.lanes import Timeline, build_timeline, levels_of
from chopper.reports.to_html import pack
from tests.analyzers.replay.make import late_second_launch, run
from tests.reports.make import Shape, make
from tests.reports.unpack import names_of, unpack


@given(st.lists(st.integers(min_value=-(2**53), max_value=2**53), max_size=40))
def test_packs_hold_what_was_put_in(values) -> None:
    array = np.array(values, dtype=np.int64)
    meta, arrays = unpack(pack({"a": [1]}, {"x": array, "f": array.astype(np.float32)}))
    assert meta == {"a": [1]}
    assert arrays["x"].astype(np.int64).tolist() == values
    assert arrays["f"].tolist() == array.astype(np.float32).tolist()


def _decode(lanes: Timeline, window: dict[str, Any]) -> list[dict[str, Any]]:
    meta, arrays = unpack(lanes.packs[window["id"]])
    names = names_of(lanes.names)
    rows, at = [], 0
    for row in meta["rows"]:
        part = slice(at, at + row["n"])
        start = np.cumsum(arrays["start"][part].astype(np.int64))
        kind = arrays["kind"][part]
        rows.append(
            {
                **row,
                "start": start,
                "end": start + arrays["dur"][part].astype(np.int64),
                "path": arrays["path"][part],
                "name": [names["names"][names["kinds"]["name"][k]] for k in kind],
                "first": [names["kinds"]["first"][k] for k in kind],
                "names": names["names"],
            }
        )
        at += row["n"]
    assert at == len(arrays["start"])
    return rows


def test_every_device_event_of_a_window_is_there_as_recorded() -> None:
    attribution = make(Shape(ranks=1))
    lanes = build_timeline(attribution, replay=replay_or_reason(attribution))
    assert len(lanes.windows) == 4
    assert lanes.notes == [
        "The critical path is not marked: 0 of "
        f"{attribution.joined[0].device_event.num_rows} device events have a recorded launch; "
        "record the host's runtime calls too (CPU activities)."
    ]
    events = attribution.joined[0].device_event.to_pydict()
    for window in lanes.windows:
        origin = int(window["start_ns"])
        expected = sorted(
            (s - origin, s - origin + d, n)
            for s, d, n in zip(events["start_ns"], events["dur_ns"], events["name"], strict=True)
            if s < origin + window["dur_ns"] and s + d > origin
        )
        found = sorted(
            (int(s), int(e), n)
            for row in _decode(lanes, window)
            if row["type"] == "device"
            for s, e, n in zip(row["start"], row["end"], row["name"], strict=True)
        )
        assert found == expected


def test_rows_do_not_overlap_and_are_sorted() -> None:
    lanes = build_timeline(make(Shape(hostile=True)))
    for window in lanes.windows:
        for row in _decode(lanes, window):
            assert (row["start"][1:] >= row["end"][:-1]).all(), row["group"]


def test_the_state_lane_tiles_the_window() -> None:
    attribution = make(Shape())
    lanes = build_timeline(attribution)
    for window in lanes.windows:
        (state,) = [r for r in _decode(lanes, window) if r["type"] == "state"]
        assert state["start"][0] == 0
        assert state["end"][-1] == window["dur_ns"]
        assert (state["start"][1:] == state["end"][:-1]).all()


def test_the_state_lane_agrees_with_the_pieces() -> None:
    attribution = make(Shape(ranks=1))
    lanes = build_timeline(attribution)
    spent: dict[str, int] = {}
    for window in lanes.windows:
        for row in _decode(lanes, window):
            if row["type"] == "state":
                for first, a, b in zip(row["first"], row["start"], row["end"], strict=True):
                    cause = row["names"][first]
                    spent[cause] = spent.get(cause, 0) + int(b - a)
    expected: dict[str, int] = {}
    for cause, time_ns in zip(
        attribution.pieces["cause"].to_pylist(),
        attribution.pieces["time_ns"].to_pylist(),
        strict=True,
    ):
        shown = cause if cause.startswith("idle") else cause.partition(".")[0]
        expected[shown] = expected.get(shown, 0) + time_ns
    assert spent == {k: v for k, v in expected.items() if v}


def test_the_critical_path_is_a_lane_and_marks_what_lies_on_it() -> None:
    # The device is done long before the second launch: the path goes over the host.
    attribution = pipeline.attribute(run(late_second_launch()))
    lanes = build_timeline(attribution, replay=replay_or_reason(attribution))
    assert lanes.path
    (window,) = lanes.windows
    rows = _decode(lanes, window)
    (path,) = [r for r in rows if r["type"] == "path"]
    assert path["start"][0] == 0
    assert path["end"][-1] == window["dur_ns"] == 520
    assert (path["start"][1:] == path["end"][:-1]).all()
    assert path["names"][path["first"][1]] == "idle.preparation.python"
    (stream,) = [r for r in rows if r["type"] == "device"]
    assert stream["path"].tolist() == [0, 1]
    host = [r for r in rows if r["type"] == "host"]
    assert [r["path"].tolist() for r in host] == [[1], [1, 0]]


def test_too_many_events_leave_the_median_and_the_slowest_step_of_each_rank() -> None:
    attribution = make(Shape(ranks=2, steps=6, layers=2))
    per_window = attribution.joined[0].device_event.num_rows // 6
    lanes = build_timeline(attribution, device_budget=int(per_window * 4.6))
    assert 4 <= len(lanes.windows) < 12
    windows = attribution.windows.to_pydict()
    for rank in (0, 1):
        times = {
            i: e - s
            for r, i, s, e in zip(
                windows["rank"],
                windows["step_index"],
                windows["start_ns"],
                windows["end_ns"],
                strict=True,
            )
            if r == rank
        }
        ordered = sorted(times, key=times.__getitem__)
        kept = {w["index"] for w in lanes.windows if w["rank"] == rank}
        assert {ordered[len(ordered) // 2], ordered[-1]} <= kept
    assert "of 12 step windows are embedded" in lanes.notes[0]


def test_the_shortest_host_spans_go_first_and_it_is_said() -> None:
    attribution = make(Shape(ranks=1, steps=2, layers=40))
    total = attribution.joined[0].host_span.num_rows
    lanes = build_timeline(attribution, host_budget=1100)
    kept = [r for w in lanes.windows for r in _decode(lanes, w) if r["type"] == "host"]
    shortest = min(int((r["end"] - r["start"]).min()) for r in kept if r["n"])
    dropped = sum(w["host_dropped"] for w in lanes.windows)
    assert 0 < dropped < total
    durations = np.sort(attribution.joined[0].host_span["dur_ns"].to_numpy())
    assert shortest >= durations[dropped // 4]
    assert "left out" in lanes.notes[0]


def test_a_run_without_events_has_no_windows() -> None:
    attribution = make(Shape(ranks=1, steps=1))
    attribution = replace(attribution, windows=attribution.windows.slice(0, 0))
    assert build_timeline(attribution).windows == []


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), min_size=1, max_size=30).map(
    lambda rows: sorted(rows, key=lambda r: (r[0], -r[1]))
)


@given(spans)
@settings(max_examples=300)
def test_levels_never_overlap_whatever_crosses(rows) -> None:
    start = np.array([r[0] for r in rows])
    end = start + np.array([r[1] for r in rows])
    level = levels_of(start, end)
    for depth in set(level.tolist()):
        at = level == depth
        assert (start[at][1:] >= end[at][:-1]).all()
