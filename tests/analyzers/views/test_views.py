"""Views of hand-made runs, their numbers worked out in the comments; laws against plain loops."""

from __future__ import annotations

import csv
import gzip
import io
import json
from ast import literal_eval
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chopper import pipeline, reports
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.views.host import depths
from chopper.errors import UsageError
from chopper.hardware import calibration
from chopper.hardware.devices import lookup
from chopper.storage import manifest as m
from chopper.storage.run import Run
from chopper.views import VIEWS, view
from tests.analyzers.make import answered, kernel, kernels, span, spans, steps, table
from tests.conftest import find_traces_dir

H100 = "NVIDIA H100 80GB HBM3"
_FLOATS = '["float","float"]'


def attributed(
    host: pa.Table, device: pa.Table, *, name: str | None = H100, kept: Any = None, **more: pa.Table
) -> Attribution:
    """One rank's tables as an attributed run."""
    part = m.RankManifest(
        rank=0, status="imported", device_id=0, devices=[m.Device(device_id=0, name=name)]
    )
    part.calibration = kept
    tables = {(0, "host_span"): host, (0, "device_event"): device}
    tables |= {(0, key): value for key, value in more.items()}
    return pipeline.attribute(
        Run(m.RunManifest(kind="imported", name="made", ranks=[part]), None, tables, "made")
    )


def called(
    start: int, name: str, dims: str | None, *correlations: int, types: str = _FLOATS
) -> list[dict[str, Any]]:
    """An operator of 100 ns whose launching calls start 10 ns after it, 20 ns apart."""
    rows = [span(start, start + 100, name, input_dims=dims, input_types=types if dims else None)]
    for i, correlation in enumerate(correlations):
        at = start + 10 + 20 * i
        rows.append(span(at, at + 10, "cudaLaunchKernel", "runtime", correlation_id=correlation))
    return rows


