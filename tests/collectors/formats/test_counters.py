"""Tables of counters that other tools wrote: every layout, and what may be wrong with them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from chopper import pipeline
from chopper.analyzers.causes.counters import join_counters
from chopper.collectors.formats import telemetry_csv
from chopper.collectors.formats.cleaning import integer, number
from chopper.collectors.formats.counters import measured, read_counters, sniff
from chopper.collectors.formats.unpack import head_of
from chopper.errors import InputError
from chopper.ingest import write_run
from chopper.storage.run import Run
from chopper.tables import TABLES
from tests.kineto_writer import small_trace

ROCPROFV3 = """\
"Correlation_Id","Dispatch_Id","Agent_Id","Queue_Id","Process_Id","Thread_Id","Grid_Size","Kernel_Id","Kernel_Name","Workgroup_Size","Counter_Name","Counter_Value"
1,1,"Agent 4",1,9,9,64,16,"gemm",64,"SQ_INSTS_VALU_MFMA_MOPS_F32",128
1,1,"Agent 4",1,9,9,64,16,"gemm",64,"GRBM_GUI_ACTIVE",16000
3,3,"Agent 4",1,9,9,64,17,"void add(float*, float*)",64,"GRBM_GUI_ACTIVE",17000
2,2,"Agent 4",1,9,9,64,16,"gemm",64,"SQ_INSTS_VALU_MFMA_MOPS_F32",256
"""
WIDE = """\
Index,KernelName,gpu-id,grd,wgr,sig,SQ_WAVES,TCC_HIT[0],MfmaUtil,BeginNs,EndNs
0,"gemm [clone .kd]",8,64,64,0x0,4,1,50.5,100,200
1,"add.kd",8,64,64,0x0,8,,0,300,400
"""
NCU_RAW = """\
==PROF== Connected to process 12 (/usr/bin/python3)
loss 1.23, step 4
==PROF== Disconnected from process 12
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",\
"Grid Size","Device","CC","dram__bytes.sum","gpu__time_duration.sum",\
"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
"","","","","","","","","","","","Kbyte","usecond","%"
"0","12","python3","h","gemm","1","7","(256, 1, 1)","(64, 1, 1)","0","9.0","10,240.5","12.5","62.50"
"1","12","python3","h","add","1","7","(256, 1, 1)","(64, 1, 1)","0","9.0","1","2","n/a"
"""
NCU_DETAILS = """\
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",\
"Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","12","python3","h","gemm","1","7","(256, 1, 1)","(64, 1, 1)","0","9.0",\
"Command line profiler metrics","sm__cycles_active.avg","cycle","1,000"
"0","12","python3","h","gemm","1","7","(256, 1, 1)","(64, 1, 1)","0","9.0",\
"Command line profiler metrics","sm__cycles_elapsed.avg","Kcycle","2"
"""


def rows(tmp_path, text, name="counters.csv"):
    path = tmp_path / name
    data = text.encode()
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert sniff(head_of(path))
    table, odd = read_counters(path)
    assert odd == []
    assert table.schema.equals(TABLES["kernel_counter"].arrow)
    keys = ("dispatch_id", "kernel", "occurrence_id", "device", "counter", "value", "unit")
    return [tuple(row[k] for k in keys) for row in table.to_pylist()]


@pytest.mark.parametrize("name", ["c.csv", "c.csv.gz"])
def test_rocprofv3(tmp_path, name):
    assert rows(tmp_path, ROCPROFV3, name) == [
        (1, "gemm", 0, "Agent 4", "SQ_INSTS_VALU_MFMA_MOPS_F32", 128.0, None),
        (1, "gemm", 0, "Agent 4", "GRBM_GUI_ACTIVE", 16000.0, None),
        (2, "gemm", 1, "Agent 4", "SQ_INSTS_VALU_MFMA_MOPS_F32", 256.0, None),
        (3, "void add(float*, float*)", 0, "Agent 4", "GRBM_GUI_ACTIVE", 17000.0, None),
    ]


def test_a_column_for_each_counter(tmp_path):
    assert rows(tmp_path, WIDE) == [
        (0, "gemm [clone .kd]", 0, "8", "SQ_WAVES", 4.0, None),
        (0, "gemm [clone .kd]", 0, "8", "TCC_HIT[0]", 1.0, None),
        (0, "gemm [clone .kd]", 0, "8", "MfmaUtil", 50.5, None),
        (1, "add.kd", 0, "8", "SQ_WAVES", 8.0, None),
        (1, "add.kd", 0, "8", "TCC_HIT[0]", None, None),
        (1, "add.kd", 0, "8", "MfmaUtil", 0.0, None),
    ]


def test_ncu_raw_page_after_the_programs_own_output(tmp_path):
    busy = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
    assert rows(tmp_path, NCU_RAW) == [
        (0, "gemm", 0, "0", "dram__bytes.sum", 10_240_500.0, "byte"),
        (0, "gemm", 0, "0", "gpu__time_duration.sum", pytest.approx(12.5e-6), "second"),
        (0, "gemm", 0, "0", busy, 62.5, "%"),
        (1, "add", 0, "0", "dram__bytes.sum", 1000.0, "byte"),
        (1, "add", 0, "0", "gpu__time_duration.sum", pytest.approx(2e-6), "second"),
        (1, "add", 0, "0", busy, None, "%"),
    ]


def test_ncu_details_page(tmp_path):
    assert rows(tmp_path, NCU_DETAILS) == [
        (0, "gemm", 0, "0", "sm__cycles_active.avg", 1000.0, "cycle"),
        (0, "gemm", 0, "0", "sm__cycles_elapsed.avg", 2000.0, "cycle"),
    ]


@pytest.mark.parametrize(
    ("cell", "unit", "expected"),
    [
        ("10,240,000", "", (10_240_000.0, None)),
        ("27.595.520", "byte", (27_595_520.0, "byte")),
        ("1.234,5", "", (1234.5, None)),
        ("65,77", "%", (65.77, "%")),
        ("117.344", "ns", (pytest.approx(117.344e-9), "second")),
        ("1.5", "Gbyte/s", (1.5e9, "byte/s")),
        ("4.0e-05", "second", (4e-5, "second")),
        ("(!) n/a", "", (None, None)),
        ("inf", "", (None, None)),
        ("seven", "inst", (None, "inst")),
    ],
)
def test_numbers_as_tools_print_them(cell, unit, expected):
    assert measured(cell, unit) == expected


def test_damaged_tables_are_used_as_far_as_they_go(tmp_path):
    path = tmp_path / "cut.csv"
    path.write_text(ROCPROFV3.rstrip()[:-60])
    table, odd = read_counters(path)
    assert table.num_rows == 3
    assert odd == ["cut.csv: 1 rows are truncated or name no kernel, and are ignored"]
    path.write_text(ROCPROFV3.replace("16000", "many"))
    table, odd = read_counters(path)
    assert table.num_rows == 4
    assert odd == ["cut.csv: 1 values are not numbers and count as not measured"]
    packed = tmp_path / "cut.csv.gz"
    packed.write_bytes(gzip.compress(ROCPROFV3.encode())[:-12])
    table, odd = read_counters(packed)
    assert table.num_rows > 0
    assert "ends in the middle" in odd[0]


@pytest.mark.parametrize(
    "text", ["", "a,b\n1,2\n", "Kernel_Name,Grid_Size\ngemm,64\n", "\0\0,\0\n"]
)
def test_other_tables_are_refused(tmp_path, text):
    path = tmp_path / "other.csv"
    path.write_text(text)
    assert not sniff(head_of(path))
    with pytest.raises(InputError, match="not a table of counters"):
        read_counters(path)


def test_counters_of_the_catalogue(traces_dir):
    sample = traces_dir / "rocprofiler-sdk" / "docs-sample-counter_collection.csv"
    table, odd = read_counters(sample)
    assert odd == []
    assert table.num_rows == 7
    assert set(table["counter"].to_pylist()) == {"SQ_WAVES"}
    assert set(table["value"].to_pylist()) == {16384.0}
    wide = traces_dir / "rocprofiler-compute" / "mi300x-dispatch0-pmc_perf.csv.gz"
    table, odd = read_counters(wide)
    assert odd == []
    assert set(table["kernel"].to_pylist()) == {
        "vecCopy(double*, double*, double*, int, int) (.kd)"
    }
    waves = [r["value"] for r in table.to_pylist() if r["counter"] == "SQ_WAVES"]
    assert waves == [16384.0] * 3
    tables = [p for p in traces_dir.rglob("*.csv*") if sniff(head_of(p))]
    # Kernel traces, reports and logs of telemetry are no tables of counters.
    assert {p.parent.name for p in tables} == {"rocprofiler-sdk", "rocprofiler-compute"}


# ---------------------------------------------------------------- beside a trace


def beside(tmp_path, text=WIDE, name="counters.csv", ranks=1):
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in range(ranks):
        trace = small_trace(rank=rank, world=ranks, pid=100 + rank)
        (folder / f"rank{rank}.json").write_bytes(trace.encode())
    (folder / name).write_text(text)
    return folder


# The trace has two steps with one gemm and one add each.
FITS = WIDE + '2,"gemm",8,64,64,0x0,4,1,30,500,600\n3,"add",8,64,64,0x0,8,2,0,700,800\n'


def test_counters_beside_a_trace_in_a_directory(tmp_path):
    folder = beside(tmp_path, FITS)
    (folder / "smi.csv").write_text("timestamp,power\n1,2\n")  # something else is left alone
    run = pipeline.read(folder)
    found = join_counters(run.table(0, "device_event"), run.table(0, "kernel_counter"))
    names = run.table(0, "device_event")["name"].to_pylist()
    busy: dict[str, list[float]] = {n: [] for n in ("gemm", "add")}
    for name, ratio in zip(names, found.tensor_busy_ratio, strict=True):
        if name in busy:
            busy[name].append(round(float(ratio), 6))
    assert busy == {"gemm": [0.505, 0.3], "add": [0.0, 0.0]}
    assert found.findings == []


def test_counters_named_beside_a_trace_stay_in_the_run(tmp_path):
    folder = beside(tmp_path, FITS)
    target = tmp_path / "run"
    target.mkdir()
    write_run([folder / "rank0.json", folder / "counters.csv"], target)
    kept = Run.open(target).table(0, "kernel_counter")
    assert kept.equals(pipeline.read(folder).table(0, "kernel_counter"))
    assert kept.num_rows == 12


def test_counters_of_one_of_several_ranks(tmp_path):
    run = pipeline.read(beside(tmp_path, FITS, "counters-rank1.csv", ranks=2))
    assert run.table(0, "kernel_counter").num_rows == 0
    assert run.table(1, "kernel_counter").num_rows == 12


def test_counters_of_nobody_knows_which_rank(tmp_path):
    with pytest.raises(InputError, match=r"counters of which rank\? The traces are of 2 ranks"):
        pipeline.read(beside(tmp_path, FITS, ranks=2))


def test_counters_alone_are_a_trace_where_they_say_when_their_kernels_ran(tmp_path):
    folder = beside(tmp_path)
    run = pipeline.read(folder / "counters.csv")
    assert run.table(0, "kernel_counter").num_rows
    dispatches = set(run.table(0, "kernel_counter")["dispatch_id"].to_pylist())
    assert run.table(0, "device_event").num_rows == len(dispatches)


def test_counters_alone_without_times(tmp_path):
    folder = beside(tmp_path, NCU_RAW)
    with pytest.raises(InputError, match="alone contain no times"):
        pipeline.read(folder / "counters.csv")


def test_another_csv_that_is_named(tmp_path):
    folder = beside(tmp_path, "a,b\n1,2\n")
    with pytest.raises(InputError, match="a CSV of an unknown kind"):
        pipeline.read([folder / "rank0.json", folder / "counters.csv"])


def test_damage_is_said_with_the_run(tmp_path):
    run = pipeline.read(beside(tmp_path, FITS.replace("50.5", "much")))
    findings = run.part(0).findings
    assert [f.code for f in findings] == ["counters.damaged"]


@pytest.mark.parametrize("number", ["1" * 20, "1e308", "9" * 400, "²"])
def test_numbers_of_dispatches_beyond_64_bits_are_rows_that_cannot_be_read(tmp_path, number):
    text = WIDE.replace('\n1,"add.kd"', f'\n{number},"add.kd"')
    folder = beside(tmp_path, text)
    run = pipeline.read([folder / "rank0.json", folder / "counters.csv"])
    dispatches = set(run.table(0, "kernel_counter")["dispatch_id"].to_pylist())
    assert dispatches == {0}


@pytest.mark.parametrize(
    ("written", "dispatch"),
    [
        ("9007199254740993", 9007199254740993),
        ("7.0", 7),
        ("18446744073709551615", None),
        ("1e300", None),
        ("1_0", None),
        ("-1", None),
        ("", None),
    ],
)
def test_a_dispatch_is_exact_or_left_out(
    written: str, dispatch: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "counters.csv"
    heading = "Dispatch_Id,Kernel_Name,Counter_Name,Counter_Value"
    path.write_text(f"{heading}\n5,k,SQ_WAVES,64\n{written},k,SQ_WAVES,64\n")
    table, odd = read_counters(path)
    expected = [5] if dispatch is None else sorted([5, dispatch])
    assert table["dispatch_id"].to_pylist() == expected
    assert bool(odd) == (dispatch is None)


def test_numbers_in_pythons_own_spelling_are_none() -> None:
    assert measured("1_000", "") == (None, None)
    assert telemetry_csv._decimal("1_0") is None
    assert integer("1_0") is None
    assert number("1_0.5") is None
