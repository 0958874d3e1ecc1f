"""Tables of spans: jobs small enough to work out by hand, and two published ones."""

from __future__ import annotations

import csv
import json
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.trace.columns import ints
from chopper.collectors.formats.spans.columns import operation_of
from chopper.errors import InputError
from tests.command import run
from tests.span_jobs import STEPS, Row, as_csv, job, parquet, renamed


@pytest.fixture
def attributed(tmp_path: Path) -> Attribution:
    return pipeline.attribute(parquet(tmp_path, job()))


def test_every_worker_is_a_rank_whose_causes_sum_to_the_steps(attributed: Attribution) -> None:
    assert [r.rank for r in attributed.ranks] == [0, 4, 8, 12]
    windows = attributed.all_steps.windows
    assert sorted({*ints(windows, "number").tolist()}) == [*STEPS]
    # Each step lasts 14 s on all of them, though those of the first stage are done after 13.75 s.
    assert {*(ints(windows, "end_ns") - ints(windows, "start_ns")).tolist()} == {14 * 10**9}
    assert int(ints(attributed.all_steps.pieces, "time_ns").sum()) == 4 * 2 * 14 * 10**9


def test_all_communication_is_matched_though_sends_end_before_they_are_received(
    attributed: Attribution,
) -> None:
    assert attributed.coverage["collectives_matched_ratio"] == 1.0
    table = attributed.all_steps.communication.to_pylist()
    instances = defaultdict(set)
    for row in table:
        instances[row["instance_id"]].add((row["rank"], row["ranks"]))
    sizes = sorted(
        (len(members), ranks) for of in instances.values() for members, ranks in [(of, 0)]
    )
    # Per step: four messages of each replica, a sum of gradients per stage, one clip of all.
    assert [size for size, _ in sizes] == [2] * (2 * (2 * 4 + 2)) + [4] * 2


def test_who_comes_late_to_a_sum_of_gradients_makes_its_replicas_wait(
    attributed: Attribution,
) -> None:
    # Ranks 0 and 8 are the first replica, which comes 0.5 s late in both steps.
    assert waits_ns(attributed) == {0: 0, 4: 10**9, 8: 0, 12: 10**9}


def waits_ns(run: Attribution) -> dict[int, int]:
    """Time that each rank waits in the sum of gradients."""
    waits = {rank.rank: 0 for rank in run.ranks}
    for row in run.all_steps.pieces.to_pylist():
        if row["cause"] == "communication.wait" and row["kernel"] == "grads-reduce-scatter":
            waits[row["rank"]] += row["time_ns"]
    return waits


def test_events_know_stage_micro_batch_pass_and_phase(attributed: Attribution) -> None:
    link = attributed.links[8]
    names = attributed.joined[8].device_event["name"].to_pylist()
    columns = ("stage_index", "micro_batch_index", "action", "phase")
    told = {
        (name, *values)
        for name, *values in zip(names, *(link[c].to_pylist() for c in columns), strict=True)
    }
    assert told == {
        ("forward-compute", 1, 0, "forward", "forward"),
        ("forward-compute", 1, 1, "forward", "forward"),
        ("forward-recv", 1, None, "forward", "forward"),
        ("backward-compute", 1, 0, "backward", "backward"),
        ("backward-compute", 1, 1, "backward", "backward"),
        ("backward-send", 1, None, "backward", "backward"),
        ("grads-reduce-scatter", 1, None, None, "other"),
        ("optimizer-clip-main-grad", 1, None, None, "optimizer"),
        ("optimizer", 1, None, None, "optimizer"),
    }


def test_workers_know_their_place(attributed: Attribution) -> None:
    places = {
        part.rank: {c.dimension: (c.index, c.size, c.source) for c in part.coordinates}
        for part in attributed.recording.manifest.ranks
    }
    stage, replica = "column stage of job.parquet", "column dp_rank of job.parquet"
    assert places == {
        0: {"pipeline": (0, 2, stage), "data": (0, 2, replica)},
        4: {"pipeline": (0, 2, stage), "data": (1, 2, replica)},
        8: {"pipeline": (1, 2, stage), "data": (0, 2, replica)},
        12: {"pipeline": (1, 2, stage), "data": (1, 2, replica)},
    }