def rows_of(attribution: Attribution, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = view(attribution, name).to_pylist()
    return rows


def products() -> Attribution:
    host = spans(
        *called(0, "aten::mm", "[[8, 16], [16, 4]]", 1),
        *called(200, "aten::mm", "[\n [8,16],[16,4]]", 2, 3),
        *called(400, "aten::mm", "[[2,2],[2,2]]", 4),
    )
    device = kernels(
        kernel(50, 150, correlation_id=1),
        kernel(250, 350, correlation_id=2),
        # Beside the one before for 50 ns: the call ran from 250 to 380.
        kernel(300, 380, stream=8, correlation_id=3),
        kernel(450, 460, correlation_id=4),
        kernel(500, 507, "lonely"),
    )
    return attributed(host, device)


def test_operations_are_grouped_by_what_they_were_given() -> None:
    first, second, lonely = rows_of(products(), "operations")
    assert (first["op"], first["input_dims"], first["phase"]) == (
        "aten::mm",
        "[[8,16],[16,4]]",
        "forward",
    )
    assert first["call_count"] == 2
    assert [first[f"{n}_ns"] for n in ("time", "mean", "median", "min", "max", "std")] == [
        230,
        115,
        115,
        100,
        130,
        21,  # 15·√2
    ]
    assert first["share_ratio"] == pytest.approx(230 / 247)
    assert first["math_flop"] == 2 * 8 * 16 * 4
    assert first["traffic_bytes"] == 4 * (8 * 16 + 16 * 4 + 8 * 4)
    assert first["compute_rate_flop_per_s"] == pytest.approx(2 * 1024 / 230e-9)
    assert first["flop_per_byte"] == pytest.approx(1024 / 896)
    assert first["dtype"] == "fp32"
    assert (second["call_count"], second["time_ns"], second["math_flop"]) == (1, 10, 16)
    assert (lonely["op"], lonely["time_ns"], lonely["math_flop"]) == (None, 7, None)


def test_collectives_are_one_row_although_their_sequence_numbers_differ() -> None:
    rows = []
    for number in range(5):
        name, dims = "record_param_comms", f"[[{number + 1}],[]]"
        operator, call = called(number * 200, name, dims, number + 1)
        rows += [operator | {"concrete_inputs": f'["","{number}"]'}, call]
    device = kernels(*(kernel(n * 200 + 50, n * 200 + 80, correlation_id=n + 1) for n in range(5)))
    (row,) = rows_of(attributed(spans(*rows), device), "operations")
    assert (row["op"], row["call_count"], row["time_ns"]) == ("record_param_comms", 5, 150)
    assert row["input_dims"] is row["concrete_inputs"] is None


def test_operators_and_kernels_hold_the_same_events() -> None:
    run = products()
    operators, found = rows_of(run, "operators"), rows_of(run, "kernels")
    assert [(r["op"], r["call_count"], r["kernel_count"], r["time_ns"]) for r in operators] == [
        ("aten::mm", 3, 4, 240),
        (None, 1, 1, 7),
    ]
    assert operators[0]["math_flop"] == 2 * 1024 + 16
    assert [(r["kernel"], r["op"], r["call_count"], r["time_ns"]) for r in found] == [
        ("k", "aten::mm", 4, 290),
        ("lonely", None, 1, 7),
    ]


def test_flop_that_are_unknown_of_one_call_are_unknown_of_the_operator() -> None:
    host = spans(*called(0, "aten::mm", "[[8,16],[16,4]]", 1), *called(200, "aten::mm", None, 2))
    device = kernels(kernel(50, 150, correlation_id=1), kernel(250, 350, correlation_id=2))
    row = rows_of(attributed(host, device), "operators")[0]
    assert row["math_flop"] is None
    assert row["compute_rate_flop_per_s"] is None


def test_launch_overhead_is_split_where_the_call_began() -> None:
    host = spans(
        *(
            span(at, at + 1, "cudaLaunchKernel", "runtime", correlation_id=i)
            for i, at in ((1, 50), (2, 220), (3, 120), (6, 430))
        )
    )
    device = kernels(
        kernel(100, 200, correlation_id=1),
        kernel(250, 300, correlation_id=2),  # 50 ns late: 20 until its call, 30 from it on
        kernel(310, 320, correlation_id=3),  # called before the device was free: 10 ns of call
        kernel(400, 410),  # 80 ns that nothing splits
        kernel(405, 500, stream=8, correlation_id=6),
        kernel(450, 460, stream=7, correlation_id=6),  # the other stream was busy all along
    )
    split, unsplit = rows_of(attributed(host, device, name=None), "launches")[::-1]
    assert (split["phase"], split["kernel_count"]) == ("forward", 5)
    assert (split["preparation_ns"], split["call_ns"], split["unsplit_ns"]) == (20, 40, 0)
    # Of the time from the first call, at 50, to 500.
    assert split["share_ratio"] == pytest.approx(60 / 450)
    # Without a launch nothing tells its phase either.
    assert (unsplit["phase"], unsplit["kernel_count"], unsplit["unsplit_ns"]) == ("other", 1, 80)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 60),
            st.integers(0, 20),
            st.integers(-1, 60),
            st.integers(0, 1),
            st.integers(0, 1),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_launch_overhead_equals_the_formula_event_by_event(
    rows: list[tuple[int, int, int, int, int]],
) -> None:
    start, dur, launch, rank, step = (np.array(c, dtype=np.int64) for c in zip(*rows, strict=True))
    number = np.arange(len(rows))
    found = answered(
        "launches",
        step_event=pa.table(
            {
                "rank": rank,
                "row": number,
                "step_index": step,
                "start_ns": start,
                "dur_ns": dur,
                "device_id": np.zeros_like(rank),
                "op": number.astype(str),
                "launch_row": pa.array(number, mask=launch < 0),
                "work_class": ["compute"] * len(rows),
                "phase": ["forward"] * len(rows),
            }
        ),
        host_span=pa.table({"rank": rank, "row": number, "start_ns": launch}),
        window=pa.table({"rank": [0], "step_index": [0], "start_ns": [0], "end_ns": [100]}),
        selection=pa.table({"rank": [0], "step_index": [0], "in_step_time": [True]}),
    )
    by_event = {int(row["op"]): row for row in found}
    for key in set(zip(rank.tolist(), step.tolist(), strict=True)):
        mine = [i for i in np.argsort(start, kind="stable") if (rank[i], step[i]) == key]
        previous_end = start[mine[0]]
        for i in mine:
            overhead = max(0, start[i] - previous_end)
            call = min(max(start[i] - launch[i], 0), overhead) if launch[i] >= 0 else 0
            unsplit = overhead if launch[i] < 0 else 0
            assert by_event[i]["call_ns"] == call
            assert by_event[i]["unsplit_ns"] == unsplit
            assert by_event[i]["preparation_ns"] == overhead - call - unsplit
            previous_end = max(previous_end, start[i] + dur[i])


