from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chopper import pipeline
from chopper.analyzers.views.memory import memory_determinism, memory_steps, similarity
from chopper.storage.manifest import Device
from chopper.views import view
from tests.analyzers.make import table
from tests.kineto_writer import BASE_NS, Trace
from tests.made_runs import put_table
from tests.reports.make import Shape, make

_MIB = 1 << 20


def _trace(tmp_path, steps, *, calls=1):
    """Steps of 100 µs: each allocates and frees sizes in turn, forward 10–40 µs, backward 50–80 µs.

    ``steps`` holds the signed sizes of each step, half in forward and half in backward.
    """
    made = Trace(rank=0, world=1)
    total = 0
    for s, sizes in enumerate(steps):
        t = 100_000 * s
        made.step(s, t, 100_000)
        op = made.op("aten::mm", t + 10_000, 30_000, shapes=[[8, 8], [8, 8]])
        made.launch("gemm", t + 11_000, 500, kernel_at=t + 12_000, kernel_for=70_000, op=op)
        for i in range(calls):
            made.call("cudaMalloc", t + 15_000 + 2_000 * i, 1_000)
        made.op("autograd::engine::evaluate_function: MmBackward0", t + 50_000, 30_000, sequence=s)
        half = (len(sizes) + 1) // 2
        for i, size in enumerate(sizes):
            at = t + 20_000 + 100 * i if i < half else t + 60_000 + 100 * i
            total += size
            made.memory(at, size, total, 8 * _MIB)
    path = tmp_path / "t.json"
    path.write_bytes(made.encode())
    return path


def test_peaks_and_fragmentation_by_phase(tmp_path) -> None:
    steps = [[_MIB, 2 * _MIB, 3 * _MIB, -6 * _MIB]] * 3
    attribution = pipeline.attribute(_trace(tmp_path, steps, calls=2))
    rows = {r["phase"]: r for r in view(attribution, "memory").to_pylist()}
    assert set(rows) == {"all", "forward", "backward"}
    whole = rows["all"]
    assert whole["device"] == "device 0"
    assert whole["peak_allocated_bytes"] == 6 * _MIB
    assert whole["peak_reserved_bytes"] == 8 * _MIB
    assert whole["fragmentation_ratio"] == pytest.approx(2 / 8)
    # Totals 1, 3, 6, 0 of 8 MiB: 7/8, 5/8, 2/8, 8/8 are free.
    assert whole["median_fragmentation_ratio"] == pytest.approx((7 + 5) / 16)
    assert (whole["allocation_count"], whole["requested_bytes"]) == (3, 6 * _MIB)
    assert rows["forward"]["peak_allocated_bytes"] == 3 * _MIB
    assert rows["backward"]["peak_allocated_bytes"] == 6 * _MIB
    # Two calls of 1 µs in every step, both in forward.
    assert (whole["allocator_call_count"], whole["allocator_ns"]) == (2, 2_000)
    assert rows["backward"]["allocator_call_count"] == 0


def test_a_total_that_is_not_kept_is_unknown(tmp_path) -> None:
    made = Trace()
    made.step(0, 0, 100_000)
    made.op("aten::mm", 1_000, 50_000, shapes=[[8, 8], [8, 8]])
    made.memory(2_000, 512, 0, 0)
    path = tmp_path / "t.json"
    path.write_bytes(made.encode())
    attribution = pipeline.attribute(path)
    (whole, _) = view(attribution, "memory").to_pylist()
    assert whole["peak_allocated_bytes"] is None
    assert whole["fragmentation_ratio"] is None
    assert whole["requested_bytes"] == 512


def test_without_events_the_readings_speak() -> None:
    rows = view(make(Shape(ranks=2)), "memory").to_pylist()
    assert {r["rank"] for r in rows} == {0, 1}
    assert {r["source"] for r in rows} == {"readings at the ends of steps"}
    assert all(r["peak_allocated_bytes"] > 30e9 for r in rows)
    assert all(r["peak_reserved_bytes"] == 48_000_000_000 for r in rows)
    assert all(r["fragmentation_ratio"] is None and r["allocation_count"] is None for r in rows)
    assert memory_determinism(memory_steps(make(Shape()))).num_rows == 0


def test_equal_steps_are_identical_and_others_are_not(tmp_path) -> None:
    same = [512, 1024, -512, -1024]
    swapped = [1024, 512, -512, -1024]
    attribution = pipeline.attribute(_trace(tmp_path, [same, same, swapped, same]))
    steps = view(attribution, "memory_steps").to_pylist()
    assert [s["same_as_previous"] for s in steps] == [None, True, False, False]
    assert steps[0]["sequence"] == steps[1]["sequence"] == steps[3]["sequence"]
    assert steps[2]["sequence"] != steps[3]["sequence"]
    # Six runs of three with the ends; of (·,·,a) (·,a,b) (a,b,-a) (b,-a,-b) (-a,-b,·) (-b,·,·) the
    # last two are shared by (·,·,b) (·,b,a) (b,a,-a) (a,-a,-b) (-a,-b,·) (-b,·,·).
    assert [s["similarity_ratio"] for s in steps[1:]] == pytest.approx([1, 2 / 6, 2 / 6])
    assert [s["distinct_sizes_count"] for s in steps] == [2] * 4
    (row,) = view(attribution, "memory_determinism").to_pylist()
    assert row["identical_ratio"] == pytest.approx(1 / 3)
    assert row["similarity_ratio"] == pytest.approx((1 + 2 / 6 + 2 / 6) / 3)
    assert row["peak_mean_bytes"] == 1536
    assert row["peak_std_bytes"] == 0
    assert row["clock_correlation"] is None
    assert row["no_correlation"] == "no step has two samples of the device's clock"