def test_idle_time_is_not_called_launch_latency(attributed: Attribution) -> None:
    idle = {
        row["cause"]: row["time_ns"]
        for row in attributed.all_steps.pieces.to_pylist()
        if row["cause"].startswith("idle.")
    }
    assert idle
    others = {cause for cause in idle if not cause.startswith("idle.pipeline.")}
    assert others <= {"idle.unlaunched", "idle.no_step"}


def test_what_spans_do_not_tell_is_named(attributed: Attribution) -> None:
    said = next(f.message for f in attributed.findings if f.code == "trace.not_recorded")
    assert "launches, kernels within an operation, FLOP and bytes, clocks" in said
    assert "the ranks between those of its workers" in said


COLUMNS = {
    "rank": "who",
    "step": "it",
    "optype": "what",
    "start_ts": "t0",
    "duration": "took",
    "stage": "place",
    "dp_rank": "copy",
    "mb_id": "piece",
    "seq_id": "nth",
}
MAP = (
    "rank=who,step=it,op=what,start=t0,duration=took,stage=place,data_rank=copy,micro_batch=piece,"
    "sequence=nth"
)


def same(a: Attribution, b: Attribution) -> None:
    """Both have the same device events, places in the pipeline, and matched communication."""
    for rank in a.links:
        for one, other in (
            (a.joined[rank].device_event, b.joined[rank].device_event),
            (a.links[rank], b.links[rank]),
        ):
            assert one.to_pylist() == other.to_pylist()
    assert a.all_steps.communication.to_pylist() == b.all_steps.communication.to_pylist()


def test_mapped_columns_of_a_csv_are_those_that_names_tell(
    tmp_path: Path, attributed: Attribution
) -> None:
    columns = dict(part.split("=") for part in MAP.split(","))
    path = as_csv(tmp_path, renamed(job(), COLUMNS, 1e3))
    same(attributed, pipeline.attribute(path, columns={**columns, "unit": "ms"}))
    same(attributed, pipeline.attribute(as_csv(tmp_path, job(), "same.csv")))


def test_a_unit_in_a_heading_counts(tmp_path: Path, attributed: Attribution) -> None:
    names = {"start_ts": "start_ms", "duration": "Duration (ms)"}
    same(attributed, pipeline.attribute(as_csv(tmp_path, renamed(job(), names, 1e3))))


def test_events_of_chrome_are_spans_where_they_are_mapped(
    tmp_path: Path, attributed: Attribution
) -> None:
    events = [
        {
            "ph": "X",
            "name": row["optype"],
            "ts": row["start_ts"] * 1e6,
            "dur": row["duration"] * 1e6,
            "pid": row["rank"],
            "tid": 0,
            "args": {n: row[n] for n in ("step", "stage", "dp_rank", "mb_id", "seq_id")},
        }
        for row in job()
    ]
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}))
    same(attributed, pipeline.attribute(path, columns={"rank": "pid"}))


def test_a_file_for_each_worker_is_one_job(tmp_path: Path, attributed: Attribution) -> None:
    folder = tmp_path / "timers"
    folder.mkdir()
    for rank in (0, 4, 8, 12):
        rows = [row for row in job() if row["rank"] == rank]
        for row in rows:
            del row["rank"]
        as_csv(folder, rows, f"timers-rank{rank}.csv")
    same(attributed, pipeline.attribute(folder))


def test_times_that_go_on_from_step_to_step_stay_where_they_are(tmp_path: Path) -> None:
    rows = job()
    for row in rows:
        row["start_ts"] += 1.7e9 + (20.0 if row["step"] == STEPS[1] else 0.0)
    windows = pipeline.attribute(as_csv(tmp_path, rows)).all_steps.windows
    # A worker's own step ends with its last span; the next one begins there.
    ends = {(r["rank"], r["number"]): r["end_ns"] for r in windows.to_pylist()}
    assert ends[0, 7] == 1_700_000_013_750_000_000
    assert ends[12, 9] == 1_700_000_034_000_000_000