def queued() -> Attribution:
    host = spans(
        *(
            span(at, at + 1, "cudaLaunchKernel", "runtime", correlation_id=i)
            for i, at in ((1, 0), (2, 10), (3, 20))
        )
    )
    return attributed(
        host,
        kernels(
            kernel(30, 40, correlation_id=1),
            kernel(40, 50, correlation_id=2),
            # One launch, two kernels, as a graph's: one entry until the second ends.
            kernel(50, 55, correlation_id=3),
            kernel(55, 60, correlation_id=3),
        ),
    )


def test_a_launch_is_queued_from_its_call_to_its_end() -> None:
    (row,) = rows_of(queued(), "queue_depth")
    # From the first call, at 0, to 60: one entry for 10 ns, two for 10, three for 20, two for 10,
    # one for 10: 120 ÷ 60.
    assert row["time_ns"] == 60
    assert row["mean_depth"] == pytest.approx(2)
    assert (row["median_depth"], row["p95_depth"], row["max_depth"]) == (2, 3, 3)
    assert (row["empty_ratio"], row["full_ratio"]) == (0, 0)


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=30))
def test_depth_counts_those_called_and_not_ended(rows: list[tuple[int, int]]) -> None:
    host = spans(
        *(
            span(call, call + 1, "cudaLaunchKernel", "runtime", correlation_id=i)
            for i, (call, _) in enumerate(rows, 1)
        )
    )
    device = kernels(
        *(
            kernel(call + wait, call + wait + 7, correlation_id=i)
            for i, (call, wait) in enumerate(rows, 1)
        )
    )
    (depth,) = depths(attributed(host, device), 0)
    for time in range(110):
        at = int(np.searchsorted(depth.time_ns, time, side="right")) - 1
        open_ = sum(call <= time < call + wait + 7 for call, wait in rows)
        assert (depth.count[at] if at >= 0 else 0) == open_


def test_a_full_queue_is_told() -> None:
    count = 1100
    host = spans(
        *(span(i, i + 1, "cudaLaunchKernel", "runtime", correlation_id=i + 1) for i in range(count))
    )
    device = kernels(*(kernel(2000 + i, 2001 + i, correlation_id=i + 1) for i in range(count)))
    (row,) = rows_of(attributed(host, device), "queue_depth")
    # From the first call, at 0, to 3100. 1100 are queued when the first starts, at 2000: 1024 or
    # more from the 1024th call, at 1023, until the 77th has ended, at 2077.
    assert row["max_depth"] == 1100
    assert row["full_ratio"] == pytest.approx((2077 - 1023) / 3100)


_MS = 10**6


def sampled(period_ms: int) -> Attribution:
    """Two steps of 400 ms; core 0 busy, core 1 half busy, core 2 idle; the rank at 0.8 cores."""
    bounds = [(0, 400 * _MS), (400 * _MS, 800 * _MS)]
    host = spans(
        *(
            row
            for i, (a, b) in enumerate(bounds, 1)
            for row in (
                span(a, b, f"ProfilerStep#{i}", "annotation"),
                span(a, a + 1, "cudaLaunchKernel", "runtime", correlation_id=i),
            )
        )
    )
    device = kernels(*(kernel(a + 10, b, correlation_id=i) for i, (a, b) in enumerate(bounds, 1)))
    times = range(0, 1001, period_ms)
    busy = (1.0, 0.5, 0.0)
    cores = [
        {"time_ns": t * _MS, "span_ns": 0, "core_id": c, "busy_ratio": None if not t else busy[c]}
        for t in times
        for c in range(3)
    ]
    process = [
        {"time_ns": t * _MS, "span_ns": 0, "rank": 0, "pid": 1, "cpu_ratio": 0.8} for t in times
    ]
    return attributed(
        host,
        device,
        step=steps(*bounds, first=1),
        cpu_core=table("cpu_core", cores),
        process=table("process", process),
    )


def test_cores_in_use_per_step_and_phase() -> None:
    rows = rows_of(sampled(100), "cpu_use")
    assert [(r["step"], r["phase"]) for r in rows if r["phase"] is None] == [
        (None, None),
        (1, None),
        (2, None),
    ]
    for row in rows:
        if row["phase"] is None:
            assert row["active_cores"] == pytest.approx(2)
            assert row["minimum_cores"] == pytest.approx(1.5)
            assert row["rank_cores"] == pytest.approx(0.8)
            assert row["stolen_cores"] is None
            assert row["reason"] is None


