"""Snapshots as torch writes them when an allocation fails: what is said of them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from chopper import pipeline
from chopper.analyzers.events.held_memory import held_memory, source_line
from tests import command
from tests.kineto_writer import BASE_NS, Trace

GIB = 1 << 30
MODEL, CACHE, LOOP = (
    [{"filename": "??", "line": 0, "name": "malloc"},
     {"filename": "/env/lib/python3.12/site-packages/torch/nn/modules/linear.py", "line": 125,
      "name": "forward"},
     {"filename": f"/home/me/{file}.py", "line": line, "name": name}]
    for file, line, name in (("model", 10, "forward"), ("cache", 20, "put"), ("train", 30, "main"))
)  # fmt: skip


def event(at_ms: int, action: str, size: int, frames: list[Any], **more: int) -> dict[str, Any]:
    """An entry of device_traces: one of an out-of-memory error has device_free and no addr."""
    return {
        "action": action, "size": size, "stream": 0, "time_us": BASE_NS // 1000 + at_ms * 1000,
        "frames": frames, "compile_context": "N/A", "user_metadata": "", **more,
    }  # fmt: skip


def snapshot(held: dict[int, tuple[int, list[Any]]], trace: list[Any], total: int) -> Any:
    """A segment with the blocks that are held when the snapshot is taken, and the history."""
    used = sum(size for size, _ in held.values())
    blocks = [
        {"address": at, "size": size, "requested_size": size, "state": "active_allocated",
         "frames": frames}
        for at, (size, frames) in held.items()
    ]  # fmt: skip
    free = {"address": 900, "size": total - used, "requested_size": 0, "state": "inactive",
            "frames": []}  # fmt: skip
    segment = {
        "device": 0, "address": 1, "total_size": total, "allocated_size": used,
        "active_size": used, "requested_size": used, "stream": 0, "segment_type": "large",
        "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": [*blocks, free],
    }  # fmt: skip
    return {
        "segments": [segment],
        "device_traces": [trace],
        "allocator_settings": {},
        "external_annotations": [],
    }


HISTORY = [
    event(1, "alloc", 2 * GIB, MODEL, addr=1),
    event(2, "alloc", 6 * GIB, CACHE, addr=2),
    event(3, "alloc", GIB, LOOP, addr=3),
    event(4, "free_requested", GIB, LOOP, addr=3),
    event(4, "free_completed", GIB, LOOP, addr=3),
    event(5, "oom", 4 * GIB, LOOP, device_free=GIB // 2),
]
UNWOUND = [
    event(6, "free_requested", 6 * GIB, LOOP, addr=2),
    event(6, "free_completed", 6 * GIB, LOOP, addr=2),
    event(7, "alloc", GIB, LOOP, addr=4),
]
"""What the program does after it caught the error, before it dumps the snapshot."""
CRASH = snapshot({0: (GIB, []), 1: (2 * GIB, MODEL), 2: (6 * GIB, CACHE)}, HISTORY, 10 * GIB)
AFTER = snapshot(
    {0: (GIB, []), 1: (2 * GIB, MODEL), 4: (GIB, LOOP)}, [*HISTORY, *UNWOUND], 10 * GIB
)


def write(path: Path, value: Any) -> Path:
    path.write_bytes(pickle.dumps(value))
    return path


@pytest.mark.parametrize("value", [CRASH, AFTER], ids=["at the error", "after it"])
def test_what_was_held_when_an_allocation_failed(value: Any, tmp_path: Path) -> None:
    (held,) = held_memory(pipeline.read(write(tmp_path / "s.pickle", value)))
    assert (held.asked_bytes, held.free_bytes) == (4 * GIB, GIB // 2)
    assert (held.allocated_bytes, held.reserved_bytes) == (9 * GIB, 10 * GIB)
    assert held.peak_bytes == 10 * GIB
    # In use before the history began, without a line; freed after the error, but held at it.
    assert [(h["where"], h["held_bytes"], h["block_count"]) for h in held.holders] == [
        ("/home/me/cache.py:20: put", 6 * GIB, 1),
        ("/home/me/model.py:10: forward", 2 * GIB, 1),
        (None, GIB, 1),
    ]
    assert held.asked_by == "/home/me/train.py:30: main"
    assert "shard" in held.detail
    assert "expandable_segments" not in held.detail


def test_the_first_screen_names_the_crash(tmp_path: Path) -> None:
    path = write(tmp_path / "s.pickle", CRASH)
    for more in ([], ["--json"]):
        text = " ".join(command.run("analyze", path, *more).out.split())
        assert (
            "Out of memory on device 0: asked for 4.00 GiB, free 512 MiB, allocated 9.00 GiB, "
            "reserved 10.0 GiB; the largest holder is /home/me/cache.py:20: put: 6.00 GiB, 66.7 %"
        ) in text
        assert "memory.out_of_memory" in text or not more
    page = tmp_path / "r.html"
    assert command.run("report", path, "-o", page).code == 0
    assert "Out of memory on device 0: asked for 4.00 GiB" in page.read_text()


def test_unused_memory_that_would_have_been_enough_is_fragmentation(tmp_path: Path) -> None:
    trace = [*HISTORY[:-1], event(5, "oom", 2 * GIB, LOOP, device_free=0)]
    value = snapshot({1: (2 * GIB, MODEL), 2: (6 * GIB, CACHE)}, trace, 11 * GIB)
    (held,) = held_memory(pipeline.read(write(tmp_path / "s.pickle", value)))
    assert "3.00 GiB were reserved and unused, but not in one piece" in held.detail
    assert "expandable_segments:True" in held.detail


def test_an_error_beside_a_trace_is_a_finding(tmp_path: Path) -> None:
    made = Trace()
    made.step(0, 0, 100_000)
    op = made.op("aten::mm", 1_000, 50_000, shapes=[[8, 8], [8, 8]])
    made.launch("gemm", 2_000, 500, kernel_at=3_000, kernel_for=70_000, op=op)
    (tmp_path / "t.json").write_bytes(made.encode())
    write(tmp_path / "s.pickle", CRASH)
    run = pipeline.attribute(pipeline.read([tmp_path / "t.json", tmp_path / "s.pickle"]))
    (found,) = [f for f in run.findings if f.code == "memory.out_of_memory"]
    assert found.severity == "error"
    assert "asked for 4.00 GiB" in found.message
    assert "smaller micro-batches" in found.message


def test_without_a_history_the_peak_is_unknown(tmp_path: Path) -> None:
    value = snapshot({1: (2 * GIB, MODEL)}, [], 3 * GIB)
    (held,) = held_memory(pipeline.read(write(tmp_path / "s.pickle", value)))
    assert held.peak_bytes is None
    assert held.headline.startswith("Tensors on device 0 held 2.00 GiB; 3.00 GiB were reserved")
    assert "The peak is unknown" in held.detail


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        ("??:0: malloc\na/site-packages/torch/x.py:1: f\nme.py:2: g\nmain.py:3: h", "me.py:2: g"),
        ("a/site-packages/torch/x.py:1: f\nx.cpp:2: g", "a/site-packages/torch/x.py:1: f"),
        ("x.cpp:2: g\ny.cpp:3: h", "x.cpp:2: g"),
    ],
)
def test_the_line_of_a_stack_is_the_users_where_there_is_one(stack: str, line: str) -> None:
    assert source_line(stack) == line
