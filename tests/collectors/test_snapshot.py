"""Snapshots of the allocator: what they say, and that nothing in them can act."""

from __future__ import annotations

import gzip
import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from chopper import pipeline
from chopper.analyzers.views.memory import memory_over_time
from chopper.analyzers.views.snapshots import memory_holders
from chopper.cli import cli
from chopper.collectors import allocator_history
from chopper.collectors.allocator_history import AllocatorHistoryCollector
from chopper.collectors.base import CollectorContext
from chopper.collectors.snapshot import load, read_snapshot, tables_of
from chopper.errors import InputError
from chopper.views import view
from tests.kineto_writer import BASE_NS, Trace

MS = 1_000_000
FRAMES = [
    {"name": "malloc", "filename": "??", "line": 0},
    {"name": "step", "filename": "train.py", "line": 7},
]


def snapshot() -> dict[str, Any]:
    """A segment of 4 MiB: a tensor of 1 MiB, one of 2 MiB, a gap of 1 MiB. The history: the first
    is allocated before a segment comes, a third of 512 KiB comes and goes."""
    mib = 1 << 20
    events = [
        ("alloc", 0x1000, mib, 1),
        ("segment_alloc", 0x9000, 2 * mib, 5),
        ("alloc", 0x2000, mib // 2, 25),
        ("free_requested", 0x2000, mib // 2, 30),
        ("free_completed", 0x2000, mib // 2, 31),
        ("alloc", 0x3000, 2 * mib, 45),
    ]
    return {
        "segments": [
            {
                "device": 0, "address": 0x1000, "total_size": 4 * mib, "allocated_size": 3 * mib,
                "active_size": 3 * mib, "requested_size": 3 * mib - 24, "stream": 0,
                "segment_type": "large", "is_expandable": False, "segment_pool_id": (0, 0),
                "blocks": [
                    {"address": 0x1000, "size": mib, "requested_size": mib - 24,
                     "state": "active_allocated", "frames": FRAMES},
                    {"address": 0x2000, "size": mib, "requested_size": 0, "state": "inactive",
                     "frames": []},
                    {"address": 0x3000, "size": 2 * mib, "requested_size": 2 * mib,
                     "state": "active_allocated", "frames": []},
                ],
            }
        ],
        "device_traces": [
            [
                {"action": a, "addr": address, "size": size, "stream": 0,
                 "time_us": BASE_NS // 1000 + at_ms * 1000, "frames": FRAMES}
                for a, address, size, at_ms in events
            ]
        ],
        "allocator_settings": {"expandable_segments": False, "threshold": 0.5},
        "external_annotations": [],
    }  # fmt: skip


def write(path: Path, value: Any, protocol: int = 4) -> Path:
    data = pickle.dumps(value, protocol=protocol)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", ["s.pickle", "s.pickle.gz"])
def test_every_protocol_says_the_same(protocol: int, name: str, tmp_path: Path) -> None:
    tables = read_snapshot(write(tmp_path / name, snapshot(), protocol))
    assert {n: t.num_rows for n, t in tables.items()} == {
        "allocator_segment": 1,
        "allocator_block": 3,
        "allocator_event": 6,
    }
    assert set(tables["allocator_event"]["frames"].to_pylist()) == {"train.py:7: step"}


def test_totals_are_counted_backwards_from_what_is_held() -> None:
    events = tables_of(snapshot(), "here")["allocator_event"].to_pylist()
    mib = 1 << 20
    # 1 MiB was held before the first event's allocation of 1 MiB is taken back: none.
    assert [e["allocated_bytes"] for e in events] == [
        mib, mib, mib + mib // 2, mib, mib, 3 * mib,
    ]  # fmt: skip
    assert [e["reserved_bytes"] for e in events] == [2 * mib, *[4 * mib] * 5]


PLAIN = [
    None, True, False, 0, 255, 256, 65_535, 65_536, -1, 2**31, -(2**31), 2**63, -(2**70), 1.5,
    "", "a", "ä" * 300, "x" * 70_000, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], [1], [[2]],
    {}, {"a": 1}, {1: [2, (3, {"b": None})]}, [{"same": "text"}] * 5, list(range(2_000)),
]  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_come_back_as_pickle_gives_them(protocol: int) -> None:
    data = pickle.dumps(PLAIN, protocol=protocol)
    assert load(data, "here") == PLAIN == pickle.loads(data)


def test_a_name_that_is_no_utf8_is_mended() -> None:
    made = snapshot()
    made["segments"][0]["segment_type"] = "lar\udcffge"
    tables = tables_of(load(pickle.dumps(made), "here"), "here")
    assert tables["allocator_segment"]["kind"].to_pylist() == ["lar?ge"]


class _Runs:
    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self.made = call, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.made


HOSTILE: dict[str, tuple[bytes, str]] = {
    "a call": (
        pickle.dumps(_Runs(os.mkdir, "made"), protocol=4),
        r"asks for code \(posix\.mkdir\)",
    ),
    "a call, protocol 2": (pickle.dumps(_Runs(os.mkdir, "made"), protocol=2), "asks for code"),
    "a call within": (
        pickle.dumps({"segments": [_Runs(os.mkdir, "made")], "device_traces": []}),
        "asks for code",
    ),
    "an instance": (b"\x80\x02(iposix\nmkdir\n.", "asks for code"),
    "an extension": (b"\x80\x02\x82\x01.", "asks for code"),
    "a persistent id": (b"\x80\x02K\x01Q.", "asks for code"),
    "a set": (pickle.dumps({1}, protocol=4), "plain values only"),
    "bytes": (pickle.dumps(b"x", protocol=4), "found bytes"),
    "a text of 2^62": (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.", "ends in the middle"),
    "a memo of 2^32": (b"\x80\x04]r\xff\xff\xff\xff.", "no snapshot"),
    "a memo of nothing": (b"\x80\x04h\x07.", "damaged pickle"),
    "a number of 200 bytes": (b"\x80\x04\x8a\xc8" + b"\x01" * 200 + b".", "found int"),
    "a deep key": (b"\x80\x04}" + b")" + b"\x85" * 500_000 + b"K\x01s.", "damaged pickle"),
    "deep lists": (b"\x80\x04" + b"]" * 300_000 + b"a" * 299_999 + b".", "no snapshot"),
    "items of nothing": (b"\x80\x04u.", "ends in the middle"),
    "items of a number": (b"\x80\x04K\x01(K\x02e.", "damaged pickle"),
    "an odd number of items": (b"\x80\x04}(K\x01u.", "damaged pickle"),
    "nothing to give": (b"\x80\x04.", "ends in the middle"),
    "no end": (b"\x80\x04]", "ends in the middle"),
    "another pickle": (pickle.dumps({"weights": [1.0]}), "found weights"),
    "a list": (pickle.dumps([1]), "found list"),
}


@pytest.mark.parametrize("case", list(HOSTILE))
def test_what_is_no_snapshot_is_refused_and_does_nothing(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data, expected = HOSTILE[case]
    path = tmp_path / "s.pickle"
    path.write_bytes(data)
    with pytest.raises(InputError, match=expected) as caught:
        pipeline.read(path)
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["s.pickle"]


def test_lists_that_refer_to_each_other_do_not_grow_without_end() -> None:
    block = {"size": 1, "state": "inactive"}
    segment = {"blocks": [block] * 3_000, "address": 1}
    with pytest.raises(InputError, match="9000000 blocks; expected at most 5000000"):
        tables_of({"segments": [segment] * 3_000}, "here")
    itself: dict[str, Any] = {"segments": []}
    itself["segments"].append(itself)
    assert tables_of(itself, "here")["allocator_segment"].num_rows == 1


def test_values_of_other_kinds_are_unknown() -> None:
    made = snapshot()
    made["segments"][0] |= {"device": "gpu", "total_size": None, "stream": 2**80}
    made["device_traces"][0][0] |= {"time_us": "now", "size": True, "frames": "main"}
    made["device_traces"].append("none")
    made["segments"].append(
        {
            "device": 3,
            "address": 2**63 - 9,
            "allocated_size": 2**63 - 1,
            "total_size": 2**63 - 1,
            "blocks": [{"size": 2**62}] * 4,
        }
    )
    made["segments"].append(made["segments"][-1])
    made["device_traces"] += [[], [{"action": "alloc", "size": 2**62, "time_us": 1}] * 4]
    tables = tables_of(made, "here")
    segment = tables["allocator_segment"].to_pylist()[0]
    assert (segment["device_id"], segment["total_bytes"], segment["stream_id"]) == (0, None, None)
    assert tables["allocator_event"].num_rows == 5 + 4
    assert tables["allocator_event"]["allocated_bytes"].to_pylist()[:4] == [None] * 4


def test_damaged_snapshots_are_refused_in_one_line(tmp_path: Path) -> None:
    data = pickle.dumps(snapshot(), protocol=4)
    chance = random.Random(3)
    for i in range(400):
        damaged = bytearray(data[: len(data) * i // 100] if i < 100 else data)
        if i >= 100:
            damaged[chance.randrange(2, len(data))] ^= 1 << chance.randrange(8)
        try:
            tables_of(load(bytes(damaged), "here"), "here")
        except InputError as exc:
            line = str(exc)
            assert "\n" not in line


# ---------------------------------------------------------------- in a run


def trace(path: Path) -> Path:
    """Two steps of 20 ms; a product and its backward in each."""
    made = Trace()
    for step in range(2):
        at = step * 20 * MS
        made.step(step, at, 20 * MS)
        made.op("MmBackward0", at + 9 * MS, 3 * MS)
        op = made.op("aten::mm", at + MS, MS, shapes=[[8, 8], [8, 8]])
        made.launch("gemm", at + MS, MS // 2, kernel_at=at + 3 * MS, kernel_for=10 * MS, op=op)
    path.write_bytes(made.encode())
    return path


def test_a_snapshot_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "s.pickle", snapshot())
    found = pipeline.attribute(path)
    (segments,) = view(found, "memory_segments").to_pylist()
    mib = 1 << 20
    assert segments["reserved_bytes"] == 4 * mib
    assert segments["fragmentation_ratio"] == 0.25
    assert (segments["gap_count"], segments["largest_gap_bytes"]) == (1, mib)
    assert (segments["whole_free_bytes"], segments["rounding_bytes"]) == (0, 24)
    holders = memory_holders(found).to_pylist()
    assert [(h["where"], h["held_bytes"]) for h in holders] == [
        (None, 2 * mib),
        ("train.py:7: step", mib),
    ]
    done = CliRunner().invoke(cli, ["analyze", str(path), "--view", "memory", "--csv"])
    assert done.exit_code == 0, done.output
    assert "the allocator's history" in done.output


def test_a_snapshot_beside_a_trace_has_steps_and_phases(tmp_path: Path) -> None:
    kernels = trace(tmp_path / "trace.json")
    path = write(tmp_path / "s.pickle", snapshot())
    target = tmp_path / "run"
    done = CliRunner().invoke(cli, ["import", str(kernels), str(path), "-o", str(target)])
    assert done.exit_code == 0, done.output
    found = pipeline.attribute(target)
    steps = memory_over_time(found).to_pylist()
    mib = 1 << 20
    # Events at 1 and 5 ms are of the first step, at 25, 30 and 31 ms of the second; 45 ms is after.
    assert [(s["step"], s["allocated_bytes"], s["reserved_bytes"]) for s in steps] == [
        (0, mib, 4 * mib),
        (1, mib + mib // 2, 4 * mib),
    ]
    rows = view(found, "memory").to_pylist()
    peaks = {r["phase"]: r["peak_allocated_bytes"] for r in rows}
    assert peaks["all"] == mib + mib // 2
    # 30 and 31 ms are within the second step's backward pass, on whichever thread.
    assert peaks["backward"] == mib
    assert peaks["forward"] == mib + mib // 2


def test_a_snapshot_of_another_time_is_said(tmp_path: Path) -> None:
    late = snapshot()
    for event in late["device_traces"][0]:
        event["time_us"] += 3_600_000_000
    run = pipeline.read([trace(tmp_path / "t.json"), write(tmp_path / "s.pickle", late)])
    assert "memory.no_common_time" in {f.code for f in run.part(0).findings}


def test_a_snapshot_of_a_device_that_no_rank_computes_on(tmp_path: Path) -> None:
    for rank in range(2):
        made = Trace(rank=rank, world=2, device=rank, pid=50 + rank, tid=50 + rank)
        made.step(0, 0, 20 * MS)
        made.launch("gemm", MS, MS, kernel_at=3 * MS, kernel_for=MS)
        (tmp_path / f"rank{rank}.json").write_bytes(made.encode())
    other = snapshot()
    other["segments"][0]["device"] = 1
    other["device_traces"].insert(0, [])
    named = [tmp_path / "rank0.json", tmp_path / "rank1.json"]
    run = pipeline.read([*named, write(tmp_path / "s.pickle", other)])
    assert run.table(0, "allocator_segment").num_rows == 0
    assert run.table(1, "allocator_event").num_rows == 6
    other["segments"][0]["device"] = 5
    other["device_traces"] = []
    with pytest.raises(InputError, match="of device 5, which none of the 2 ranks computes on"):
        pipeline.read([*named, write(tmp_path / "s.pickle", other)])
    run = pipeline.read([*named, write(tmp_path / "s-rank1.pickle", other)])
    assert run.table(1, "allocator_segment").num_rows == 1


# ---------------------------------------------------------------- recorded


class _Allocator:
    """A scripted one."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def _record_memory_history(self, **options: Any) -> None:
        self.calls.append(options.get("enabled"))

    def _snapshot(self) -> dict[str, Any]:
        return snapshot()


def test_the_history_is_taken_once_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = _Allocator()
    kept = [False]
    monkeypatch.setattr(allocator_history, "_history", lambda _device: (allocator, kept[0]))
    context = CollectorContext(directory=tmp_path, run_path=tmp_path, pid=os.getpid())
    collector = AllocatorHistoryCollector()
    assert collector.probe(context).ok
    collector.start(context)
    report = collector.stop()
    assert allocator.calls == ["all", None]
    assert report.samples_count == 6
    assert (
        {p.name for p in tmp_path.iterdir()}
        == set(report.files)
        == {
            "allocator_segment.arrow",
            "allocator_block.arrow",
            "allocator_event.arrow",
        }
    )
    # What the program does itself is left alone.
    kept[0] = True
    answer = collector.probe(context)
    assert not answer.ok
    assert answer.reason == "the program records the allocator's history itself"


def test_a_rank_on_the_host_has_no_history(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    context = CollectorContext(directory=tmp_path, run_path=tmp_path, pid=1, device="cpu")
    answer = AllocatorHistoryCollector().probe(context)
    assert not answer.ok
    assert answer.remedy