def test_samples_that_are_too_sparse_say_so() -> None:
    rows = rows_of(sampled(500), "cpu_use")
    whole, *by_step = [r for r in rows if r["phase"] is None]
    assert whole["minimum_cores"] is None
    assert all(r["minimum_cores"] is None for r in by_step)
    assert by_step[0]["reason"] == "shorter than the 500 ms between samples"


def test_without_samples_there_are_no_rows_and_the_view_says_why() -> None:
    assert rows_of(products(), "cpu_use") == []
    assert "not sampled" in VIEWS["cpu_use"].needs


def measured(rate: float, dtype: str) -> dict[str, Any]:
    return calibration.to_manifest(
        calibration.Calibration(
            kind="full",
            created_ns=0,
            chopper_version="0",
            torch_version="2",
            hostname="one",
            device_type="cuda",
            device_name=H100,
            ranks=1,
            threads=1,
            cores=1,
            gemm={
                dtype: [
                    calibration.Measured(
                        what="m",
                        best_per_s=rate,
                        median_per_s=rate,
                        spread_ratio=0,
                        repeats_count=1,
                    )
                ]
            },
        )
    )


def mixed(**more: Any) -> Attribution:
    """A product in bf16, its recomputation, and one in fp32: 1500 ns from the first operator on."""
    large = "[[1024,1024],[1024,16]]"
    bf16 = '["c10::BFloat16","c10::BFloat16"]'
    host = spans(
        *called(0, "aten::mm", large, 1, types=bf16),
        span(200, 310, "chopper::recompute::layer", "annotation"),
        *called(205, "aten::mm", large, 2, types=bf16),
        *called(400, "aten::mm", large, 3),
    )
    device = kernels(
        kernel(500, 600, correlation_id=1),
        kernel(600, 800, correlation_id=2),
        kernel(800, 1500, correlation_id=3),
    )
    return attributed(host, device, **more)


FLOP = 2 * 1024 * 1024 * 16


def test_each_flop_is_held_against_the_peak_of_its_own_type() -> None:
    peaks = lookup(H100)
    assert peaks is not None
    bf16, fp32 = peaks.flop_per_s("bf16"), peaks.flop_per_s("fp32")
    assert bf16 is not None
    assert fp32 is not None
    rows = rows_of(mixed(), "utilization")
    whole, *by_type = [r for r in rows if r["ceiling"] == "theoretical"]
    assert whole["mfu_ratio"] == pytest.approx((FLOP / bf16 + FLOP / fp32) / 1500e-9)
    assert whole["hfu_ratio"] == pytest.approx((2 * FLOP / bf16 + FLOP / fp32) / 1500e-9)
    assert (whole["model_flop"], whole["hardware_flop"]) == (2 * FLOP, 3 * FLOP)
    assert whole["peak_flop_per_s"] == pytest.approx(3 / (2 / bf16 + 1 / fp32))
    assert {r["dtype"]: r["hardware_flop"] for r in by_type} == {"bf16": 2 * FLOP, "fp32": FLOP}
    assert whole["reason"] is None


def test_more_flop_than_64_bits_hold_are_not_counted() -> None:
    large = json.dumps([[2**23, 2**15], [2**15, 2**16]])  # 2^55 FLOP, 300 times
    host = spans(*(s for i in range(300) for s in called(10 * i, "aten::mm", large, i + 1)))
    device = kernels(*(kernel(5000 + i, 5001 + i, correlation_id=i + 1) for i in range(300)))
    whole = rows_of(attributed(host, device), "utilization")[0]
    assert (whole["hardware_flop"], whole["hfu_ratio"]) == (None, None)
    assert "shapes cannot be right" in whole["reason"]


def test_an_unknown_ceiling_has_a_reason_and_no_number() -> None:
    (theoretical,) = [
        r for r in rows_of(mixed(name="Tomorrow 1"), "utilization") if r["ceiling"] == "theoretical"
    ]
    assert theoretical["mfu_ratio"] is None
    assert theoretical["reason"] == "device 'Tomorrow 1' is not in the table of peaks"
    (achievable,) = [r for r in rows_of(mixed(), "utilization") if r["ceiling"] == "achievable"]
    assert achievable["hfu_ratio"] is None
    assert "not calibrated" in achievable["reason"]