def test_a_clock_that_disagrees_is_corrected(tmp_path: Path, attributed: Attribution) -> None:
    rows = [
        {**row, "start_ts": row["start_ts"] + (3.0 if row["rank"] == 12 else 0.0)} for row in job()
    ]
    run = pipeline.attribute(parquet(tmp_path, rows))
    said = [f for f in run.findings if f.code == "run.clock_offset"]
    assert [f.rank for f in said] == [12]
    assert "3000000 µs ahead of rank 0's" in said[0].message
    assert waits_ns(run) == waits_ns(attributed)


def test_a_named_group_is_of_the_ranks_that_name_it(tmp_path: Path) -> None:
    rows = [
        {"rank": rank, "op": op, "start_ms": 10 * n + rank, "dur_ms": 9 - rank, "group": group}
        for rank in range(3)
        for n, (op, group) in enumerate([("compute", None), ("exchange", "pair" if rank else "me")])
    ]
    run = pipeline.attribute(parquet(tmp_path, rows))
    found = {(r["rank"], r["group"], r["ranks"]) for r in run.communication.to_pylist()}
    assert found == {(0, "me", "0"), (1, "pair", "1-2"), (2, "pair", "1-2")}


def test_virtual_stages_are_counted(tmp_path: Path) -> None:
    rows = [
        {"rank": s, "stage": s, "op": "F", "start_s": c, "dur_s": 0.5, "chunk": c, "mb": 0}
        for s in range(2)
        for c in range(2)
    ]
    run = pipeline.attribute(parquet(tmp_path, rows))
    assert {r: run.links[r]["stage_index"].to_pylist() for r in (0, 1)} == {0: [0, 2], 1: [1, 3]}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("forward-compute", ("forward", None, None)),
        ("bwd_step", ("backward", None, None)),
        ("B", ("backward", None, None)),
        ("backward-input", ("backward_input", None, None)),
        ("wgrad", ("backward_weight", None, None)),
        ("forward-send", ("forward", "send", "next")),
        ("forward_recv", ("forward", "recv", "previous")),
        ("send_backward", ("backward", "send", "previous")),
        ("backward-recv", ("backward", "recv", "next")),
        ("params-all-gather", (None, "allgather", "replicas")),
        ("grads-reduce-scatter", (None, "reducescatter", "replicas")),
        ("embedding-grads-all-reduce", (None, "allreduce", "ends")),
        # Its members are tensor-parallel ranks, which are not in the file.
        ("layernorm-grads-all-reduce", (None, "allreduce", None)),
        ("moe_alltoall", (None, "alltoall", None)),
        ("optimizer-clip-main-grad", (None, "allreduce", "all")),
        ("optimizer", (None, None, None)),
        ("gc", (None, None, None)),
    ],
)
def test_names_of_operations_tell_pass_and_communication(name: str, told: tuple[Any, ...]) -> None:
    assert tuple(operation_of(name)) == told


def moved(rows: list[Row], **changes: Any) -> list[Row]:
    return [{**row, **changes} if row["step"] == STEPS[1] else row for row in rows]


