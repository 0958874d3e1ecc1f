"""Running and waiting of threads, from totals worked by hand and from a real recorded run."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

import chopper
from chopper import pipeline
from chopper.recording.live import StreamTail
from chopper.storage import manifest as m
from chopper.storage.run import Run
from chopper.views import view
from tests.analyzers.make import kernel, kernels, span, spans, steps, table
from tests.made_runs import put_table

S = 1_000_000_000
BASE = 1_700_000_000 * S
MS = 1_000_000


def scheduled(seconds: int = 4, **recorded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    part = m.RankManifest(rank=0, hostname="node", device_id=0, devices=[m.Device(device_id=0)])
    run = Run(m.RunManifest(kind="recorded", name="made", ranks=[part]), None, {}, "made")
    bounds = [(BASE + i * S // 4, BASE + (i + 1) * S // 4) for i in range(4 * seconds)]
    put_table(run, 0, "host_span", spans(span(BASE, BASE + 5, "aten::mm", tid=41)))
    put_table(run, 0, "device_event", kernels(*(kernel(a, b) for a, b in bounds)))
    put_table(run, 0, "step", steps(*bounds))
    for name, rows in recorded.items():
        put_table(run, 0, name, table(name, rows))
    found: list[dict[str, Any]] = view(pipeline.attribute(run), "scheduling").to_pylist()
    return found


def thread(tid: int, name: str, *rows: tuple[float, int, int]) -> list[dict[str, Any]]:
    """(second, run ms, delay ms) of one thread."""
    return [
        {
            "time_ns": BASE + round(at * S),
            "span_ns": 0,
            "rank": 0,
            "pid": 40,
            "tid": tid,
            "name": name,
            "run_ns": run * MS,
            "run_delay_ns": delay * MS,
            "slice_count": run,
        }
        for at, run, delay in rows
    ]


def test_a_rank_waits_as_long_as_its_training_thread_that_waits_most() -> None:
    rows = scheduled(
        process_thread=[
            *thread(40, "python", (-0.5, 10, 0), (4.0, 210, 40)),
            *thread(41, "pt_autograd_0", (-0.5, 0, 0), (2.0, 1000, 300), (4.0, 2000, 600)),
            *thread(42, "loader", (0.0, 0, 0), (3.5, 500, 3000)),
        ]
    )
    rank, autograd, loader, main = rows
    assert (rank["thread"], rank["waiting_ratio"]) == (None, pytest.approx(0.15))
    assert rank["running_ratio"] == pytest.approx((0.2 + 2.0 + 0.5) / 4)
    assert (autograd["thread"], autograd["training"]) == ("pt_autograd_0", True)
    assert autograd["waiting_ns"] == 600 * MS
    # Not of training, though it waited most: below.
    assert (loader["thread"], loader["training"]) == ("loader", False)
    assert loader["waiting_ratio"] == pytest.approx(0.75)
    assert main["thread"] == "python"


def test_throttling_steal_pressure_and_events_of_a_rank() -> None:
    host = [
        {
            "time_ns": BASE + i * S,
            "span_ns": 0,
            "cgroup_throttled_ns": i * 250 * MS,
            "pressure_cpu_some_ns": i * 100 * MS,
        }
        for i in range(5)
    ]
    cores = [
        {
            "time_ns": BASE + i * S,
            "span_ns": 0,
            "core_id": c,
            "busy_ratio": 0.5,
            "steal_ratio": 0.1 * c,
        }
        for i in range(1, 4)
        for c in range(2)
    ]
    events = [
        {
            "time_ns": BASE + i * S,
            "span_ns": 0,
            "rank": 0,
            "pid": 40,
            "context_switch_count": 50 * i,
            "cycle_count": 3 * 10**9 * i,
            "instruction_count": 6 * 10**9 * i,
        }
        for i in range(5)
    ]
    (row,) = scheduled(host=host, cpu_core=cores, process_event=events)
    assert row["throttled_ratio"] == pytest.approx(0.25)
    assert row["pressure_cpu_ratio"] == pytest.approx(0.1)
    assert row["steal_ratio"] == pytest.approx(0.05)
    assert row["context_switch_count"] == 200
    assert row["instructions_per_cycle"] == pytest.approx(2)
    assert row["page_fault_count"] is None
    assert row["waiting_ratio"] is None


def test_the_finding_names_the_working_thread_that_waited_most() -> None:
    part = m.RankManifest(rank=0, hostname="node", device_id=0, devices=[m.Device(device_id=0)])
    run = Run(m.RunManifest(kind="recorded", name="made", ranks=[part]), None, {}, "made")
    threads = [
        *thread(40, "python", (-0.5, 10, 0), (4.0, 210, 400)),
        *thread(41, "pt_autograd_0", (-0.5, 0, 0), (2.0, 1000, 300), (4.0, 2000, 600)),
        # It waits more and runs no operator; what comes after the steps does not count.
        *thread(99, "pin_memory", (-0.5, 0, 0), (4.0, 0, 4000)),
        *thread(41, "pt_autograd_0", (9.0, 2000, 5000)),
    ]
    for seconds, said in ((4, "its thread pt_autograd_0 waited for a core 15."), (0.9, None)):
        end = BASE + round(seconds * S)
        put_table(run, 0, "host_span", spans(span(BASE, BASE + 5, "aten::mm", tid=41)))
        put_table(run, 0, "device_event", kernels(kernel(BASE, end)))
        put_table(run, 0, "step", steps((BASE, end)))
        put_table(run, 0, "process_thread", table("process_thread", threads))
        findings = [f for f in pipeline.attribute(run).findings if f.code == "host.cores_taken"]
        assert [f.message.startswith(said or "?") for f in findings] == [True] * bool(said)


def test_less_than_a_second_is_refused() -> None:
    part = thread(40, "python", (0.0, 0, 0), (0.5, 200, 40))
    run = m.RankManifest(rank=0, hostname="node")
    made = Run(m.RunManifest(kind="recorded", name="made", ranks=[run]), None, {}, "made")
    put_table(made, 0, "host_span", spans())
    put_table(made, 0, "device_event", kernels(kernel(BASE, BASE + S // 2)))
    put_table(made, 0, "step", steps((BASE, BASE + S // 2)))
    put_table(made, 0, "process_thread", table("process_thread", part))
    (row,) = view(pipeline.attribute(made), "scheduling").to_pylist()
    assert "less than a second" in row["reason"]
    assert row["waiting_ratio"] is None


def test_a_run_without_samples_has_no_rows() -> None:
    assert scheduled() == []


def test_a_real_recording_has_the_ranks_threads(tmp_path: Path) -> None:
    """The main thread of this process works, for a second and until it was read often enough."""
    read = StreamTail(tmp_path / "run" / "rank-00000" / "process_thread.arrow")
    readings = 0
    with chopper.profile(tmp_path / "run", trace=False, collect=("host",)) as prof:
        begin_s = time.monotonic()  # a busy machine may have taken long to start collectors
        while readings < 3 or time.monotonic() < begin_s + 1.2:
            end_s = time.monotonic() + 0.1
            while time.monotonic() < end_s:
                sum(range(1000))
            readings += sum(batch["tid"].to_pylist().count(os.getpid()) for batch in read.poll())
            prof.step()
    read.close()
    run = pipeline.read(tmp_path / "run")
    whole, *threads = view(pipeline.attribute(run), "scheduling").to_pylist()
    assert whole["thread"] is None
    assert whole["reason"] is None
    (main,) = [row for row in threads if row["tid"] == os.getpid()]
    rows = [r for r in run.table(0, "process_thread").to_pylist() if r["tid"] == os.getpid()]
    # Nobody runs and waits for longer than what lies between the first reading and the last one.
    # The kernel brings the time of a thread that runs up to date at its tick.
    read_ns = rows[-1]["time_ns"] - rows[0]["time_ns"] + 2 * max(r["span_ns"] for r in rows)
    assert 0 < main["running_ns"] + main["waiting_ns"] <= read_ns + 10_000_000