def test_what_was_measured_on_the_device_stands_beside_the_datasheet() -> None:
    run = mixed(kept=measured(500e12, "bf16"))
    whole = next(r for r in rows_of(run, "utilization") if r["ceiling"] == "achievable")
    # fp32 was not measured: a third of the FLOP count nothing, and that is said.
    assert whole["mfu_ratio"] == pytest.approx(FLOP / 500e12 / 1500e-9)
    assert whole["reason"] == "a lower bound: the peak of fp32, 33.3 % of the FLOP, is unknown"
    document = reports.document(run)
    (both,) = document["ceilings"]
    assert both["achievable"]["flop_per_s"] == {"bf16": 500e12}
    assert both["theoretical"]["flop_per_s"]["bf16"] == pytest.approx(989.4e12)
    assert json.loads(json.dumps(document["utilization"])) == rows_of(run, "utilization")


@pytest.mark.parametrize(
    ("second", "tokens"), [("[[1000,64],[4,128]]", 2 * 4 * 128), ("[[512,64],[128]]", None)]
)
def test_tokens_are_known_from_one_embedding_table(second: str, tokens: int | None) -> None:
    host = spans(
        *called(0, "aten::embedding", "[[1000,64],[4,128]]", 1),
        *called(200, "aten::embedding", second, 2),
    )
    device = kernels(kernel(500, 600, correlation_id=1), kernel(600, 1500, correlation_id=2))
    row = rows_of(attributed(host, device), "utilization")[0]
    # From the first operator, at 0, to 1500.
    assert row["tokens_per_s"] == (None if tokens is None else pytest.approx(tokens / 1500e-9))


def test_steps_sum_and_the_odd_one_stands_out() -> None:
    lengths = [100, 101, 99, 200, 100, 102]
    ends = np.cumsum(lengths) * 1000
    bounds = [(int(e - n * 1000), int(e)) for e, n in zip(ends, lengths, strict=True)]
    host = spans(
        *(
            row
            for i, (a, b) in enumerate(bounds)
            for row in (
                span(a, b, f"ProfilerStep#{i}", "annotation"),
                span(a, a + 10, "cudaLaunchKernel", "runtime", correlation_id=i + 1),
            )
        )
    )
    device = kernels(
        *(kernel(a + 1000, b, correlation_id=i + 1) for i, (a, b) in enumerate(bounds))
    )
    run = attributed(host, device, step=steps(*bounds))
    rows = rows_of(run, "steps")
    assert [r["step"] for r in rows] == list(range(6))
    for row in rows:
        states = ("compute", "communication", "copy", "idle")
        assert sum(row[f"{s}_ns"] for s in states) == row["observed_ns"]
    assert sum(r["observed_ns"] for r in rows) == run.observed_ns
    assert [r["outlier"] for r in rows] == [i == 3 for i in range(6)]
    assert rows[3]["deviation_ratio"] == pytest.approx(200 / 100.5 - 1, rel=0.02)