_SIZES = st.lists(st.sampled_from([512, 1024, -512, 2 * _MIB]), max_size=30)


@given(_SIZES, _SIZES)
def test_similarity_is_a_symmetric_ratio(a, b) -> None:
    one, other = np.array(a, dtype=np.int64), np.array(b, dtype=np.int64)
    found = similarity(one, other)
    assert 0 <= found <= 1
    assert found == similarity(other, one)
    assert similarity(one, one) == 1
    if a == b:
        assert found == 1


def _clocked(tmp_path, steps, clocks):
    """A run whose device clock is sampled four times a step, ± the given deviation."""
    attribution = pipeline.attribute(_trace(tmp_path, steps))
    rows = [
        {
            "time_ns": BASE_NS + 100_000 * s + 20_000 * i + 10_000,
            "span_ns": 1_000,
            "device_id": 0,
            "sm_clock_hz": 1_500_000_000 + (away if i % 2 else -away),
        }
        for s, away in enumerate(clocks)
        for i in range(4)
    ]
    put_table(attribution.recording, 0, "device_clock", table("device_clock", rows))
    return attribution


def test_unsteady_memory_and_unsteady_clocks_correlate(tmp_path) -> None:
    same, other = [512, 1024, -512, -1024], [4096, -4096, 2048, -2048]
    steps = [same, same, other, same, same, other]
    # Steps 2, 3 and 5 are unlike the one before: their clocks vary most.
    clocks = [1_000_000, 1_000_000, 9_000_000, 8_000_000, 1_000_000, 9_000_000]
    attribution = _clocked(tmp_path, steps, clocks)
    found = memory_steps(attribution).to_pylist()
    assert [s["clock_mean_hz"] for s in found] == [1_500_000_000] * 6
    # ± 1 MHz in four samples: sqrt(4/3) MHz.
    assert found[0]["clock_std_hz"] == round(1_000_000 * (4 / 3) ** 0.5)
    (row,) = memory_determinism(memory_steps(attribution)).to_pylist()
    assert row["clock_correlation"] > 0.9
    assert row["no_correlation"] is None


def test_clocks_beside_memory_are_the_ranks_own_devices(tmp_path) -> None:
    # The process sees the driver's device 1 as its device 0.
    attribution = _clocked(tmp_path, [[512, -512]] * 2, [0, 0])
    part = attribution.recording.part(0)
    part.device_id = 0
    part.devices = [Device(device_id=0, uuid="aa")]
    rows = attribution.recording.table(0, "device_clock").to_pylist()
    both = [{**row, "device_uuid": "GPU-bb"} for row in rows]
    both += [{**row, "device_id": 1, "device_uuid": "GPU-aa", "sm_clock_hz": 10**9} for row in rows]
    put_table(attribution.recording, 0, "device_clock", table("device_clock", both))
    found = memory_steps(attribution).to_pylist()
    assert [s["clock_mean_hz"] for s in found] == [10**9] * 2


@pytest.mark.parametrize(
    ("steps", "clocks", "reason"),
    [
        ([[512, -512]] * 5, [10, 20, 30, 40, 50], "resemble the previous one equally"),
        ([[512], [1024], [1024], [512]], [7, 7, 7, 7], "the clock varied equally"),
        ([[512], [1024], [512]], [7, 8, 9], "2 steps with clock samples; at least 3 are needed"),
    ],
)
def test_no_correlation_has_a_reason(tmp_path, steps, clocks, reason) -> None:
    clocks = [c * 1_000_000 for c in clocks]
    (row,) = memory_determinism(memory_steps(_clocked(tmp_path, steps, clocks))).to_pylist()
    assert row["clock_correlation"] is None
    assert reason in row["no_correlation"]


def test_a_real_trace_allocates_alike_in_every_step(traces_dir) -> None:
    path = traces_dir / "hta" / "v100-ddp-rank1of2-memory-events.json.gz"
    attribution = pipeline.attribute(path)
    rows = {r["device"]: r for r in view(attribution, "memory_determinism").to_pylist()}
    assert rows["device 1"]["identical_ratio"] == 1
    assert rows["device 1"]["distinct_sizes_count"] == 96
    assert rows["device 1"]["peak_std_bytes"] == 0
    whole = view(attribution, "memory").to_pylist()[0]
    table = attribution.recording.table(1, "memory_event")
    step = attribution.joined[1].step
    moment = table["time_ns"].to_numpy()
    inside = (moment >= step["start_ns"][0].as_py()) & (moment < step["end_ns"][-1].as_py())
    assert whole["peak_allocated_bytes"] == table["allocated_bytes"].to_numpy()[inside].max()