@pytest.mark.parametrize(
    ("rows", "columns", "said"),
    [
        (
            renamed(job(), {"rank": "who", "optype": "what"}),
            None,
            "do not tell rank and op of spans; found dp_rank, stage, who, step, what, start_ts, "
            "duration, seq_id …; expected names as rank: rank, globalrank …; op: op, optype …; "
            "name them: --map rank=COLUMN,op=COLUMN",
        ),
        (job(), {"rank": "worker"}, "no column 'worker' (--map rank=worker); found dp_rank, stage"),
        (
            job(),
            {"unit": "ns"},
            "spans last 1 ns at the median and 2 ns at most",
        ),
        (renamed(job(), {}, 1e-7), None, "name the unit of the times: --map unit=s"),
        (renamed(job(), {}, 1e6), None, "name the unit of the times: --map unit=s"),
        (
            [{**row, "start_ts": int(row["start_ts"]), "duration": 1} for row in job()],
            None,
            "column start_ts holds whole numbers and names no unit",
        ),
        (
            [{**row, "stage": 1} if row["step"] == STEPS[1] else row for row in job()],
            None,
            "rank 0 is in stage 0, and from step 9 on in stage 1: expected one layout",
        ),
        ([{**row, "step": "first"} for row in job()], None, "column step holds what is no whole"),
        ([{**row, "rank": -3} for row in job()], None, "without a single usable row"),
        ([{**row, "rank": 1 << 40} for row in job()], None, "rank 1099511627776, expected 0 to"),
        ([{**row, "duration": None} for row in job()], None, "column duration holds null"),
    ],
)
def test_what_cannot_be_right_is_one_line(
    tmp_path: Path, rows: list[Row], columns: dict[str, str] | None, said: str
) -> None:
    path = parquet(tmp_path, rows)
    with pytest.raises(InputError) as refused:
        pipeline.attribute(path, columns=columns)
    assert said in str(refused.value)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_rows_without_a_time_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = job()
    rows[3]["start_ts"] = float("nan")
    rows[5]["duration"] = -1.0
    run = pipeline.attribute(parquet(tmp_path, rows))
    said = next(f for f in run.findings if f.code == "trace.damaged_table")
    assert (said.count, "2 rows without operation" in said.message) == (2, True)


def test_a_worker_that_the_layout_has_and_the_file_has_not_is_named(tmp_path: Path) -> None:
    run = pipeline.attribute(parquet(tmp_path, [row for row in job() if row["rank"] != 4]))
    said = next(f.message for f in run.findings if f.code == "run.ranks_missing")
    assert "no spans of 1 worker of the 4" in said
    assert "stage 0 of data rank 1" in said


def test_the_command_takes_a_map_and_proposes_it_again(tmp_path: Path) -> None:
    path = as_csv(tmp_path, renamed(job(), COLUMNS, 1e3))
    shown = run("analyze", path, "--map", MAP, "--map", "unit=ms", "--json")
    assert shown.code == 0
    assert len(json.loads(shown.out)["ranks"]) == 4
    shown = run("analyze", path, "--map", MAP, "--map", "unit=ms")
    assert f"chopper report {path} --map {MAP} --map unit=ms" in shown.err
    shown = run(
        "query", path, "--map", f"{MAP},unit=ms", "SELECT count(*) AS n FROM pipeline_action"
    )
    assert "88" in shown.out
    imported = tmp_path / "imported"
    assert run("import", path, "--map", f"{MAP},unit=ms", "-o", imported).code == 0
    same(pipeline.attribute(parquet(tmp_path, job())), pipeline.attribute(imported))


def test_a_csv_that_may_be_spans_says_which_columns_to_map(tmp_path: Path) -> None:
    path = as_csv(tmp_path, renamed(job(), {"rank": "who", "duration": "took"}))
    said = "a CSV of an unknown kind (spans whose rank and duration no name tells? --map "
    with pytest.raises(InputError, match=re.escape(f"{said}rank=COLUMN,duration=COLUMN)")):
        pipeline.read(path)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("rank", "--map 'rank': expected FIELD=COLUMN, as rank=worker"),
        ("rnak=a", "no field of spans is called 'rnak'; did you mean rank?"),
        ("rank=a,rank=b", "--map: rank twice, as a and b; name one"),
        ("unit=minutes", "no unit of times is called 'minutes'"),
    ],
)
def test_a_map_that_means_nothing_is_refused(tmp_path: Path, typed: str, said: str) -> None:
    shown = run("analyze", parquet(tmp_path, job()), "--map", typed)
    assert shown.code == 2
    assert said in shown.line


TIMERS = {
    "total": 50.0,
    "memory": 12.5,
    "fwd_start": [0.0, 10.0],
    "fwd_end": [10.0, 20.0],
    "bwd_start": [20.0, 40.0],
    "bwd_end": [40.0, 45.0],
}