def test_few_steps_have_no_outlier() -> None:
    assert rows_of(products(), "steps")[0]["outlier"] is None


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 20)),
        min_size=1,
        max_size=40,
    )
)
def test_busy_time_is_the_union(rows: list[tuple[int, int, int]]) -> None:
    group, start, dur = (np.array(c, dtype=np.int64) for c in zip(*rows, strict=True))
    number = np.arange(len(rows))
    calls = answered(
        "operator_call",
        step_event=pa.table(
            {
                "rank": 0 * number,
                "row": number,
                "start_ns": start,
                "dur_ns": dur,
                "op_row": group,
                "op": group.astype(str),
                "phase": ["forward"] * len(rows),
            }
        ),
        host_span=pa.table(
            {
                "rank": [0],
                "row": [0],
                "input_dims": ["[[1, 2]]"],
                "input_types": ['["a b"]'],
                "concrete_inputs": ["no JSON"],
            }
        ),
    )
    assert {call["op_row"] for call in calls} == {*group.tolist()}
    for call in calls:
        covered = {t for g, s, d in rows if g == call["op_row"] for t in range(s, s + d)}
        assert call["busy_ns"] == len(covered)
        if call["op_row"] == 0:
            assert call["input_dims"] == "[[1,2]]"
            assert (call["input_types"], call["concrete_inputs"]) == ('["a b"]', "no JSON")


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(-2, 2), st.integers(0, 10**12)),
        min_size=1,
        max_size=60,
    )
)
def test_groups_have_their_own_statistics(rows: list[tuple[int, int, int]]) -> None:
    a, b, value = (np.array(c, dtype=np.int64) for c in zip(*rows, strict=True))
    events = pa.table(
        {
            "kernel": a.astype(str),
            "op": pa.array(b.astype(str), mask=b < 0),
            "work_class": ["compute"] * len(rows),
            "dur_ns": value,
        }
    )
    found = answered("kernels", step_event=events)
    assert len(found) == len({(x, max(y, -1)) for x, y, _ in rows})
    assert [r["time_ns"] for r in found] == sorted((r["time_ns"] for r in found), reverse=True)
    for row in found:
        op = -1 if row["op"] is None else int(row["op"])
        mine = [v for x, y, v in rows if (x, max(y, -1)) == (int(row["kernel"]), op)]
        assert (row["call_count"], row["time_ns"]) == (len(mine), sum(mine))
        assert (row["min_ns"], row["max_ns"]) == (min(mine), max(mine))
        assert abs(row["median_ns"] - np.median(mine)) <= 1
        std = np.std(mine, ddof=1) if len(mine) > 1 else 0
        assert row["std_ns"] == pytest.approx(std, rel=1e-6, abs=1)


def test_every_view_is_declared_and_its_empty_run_is_valid() -> None:
    empty = attributed(spans(), kernels())
    for name in VIEWS:
        assert view(empty, name).schema.names == [c.name for c in VIEWS[name].columns]
    with pytest.raises(UsageError, match="one of"):
        view(empty, "nothing")


# Published by TraceLens for traces of the catalogue: what differs, and why, is in the docs.
_EQUAL = (
    "h100-bert-small-inference",
    "h100-qwen1.5-0.5b-inference",
    "mi300x-bert-small-inference",
    "mi300x-qwen1.5-0.5b-inference",
    "mi300x-torch-compile-triton",
)


@pytest.mark.skipif(find_traces_dir() is None, reason="real traces not present")
@pytest.mark.parametrize("name", _EQUAL)
def test_operations_equal_tracelens_ops_unique_args(traces_dir: Path, name: str) -> None:
    file = traces_dir / "tracelens" / "reference-reports" / name / "ops_unique_args.csv.gz"
    published: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0, 0.0])
    for row in csv.DictReader(io.StringIO(gzip.decompress(file.read_bytes()).decode())):
        arguments = (row["Input Dims"], row["Input type"], row["Concrete Inputs"])
        found = published[(row["name"], *(json.dumps(literal_eval(a)) for a in arguments))]
        found[0] += int(row["operation_count"])
        found[1] += float(row["total_direct_kernel_time_sum"])
    ours: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0, 0.0])
    for row in rows_of(
        pipeline.attribute(traces_dir / "tracelens" / f"{name}.json.gz"), "operations"
    ):
        keys = (row["input_dims"], row["input_types"], row["concrete_inputs"])
        found = ours[(row["op"], *(json.dumps(json.loads(k)) for k in keys))]
        found[0] += row["call_count"]
        found[1] += row["time_ns"] / 1e3
    assert set(ours) == set(published)
    for key, (count, time_us) in published.items():
        assert ours[key][0] == count, key
        # Their microseconds are doubles of Unix time: good to a quarter of one per event.
        assert ours[key][1] == pytest.approx(time_us, rel=1e-5, abs=0.01 + 0.25 * 0.001 * count), (
            key
        )


def test_a_recorded_run_keeps_what_was_measured_of_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    from chopper.recording.finish import embed_calibration

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    kept = calibration.from_manifest(measured(500e12, "bf16"))
    assert kept is not None
    calibration.save(msgspec.structs.replace(kept, hostname=socket.gethostname()))
    parts = [
        m.RankManifest(
            rank=rank,
            hostname=socket.gethostname(),
            device_id=rank,
            devices=[m.Device(device_id=0, name=H100), m.Device(device_id=1, name="Tomorrow 1")],
        )
        for rank in range(2)
    ]
    embed_calibration(parts)
    # Measured alone, and it holds beside others; another device's numbers are not taken.
    assert parts[0].calibration is not None
    assert parts[0].calibration["device_name"] == H100
    assert parts[1].calibration is None
