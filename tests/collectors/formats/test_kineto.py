"""The reader of Kineto traces: every dialect to the nanosecond, joins, merged ranks, devices."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chopper import pipeline, reports
from chopper.collectors.formats.kineto import ParsedTrace, read_trace
from chopper.errors import InputError
from chopper.tables import TABLES
from tests.kineto_writer import (
    BASE_NS,
    DIALECTS,
    EPOCH_FRACTION,
    EPOCH_WHOLE,
    NANOSECONDS,
    TODAY,
    Dialect,
    Number,
    Trace,
    encode,
    merged,
    small_trace,
)


def parse(data: bytes) -> list[ParsedTrace]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_bytes(data)
        return read_trace(path)


def parse_one(data: bytes) -> ParsedTrace:
    (trace,) = parse(data)
    return trace


def starts(trace: ParsedTrace, table: str = "device_event") -> list[int]:
    return [int(t) - BASE_NS for t in trace.tables[table]["start_ns"].to_numpy()]


def codes(trace: ParsedTrace) -> set[str]:
    return {f.code for f in trace.findings}


def in_order(trace: ParsedTrace) -> bool:
    """Sorted by start, then longest first, and of the declared schema."""
    for name in ("host_span", "device_event"):
        table = trace.tables[name]
        assert TABLES[name].validate(table).schema.equals(TABLES[name].arrow)
        keys = list(
            zip(table["start_ns"].to_pylist(), (-table["dur_ns"].to_numpy()).tolist(), strict=True)
        )
        if keys != sorted(keys):
            return False
    return True


# ---------------------------------------------------------------- dialects


@pytest.mark.parametrize("platform", ["cuda", "rocm", "cpu"])
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)
def test_every_dialect_gives_the_same_tables(dialect: Dialect, platform: Any) -> None:
    trace = parse_one(small_trace(dialect, platform=platform, rank=1, world=2).encode())
    assert in_order(trace)
    # Steps 10 and 11, 10 µs each; 2 operators each, and 3 calls each where there is a device.
    step = trace.tables["step"].to_pylist()
    assert [s["number"] for s in step] == [10, 11]
    assert [s["start_ns"] - BASE_NS for s in step] == [0, 10_000]
    assert [s["end_ns"] - BASE_NS for s in step] == [10_000, 20_000]
    host = trace.tables["host_span"]
    if platform == "cpu":
        assert host.num_rows == 2 + 2 * 2
        assert starts(trace) == []
        return
    assert host.num_rows == 2 + 2 * 5
    device = trace.tables["device_event"].to_pylist()
    assert starts(trace) == [1_000, 3_000, 6_000, 11_000, 13_000, 16_000]
    assert [d["dur_ns"] for d in device] == [1_000, 2_000, 3_000] * 2
    assert [d["kind"] for d in device] == ["memcpy", "kernel", "kernel"] * 2
    assert {d["stream_id"] for d in device} == {7}
    assert {d["device_id"] for d in device} == {0}
    # Correlation ids join to the calls, external ids to the operators.
    calls = {h["correlation_id"]: h for h in host.to_pylist() if h["correlation_id"] is not None}
    launched = [calls[d["correlation_id"]]["start_ns"] - BASE_NS for d in device]
    unit = 1_000 if dialect.digits == "whole" else 1
    assert launched == [t // unit * unit for t in (500, 2_000, 5_500, 10_500, 12_000, 15_500)]
    ops = {h["external_id"]: h["name"] for h in host.to_pylist() if h["category"] == "cpu_op"}
    assert [ops.get(d["external_id"]) for d in device if d["kind"] == "kernel"] == [
        "aten::mm",
        "aten::add",
    ] * 2
    assert trace.rank == (None if dialect.top == "list" else 1)
    assert trace.world_size == (None if dialect.top == "list" else 2)
    assert trace.host_pid == 4711
    assert [d.name for d in trace.devices] == (
        [] if dialect.properties is None else ["NVIDIA A100-SXM4-40GB"]
    )


def test_arguments_become_columns() -> None:
    trace = small_trace()
    trace.launch(
        "gemm2",
        21_000,
        100,
        kernel_at=22_000,
        kernel_for=10,
        args={"graph id": 3, "graph node id": 9},
    )
    found = parse_one(trace.encode())
    last = found.tables["device_event"].to_pylist()[-1]
    assert json.loads(last["grid"]) == [8, 1, 1]
    assert json.loads(last["block"]) == [128, 1, 1]
    assert last["occupancy_ratio"] == 0.25
    assert last["registers_count"] == 32
    assert last["shared_memory_bytes"] == 1024
    assert (last["graph_id"], last["graph_node_id"]) == (3, 9)
    copy = found.tables["device_event"].to_pylist()[0]
    assert (copy["bytes_count"], copy["grid"], copy["occupancy_ratio"]) == (4096, None, None)
    mm = next(h for h in found.tables["host_span"].to_pylist() if h["name"] == "aten::mm")
    assert json.loads(mm["input_dims"]) == [[64, 32], [32, 16]]
    assert json.loads(mm["input_types"]) == ["float", "float"]
    assert mm["sequence_id"] == 0


def test_names_of_threads_memory_and_counters() -> None:
    trace = small_trace(device=1)
    trace.memory(1_234, 512, 1_024, 4_096)
    trace.counter("clock", 2_345, sclk=1_410.5, idle=3)
    found = parse_one(trace.encode())
    assert found.tables["thread"].to_pylist() == [
        {
            "pid": 4711,
            "tid": 4711,
            "process_name": "python",
            "thread_name": "thread 4711 (python)",
        }
    ]
    (memory,) = found.tables["memory_event"].to_pylist()
    assert memory["time_ns"] - BASE_NS == 1_234
    assert (memory["bytes_count"], memory["allocated_bytes"], memory["reserved_bytes"]) == (
        512,
        1_024,
        4_096,
    )
    assert [
        (c["time_ns"] - BASE_NS, c["track"], c["name"], c["value"])
        for c in found.tables["counter"].to_pylist()
    ] == [(2_345, "1", "clock.sclk", 1_410.5), (2_345, "1", "clock.idle", 3.0)]


def test_what_was_waited_for() -> None:
    trace = small_trace()
    trace.synchronization("Event Sync", 3_000, 40, -1, correlation=7, wait_on_stream=-1)
    trace.synchronization(
        "Stream Wait Event",
        2_000,
        5,
        24,
        correlation=6,
        wait_on_stream=20,
        wait_on_cuda_event_record_corr_id=5,
    )
    found = parse_one(trace.encode()).tables["synchronization"].to_pylist()
    assert [(r["name"], r["start_ns"] - BASE_NS, r["dur_ns"]) for r in found] == [
        ("Stream Wait Event", 2_000, 5),
        ("Event Sync", 3_000, 40),
    ]
    assert [
        (r["stream_id"], r["correlation_id"], r["event_stream_id"], r["event_correlation_id"])
        for r in found
    ] == [(24, 6, 20, 5), (None, 7, None, None)]


def test_collective_metadata_points_at_its_row_after_sorting() -> None:
    meta = {
        "Collective name": "allreduce",
        "In msg nelems": 1024,
        "Out msg nelems": 1024,
        "Group size": 2,
        "dtype": "Float",
        "Process Group Name": "0",
        "Process Group Ranks": [0, 1],
        "Seq": 5,
    }
    trace = Trace()
    trace.launch("ncclDevKernel_AllReduce", 3_000, 10, kernel_at=9_000, kernel_for=500, args=meta)
    trace.launch("gemm", 1_000, 10, kernel_at=2_000, kernel_for=500)
    trace.op("record_param_comms", 2_900, 50, collective=meta)
    found = parse_one(trace.encode())
    rows = found.tables["collective"].to_pylist()
    assert [(r["source"], r["collective"], r["sequence_id"]) for r in rows] == [
        ("device_event", "allreduce", 5),
        ("host_span", "allreduce", 5),
    ]
    assert found.tables["device_event"]["name"].to_pylist()[rows[0]["row"]].startswith("nccl")
    assert found.tables["host_span"]["name"].to_pylist()[rows[1]["row"]] == "record_param_comms"
    assert (rows[0]["in_elements_count"], rows[0]["group_size_count"]) == (1024, 2)
    assert rows[0]["dtype"] == "Float"


# ---------------------------------------------------------------- exact times

relative_ns = st.integers(min_value=0, max_value=8_000_000_000_000_000)  # three months
duration_ns = st.integers(min_value=0, max_value=10**13)
layouts = st.sampled_from(["kineto", "compact", "indent1", "indent2"])


def _with_times(times: list[tuple[int, int]], dialect: Dialect, base_ns: int) -> Trace:
    trace = Trace(dialect=dialect, base_ns=base_ns)
    for at, dur in times:
        trace.op("op", at, dur)
    return trace


def _near(first: int, others: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(first + at, dur) for at, dur in others]


near_times = st.lists(
    st.tuples(st.integers(0, 3_600_000_000_000), duration_ns), min_size=1, max_size=6
)


@given(first=relative_ns, times=near_times, layout=layouts)
@settings(max_examples=60)
def test_any_nanosecond_survives_with_a_base(
    first: int, times: list[tuple[int, int]], layout: Any
) -> None:
    dialect = Dialect("x", layout=layout, categories=TODAY.categories)
    expected = sorted(_near(first, times), key=lambda t: (t[0], -t[1]))
    found = parse_one(_with_times(_near(first, times), dialect, BASE_NS).encode())
    assert starts(found, "host_span") == [t[0] for t in expected]
    assert found.tables["host_span"]["dur_ns"].to_pylist() == [t[1] for t in expected]


@given(
    base=st.integers(1_300_000_000_000_000_000, 3_000_000_000_000_000_000),
    times=near_times,
    layout=layouts,
    digits=st.sampled_from(["fraction", "nanoseconds", "string"]),
)
@settings(max_examples=60)
def test_any_nanosecond_survives_without_a_base(
    base: int, times: list[tuple[int, int]], layout: Any, digits: Any
) -> None:
    """Absolute microseconds with decimals have 19 digits; float64 holds 16."""
    dialect = Dialect(
        "x", clock="absolute", digits=digits, layout=layout, categories=TODAY.categories
    )
    expected = sorted(times, key=lambda t: (t[0], -t[1]))
    found = parse_one(_with_times(times, dialect, base).encode())
    assert (found.tables["host_span"]["start_ns"].to_numpy() - base).tolist() == [
        t[0] for t in expected
    ]
    assert found.tables["host_span"]["dur_ns"].to_pylist() == [t[1] for t in expected]


@given(times=st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9), st.booleans())))
@settings(max_examples=40)
def test_nanoseconds_and_microseconds_mixed_event_by_event(
    times: list[tuple[int, int, bool]],
) -> None:
    in_us, in_ns = Trace(dialect=EPOCH_FRACTION), Trace(dialect=NANOSECONDS)
    # The same event twice would be a duplicate, and counted once.
    in_ns.next_external = 1000
    in_us.op("first", 0, 1)
    for at, dur, ns in times:
        (in_ns if ns else in_us).op("op", at, dur)
    events = in_us.document()["traceEvents"] + in_ns.document()["traceEvents"]
    found = parse_one(encode({"traceEvents": events}))
    expected = sorted([(0, 1), *((a, d) for a, d, _ in times)], key=lambda t: (t[0], -t[1]))
    assert starts(found, "host_span") == [t[0] for t in expected]
    assert found.tables["host_span"]["dur_ns"].to_pylist() == [t[1] for t in expected]
    counted = sum(f.count or 0 for f in found.findings if f.code == "event.nanosecond_unit")
    assert counted == sum(ns for *_, ns in times)


@pytest.mark.parametrize("damage", [b"", b',{"ph": "X", "ts": NaN}'], ids=["strict", "damaged"])
def test_times_of_a_damaged_file_are_as_exact(damage: bytes) -> None:
    trace = Trace(dialect=Dialect("x", "absolute", "fraction", "compact", "list", TODAY.categories))
    trace.op("a", 123_456_789, 1_234_567)
    trace.counter("clock", 7, mhz=1)
    found = parse_one(trace.encode()[:-1] + damage + b"]")
    assert starts(found, "host_span") == [123_456_789]
    assert found.tables["host_span"]["dur_ns"].to_pylist() == [1_234_567]
    assert found.tables["counter"]["time_ns"].to_pylist() == [BASE_NS + 7]


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1", 1_000),
        ("1.5", 1_500),
        ("1.0006", 1_001),
        ("1e3", 1_000_000),
        ("-0.25", -250),
        ("1751410836000000.001", 1_751_410_836_000_000_001),
        ("1751410836000000001", 1_751_410_836_000_000_001),
        ("1.751410836e15", 1_751_410_836_000_000_000),
    ],
)
def test_spelling_of_a_time(text: str, ns: int) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "op", "pid": 1, "tid": 1, "ts": Number(text)}
    found = parse_one(encode({"traceEvents": [event | {"dur": 1}]}))
    assert found.tables["host_span"]["start_ns"].to_pylist() == [ns]


# ---------------------------------------------------------------- layout and order


def test_members_after_the_events_do_not_confuse_the_layout() -> None:
    trace = small_trace()
    text = trace.encode().decode()
    tail = '"metadata": {\n    "list": [1, 2]\n  },\n  "more": [\n  {\n  },\n  {\n  }]\n}'
    found = parse_one((text.rstrip()[:-1] + ",\n  " + tail).encode())
    assert starts(found) == starts(parse_one(trace.encode()))
    assert codes(found) == set()


def test_order_in_the_file_does_not_matter() -> None:
    trace = small_trace()
    expected = parse_one(trace.encode())
    random.Random(1).shuffle(trace.events)
    shuffled = parse_one(trace.encode())
    assert in_order(shuffled)
    for name in ("host_span", "device_event", "step"):
        assert shuffled.tables[name].to_pylist() == expected.tables[name].to_pylist()


def test_repeated_events_count_once() -> None:
    trace = small_trace()
    trace.events += list(trace.events)
    found = parse_one(trace.encode())
    once = parse_one(small_trace().encode())
    # Annotations carry no id: two equal ones may well be two.
    (finding,) = [f for f in found.findings if f.code == "event.duplicate"]
    assert finding.count == 6 + 4 + 6  # device events, operators, calls
    assert found.tables["device_event"].to_pylist() == once.tables["device_event"].to_pylist()
    assert found.tables["step"].to_pylist() == once.tables["step"].to_pylist()


def test_equal_kernels_of_different_launches_are_two() -> None:
    trace = Trace()
    trace.launch("k", 0, 1, kernel_at=10, kernel_for=5)
    trace.launch("k", 0, 1, kernel_at=10, kernel_for=5)
    assert parse_one(trace.encode()).tables["device_event"].num_rows == 2


# ---------------------------------------------------------------- odd events


def test_odd_events_are_repaired_and_counted() -> None:
    trace = small_trace()
    base = {"ph": "X", "cat": "cpu_op", "pid": 4711, "tid": 4711, "args": {}}
    odd = [
        base | {"name": "no ts", "dur": Number("1")},
        base | {"ts": Number("1.000"), "dur": Number("1")},
        base | {"name": "no dur", "ts": Number("1.000")},
        base | {"name": "negative", "ts": Number("2.000"), "dur": Number("-3.5")},
        base | {"name": "unsigned", "ts": Number("3.000"), "dur": Number("18446744073709551.615")},
        base | {"name": "year", "ts": Number("4.000"), "dur": Number("31536000000000")},
        base | {"name": "no args", "ts": Number("5.000"), "dur": Number("1")},
        base | {"name": "huge", "ts": Number("9e300"), "dur": Number("1")},
    ]
    del odd[6]["args"]
    document = trace.document()
    document["traceEvents"] += odd
    found = parse_one(encode(document))
    counts = {f.code: f.count for f in found.findings}
    assert counts == {
        "event.without_ts": 2,
        "event.without_name": 1,
        "event.without_dur": 1,
        "event.negative_duration": 1,
        "event.overflowing_duration": 2,
    }
    by_name = {h["name"]: h for h in found.tables["host_span"].to_pylist()}
    for name in ("no dur", "negative", "unsigned", "year"):
        assert by_name[name]["dur_ns"] == 0
    assert by_name["no args"]["dur_ns"] == 1_000


def test_ids_may_be_text() -> None:
    document = small_trace().document()
    for event in document["traceEvents"]:
        event["args"] = {k: str(v) if isinstance(v, int) else v for k, v in event["args"].items()}
        event["pid"] = str(event["pid"])
    found = parse_one(encode(document))
    plain = parse_one(small_trace().encode())
    for name in ("host_span", "device_event"):
        assert found.tables[name].to_pylist() == plain.tables[name].to_pylist()


def test_an_event_far_from_the_rest_is_dropped() -> None:
    trace = small_trace(dialect=EPOCH_WHOLE)
    document = trace.document()
    document["traceEvents"].append(
        {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 0, "dur": 1, "args": {}}
    )
    found = parse_one(encode(document))
    assert starts(found) == [1_000, 3_000, 6_000, 11_000, 13_000, 16_000]
    assert {f.code: f.count for f in found.findings} == {"event.far_in_time": 1}


def test_half_a_surrogate_in_a_name_is_replaced() -> None:
    document = small_trace().document()
    text = encode(document).decode().replace("aten::mm", r"aten\ud800mm")
    found = parse_one(text.encode())
    assert "aten?mm" in found.tables["host_span"]["name"].to_pylist()


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("distributedInfo", [1, 2]),
        ("distributedInfo", "rank 0"),
        ("distributedInfo", {"rank": -3, "world_size": "many", "pg_config": {"a": 1}}),
        ("distributedInfo", {"rank": 1 << 70, "world_size": 1.5e300}),
        ("deviceProperties", {"0": {"name": "x"}}),
        ("deviceProperties", [1, {"id": 1 << 70, "name": 5, "totalGlobalMem": 1e300}]),
        ("baseTimeNanoseconds", "soon"),
        ("baseTimeNanoseconds", -5),
        ("baseTimeNanoseconds", 1 << 80),
        ("schemaVersion", {"a": []}),
        ("host_name", ["a"]),
    ],
)
def test_header_members_of_the_wrong_type(member: str, value: Any) -> None:
    trace = small_trace(dialect=EPOCH_FRACTION)
    trace.header[member] = value
    found = parse_one(trace.encode())
    assert starts(found) == [1_000, 3_000, 6_000, 11_000, 13_000, 16_000]
    assert found.rank is None
    assert codes(found) == ({"trace.base_time"} if member == "baseTimeNanoseconds" else set())


def test_rank_as_text_is_a_rank() -> None:
    trace = small_trace(header={"distributedInfo": {"rank": "3", "world_size": "8"}})
    found = parse_one(trace.encode())
    assert (found.rank, found.world_size) == (3, 8)


def test_other_formats_of_chrome_traces_say_what_they_hold() -> None:
    event = {"ph": "X", "cat": "blink", "name": "x", "pid": 1, "tid": 1, "ts": 1, "dur": 1}
    with pytest.raises(InputError, match=r"categories that Kineto does not write: blink \(1\)"):
        parse(encode({"traceEvents": [event]}))


# ---------------------------------------------------------------- several ranks in one file


def _rank_documents(count: int, **how: Any) -> list[dict[str, Any]]:
    """Ranks whose ids all collide; rank r is 100·r ns late and its kernels 10·r ns longer."""
    documents = []
    for r in range(count):
        trace = Trace(pid=1000 + r, tid=1000 + r, **({"device": r} | how))
        trace.step(1, 100 * r, 90_000)
        for i in range(20):
            at = 100 * r + 1_000 * i
            trace.launch(f"k{i}", at + 100, 50, kernel_at=at + 400, kernel_for=300 + 10 * r)
        documents.append(trace.document())
    return documents


@pytest.mark.parametrize("interleave", [False, True], ids=["appended", "sorted"])
@pytest.mark.parametrize("devices", ["distinct", "all 0"])
@pytest.mark.parametrize("count", [2, 4])
def test_merged_ranks_come_apart(count: int, devices: str, interleave: bool) -> None:
    how = {} if devices == "distinct" else {"device": 0}
    data = encode(merged(*_rank_documents(count, **how), interleave=interleave))
    found = parse(data)
    assert [t.host_pid for t in found] == [1000 + r for r in range(count)]
    for r, trace in enumerate(found):
        events = trace.tables["device_event"]
        assert set(events["dur_ns"].to_pylist()) == {300 + 10 * r}
        assert starts(trace) == [100 * r + 1_000 * i + 400 for i in range(20)]
        assert set(trace.tables["host_span"]["pid"].to_pylist()) == {1000 + r}
        assert trace.tables["step"].num_rows == 1
        assert trace.rank is None
        assert trace.main
    doubt = [f for t in found for f in t.findings if f.code == "trace.ranks_ambiguous"]
    # Equal ids, sorted by time: it came out right, but nobody can be sure.
    assert bool(doubt) == interleave


@pytest.mark.parametrize(
    "rename", ["rank{r}_{pid}", "[{r}] {pid}", "rank {r}: {pid}"], ids=["word", "bracket", "colon"]
)
def test_merge_tools_that_rewrite_pids(rename: str) -> None:
    documents = _rank_documents(4, device=0)
    for r, document in enumerate(documents):
        for event in document["traceEvents"]:
            event["pid"] = rename.format(r=r, pid=event["pid"])
    found = parse(encode(merged(*documents, interleave=True)))
    assert len(found) == 4
    for r, trace in enumerate(found):
        assert set(trace.tables["device_event"]["dur_ns"].to_pylist()) == {300 + 10 * r}
        assert trace.process == rename.format(r=r, pid=1000 + r)
        assert trace.rank == (r if "rank" in rename else None)
    assert codes(found[0]) == set()


def test_merge_tools_that_add_to_pids() -> None:
    documents = _rank_documents(4, device=0)
    for r, document in enumerate(documents):
        for event in document["traceEvents"]:
            event["pid"] += r * 100_000_000
    found = parse(encode(merged(*documents, interleave=True)))
    assert [set(t.tables["device_event"]["dur_ns"].to_pylist()) for t in found] == [
        {300},
        {310},
        {320},
        {330},
    ]


def test_merged_ranks_without_a_device_are_told_by_their_steps() -> None:
    first = small_trace(platform="cpu", pid=10, tid=10).document()
    second = small_trace(platform="cpu", pid=20, tid=20).document()
    helper = {"ph": "X", "cat": "cpu_op", "name": "worker", "pid": 30, "tid": 30}
    second["traceEvents"].append(helper | {"ts": Number("1.000"), "dur": Number("1.000")})
    found = parse(encode(merged(first, second)))
    assert [t.host_pid for t in found] == [10, 20]
    assert [t.tables["host_span"].num_rows for t in found] == [6 + 1, 6]
    assert [t.tables["step"].num_rows for t in found] == [2, 2]


def test_a_helper_process_is_no_rank() -> None:
    trace = small_trace()
    document = trace.document()
    other = Trace(pid=99, tid=99)
    other.op("aten::stack", 100, 50)
    found = parse(encode(merged(document, other.document())))
    assert [t.host_pid for t in found] == [4711]
    assert found[0].tables["host_span"].num_rows == 13


def test_a_process_whose_kernels_are_not_there_takes_none() -> None:
    first = _rank_documents(2)[0]
    second = _rank_documents(2, device=0)[1]
    second["traceEvents"] = [e for e in second["traceEvents"] if e["cat"] != "kernel"]
    for interleave in (False, True):
        (found,) = parse(encode(merged(first, second, interleave=interleave)))
        assert found.tables["device_event"].num_rows == 20


# ---------------------------------------------------------------- several devices in one process


def _two_devices(second_ns: int, kind: Any = "kernel") -> ParsedTrace | list[ParsedTrace]:
    trace = Trace()
    for i in range(10):
        trace.launch("k", 1_000 * i, 50, kernel_at=1_000 * i + 100, kernel_for=500)
        trace.launch(
            "k", 1_000 * i + 60, 9, kernel_at=1_000 * i + 200, kernel_for=second_ns, kind=kind,
            device=1,
        )  # fmt: skip
    return parse(trace.encode())


def test_each_device_of_a_process_is_a_timeline() -> None:
    found = _two_devices(400)
    assert isinstance(found, list)
    assert [(t.device_id, t.main) for t in found] == [(0, True), (1, False)]
    for trace in found:
        assert set(trace.tables["device_event"]["device_id"].to_pylist()) == {trace.device_id}
        assert trace.tables["device_event"].num_rows == 10
        assert trace.tables["host_span"].num_rows == 20
    assert codes(found[0]) == {"trace.several_devices"}


@pytest.mark.parametrize(("second_ns", "kind"), [(4, "kernel"), (400, "memcpy")])
def test_a_device_that_was_only_touched_is_left_out_and_said(second_ns: int, kind: str) -> None:
    found = _two_devices(second_ns, kind)
    assert isinstance(found, list)
    assert len(found) == 1
    assert set(found[0].tables["device_event"]["device_id"].to_pylist()) == {0}
    (finding,) = found[0].findings
    assert (finding.code, finding.count) == ("device.stray_events", 10)


@pytest.mark.parametrize("device", [-1, None, 1 << 32, (1 << 32) - 1, 1e300, True])
def test_events_of_an_unknown_device_are_device_work(device: Any, tmp_path: Path) -> None:
    """A device id of -1 is no mark of the host: the causes are those of any other device."""
    known, unknown = small_trace(), small_trace()
    for event in unknown.events:
        if event.get("cat") in ("kernel", "gpu_memcpy"):
            event["pid"] = event["args"]["device"] = device
    results = []
    for name, trace in (("known", known), ("unknown", unknown)):
        path = tmp_path / f"{name}.json"
        path.write_bytes(trace.encode())
        results.append(pipeline.attribute(path))
        assert reports.document(pipeline.attribute(results[-1].recording)) == reports.document(
            results[-1]
        )
    totals = [{c.id: c.time_ns for c in found.leaves() if c.time_ns} for found in results]
    computing = [sum(ns for c, ns in t.items() if c.startswith("compute")) for t in totals]
    assert results[0].observed_ns == results[1].observed_ns == sum(totals[1].values())
    assert computing == [10_000, 10_000]
    (finding,) = [f for f in results[1].findings if f.code == "device.unknown"]
    assert finding.count == 6
    assert results[1].joined[0].device_event["kind"].to_pylist() == [
        *("memcpy", "kernel", "kernel") * 2
    ]


# ---------------------------------------------------------------- microseconds, the writer itself