def test_timers_of_a_pipeline_are_spans_of_its_stages(tmp_path: Path) -> None:
    later = {name: [t + 5 for t in v] if isinstance(v, list) else v for name, v in TIMERS.items()}
    for stage, timers in enumerate((TIMERS, {**later, "total": 40.0})):
        text = json.dumps({"1": timers, "2": timers})
        (tmp_path / f"pp_rank_{stage}.json").write_text(text)
    (tmp_path / "config.json").write_text(json.dumps({"pp_size": 2, "num_mbs": 2}))
    run = pipeline.attribute(tmp_path)
    assert not [f for f in run.findings if f.code == "run.file_left_out"]
    windows = run.all_steps.windows
    # Either iteration takes as long as the stage that takes longest.
    assert {*(ints(windows, "end_ns") - ints(windows, "start_ns")).tolist()} == {50_000_000}
    link = run.links[1]
    assert link["stage_index"].to_pylist() == [1] * 8
    assert link["micro_batch_index"].to_pylist() == [0, 1, 0, 1] * 2
    assert idle_ratio(run, 1) == [pytest.approx(0.1)] * 2
    counter = run.recording.table(0, "counter").to_pylist()
    assert [(row["name"], row["value"]) for row in counter] == [("memory", 12.5)] * 2


def idle_ratio(run: Attribution, rank: int) -> list[float]:
    """Share of each window in which a rank computed nothing."""
    pieces, windows = run.all_steps.pieces, run.all_steps.windows
    busy: defaultdict[int, int] = defaultdict(int)
    for row in pieces.to_pylist():
        if row["rank"] == rank and not row["cause"].startswith("idle."):
            busy[row["step_index"]] += row["time_ns"]
    return [
        1 - busy[row["step_index"]] / (row["end_ns"] - row["start_ns"])
        for row in windows.to_pylist()
        if row["rank"] == rank
    ]


measured = pytest.mark.skipif(
    "CHOPPER_MEASURED" not in os.environ, reason="CHOPPER_MEASURED: no published jobs"
)


@measured
@pytest.mark.parametrize(
    ("name", "ranks", "rows_count", "step_s"),
    [("AR", range(0, 64, 4), 117_216, 46.649), ("ST", range(8), 6_784, 2.214)],
)
def test_published_jobs_are_attributed_and_matched(
    name: str, ranks: range, rows_count: int, step_s: float
) -> None:
    path = Path(os.environ["CHOPPER_MEASURED"]) / "straggler-analysis" / f"trace-{name}.parquet"
    run = pipeline.attribute(path)
    assert [r.rank for r in run.ranks] == [*ranks]
    assert sum(j.device_event.num_rows for j in run.joined.values()) == rows_count
    windows = run.all_steps.windows
    length_ns = ints(windows, "end_ns") - ints(windows, "start_ns")
    assert int(ints(run.all_steps.pieces, "time_ns").sum()) == int(length_ns.sum())
    assert length_ns.mean() / 1e9 == pytest.approx(step_s, abs=0.001)
    # All but the all-reduce of layer norms, whose members the file does not have.
    names = {r: j.device_event["name"].to_pylist() for r, j in run.joined.items()}
    unmatched = [
        names[row["rank"]][row["event_row"]]
        for row in run.all_steps.communication.to_pylist()
        if row["instance_id"] is None
    ]
    assert {*unmatched} == {"layernorm-grads-all-reduce"}
    assert len(unmatched) == windows.num_rows


@measured
def test_idle_time_of_a_published_pipeline_is_its_bubble() -> None:
    folder = Path(os.environ["CHOPPER_MEASURED"]) / "primus-pipeline" / "pp8"
    run = pipeline.attribute(folder)
    with (folder / "bubble-truth.csv").open() as file:
        truth = [*csv.DictReader(file)]
    assert len(truth) == 20
    for rank in range(8):
        bubble = [float(row[f"bubble_percent_rank{rank}"]) for row in truth]
        found = [100 * ratio for ratio in idle_ratio(run, rank)]
        assert np.abs(np.array(found) - bubble).max() < 0.5
