"""Traces that are read a stretch of their steps at a time: the same result as when read whole."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import chopper
from benchmarks._ranks import write_ranks
from chopper import limits, pipeline
from chopper.analyzers.attribution import Attribution
from chopper.collectors.formats.kineto import _native, chunked, read_trace
from chopper.engines import Serial
from chopper.errors import InputError, OutputError, UsageError
from chopper.ingest import filed, write_run
from chopper.ingest.filed import TraceTables, in_files
from chopper.reports import render
from chopper.storage import manifest as m
from chopper.storage import parquet, stretches
from chopper.storage.results import Folder
from chopper.views import view
from tests import command
from tests.attributing import recoverable_of

STEPS = 6
OF_COMPUTE = "compute."


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of two ranks, of six steps each."""
    directory = tmp_path_factory.mktemp("ranks")
    write_ranks(directory, 2, STEPS * 729)
    for file in directory.iterdir():
        file.write_bytes(gzip.compress(_with_more(gzip.decompress(file.read_bytes())), 1))
    return directory


def _with_more(text: bytes) -> bytes:
    """Add arguments of collectives, memory events and records of synchronization to a trace."""
    lines = []
    collective = b'"Collective name": "allreduce", "In msg nelems": 64, "Group size": 2'
    for number, line in enumerate(text.splitlines()):
        shown = re.search(rb'"cat": "(\w+)".*("pid": \d+, "tid": \d+, "ts": [\d.]+)', line)
        if shown is not None and b"nccl" in line and line.startswith(b'{"ph": "X"'):
            line = line.replace(b'"args": {', b'"args": {' + collective + b", ")
        lines.append(line)
        if shown is not None and number % 20 == 0:
            args = b'{"Device Type": 1, "Device Id": 0, "Addr": %d, "Bytes": 512}' % number
            lines.append(b'{"ph": "i", "name": "[memory]", %b, "args": %b},' % (shown[2], args))
        if shown is not None and shown[1] == b"cuda_runtime" and number % 50 == 0:
            lines.append(
                line.replace(b"cuda_runtime", b"cuda_sync").replace(
                    b'{"corr', b'{"stream": 7, "device": 0, "corr'
                )
            )
    return b"\n".join(lines)


@contextmanager
def all_large(rows: int = 3_000) -> Iterator[None]:
    """Read every trace in stretches of about so many rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "LARGE_TRACE_BYTES", 4)
        patch.setattr(_native, "_ALONE_BYTES", 300_000)
        patch.setattr(_native, "_TEXT_BYTES", 300_000)  # on more than one core
        patch.setattr(stretches, "STRETCH_ROWS", rows)
        yield


def attributed(source: Path | list[Path], steps: list[int] | None = None) -> Attribution:
    """Attribute a run whose traces were cut."""
    with all_large():
        run = pipeline.read(source)
        assert all(len(run.tables.stretches(rank)) > 1 for rank in run.ranks)
        return pipeline.attribute(run, steps=steps)


def times(run: Attribution) -> dict[str, int]:
    """Time of each cause that does not compare kernels with others of the same trace."""
    of = {row.id: row.time_ns for row in run.all_steps.leaves()}
    compute = sum(time for name, time in of.items() if name.startswith(OF_COMPUTE))
    return {n: t for n, t in of.items() if not n.startswith(OF_COMPUTE)} | {OF_COMPUTE: compute}


def plain(table: pa.Table) -> pa.Table:
    """A table whose texts are no dictionaries, which each file has in its own order."""
    return table.cast(parquet.plain(table.schema))


def cut_in_files(file: Path, folder: Folder) -> tuple[chunked.LargeTrace, TraceTables]:
    """Cut a trace; return it, and its tables in files."""
    with all_large():
        cut = chunked.read_or_cut(file, folder.path / "rows")
        assert isinstance(cut, chunked.LargeTrace)
        return cut, in_files(filed.cut(cut), folder, Serial())


def test_the_tables_of_all_stretches_are_those_of_the_file(ranks: Path, tmp_path: Path) -> None:
    file = ranks / "rank-0.json.gz"
    [whole] = read_trace(file)
    folder = Folder(tmp_path)
    with all_large():
        chunked.read_or_cut(file, folder.path / "rows")
    (folder.path / "rows" / "block-0").write_bytes(b"of an attempt that was killed")
    cut, together = cut_in_files(file, folder)
    assert len(cut.stretches) > 2
    assert cut.trace.tables["step"].equals(whole.tables["step"])
    assert cut.trace.span_ns == whole.span_ns
    for name, table in whole.tables.items():
        if table.num_rows:
            assert plain(together[name]).equals(plain(table)), name
            assert together.rows_count[name] == table.num_rows, name
    rows = [stretch.get()["device_event"].num_rows for stretch in together.stretches]
    assert all(0 < count < whole.tables["device_event"].num_rows for count in rows)


def test_one_rank_is_attributed_alike(ranks: Path) -> None:
    file = ranks / "rank-0.json.gz"
    whole, cut = pipeline.attribute(file), attributed(file)
    assert cut.all_steps.windows.equals(whole.all_steps.windows)
    assert cut.observed_ns == whole.observed_ns == sum(row.time_ns for row in cut.leaves())
    assert times(cut) == times(whole)
    added = {"run.some_closely", "compute.factors_exceed"}  # which compares kernels
    assert {f.code for f in cut.findings} - added == {f.code for f in whole.findings}
    assert cut.step_time().headline_ns == whole.step_time().headline_ns
    assert cut.coverage == whole.coverage


def test_ranks_are_matched_over_all_their_stretches(ranks: Path) -> None:
    files = sorted(ranks.iterdir())
    whole, cut = pipeline.attribute(files), attributed(files)
    assert cut.all_steps.windows.equals(whole.all_steps.windows)
    assert times(cut) == times(whole)
    assert cut.coverage["collectives_matched_ratio"] == 1


def test_details_are_of_the_stretch_with_the_median_step(ranks: Path) -> None:
    run = attributed(ranks / "rank-0.json.gz")
    assert run.part is not None
    numbers = run.detail.all_steps.windows["number"].to_pylist()
    assert 0 < len(numbers) < STEPS
    [said] = [f.message for f in run.findings if f.code == "run.some_closely"]
    assert f"{len(numbers)} of {STEPS} steps ({numbers[0]}-{numbers[-1]})" in said
    assert "--steps" in said
    # Their pieces name the steps of the rank, not those of the stretch.
    key = "USING (rank, step_index)"
    sql = (
        "SELECT selection.number, in_detail, sum(time_ns) AS caused_ns, "
        "any_value(end_ns - start_ns) AS observed_ns "
        f'FROM piece JOIN "window" {key} JOIN selection {key} GROUP BY ALL'
    )
    rows = [*chopper.query(run, sql)]
    assert sorted(row["number"] for row in rows) == numbers
    assert all(row["in_detail"] and row["caused_ns"] == row["observed_ns"] for row in rows)
    assert view(run, "kernels").num_rows


def test_a_cause_of_other_steps_has_a_reason_for_no_saving(tmp_path: Path) -> None:
    write_ranks(tmp_path, 1, STEPS * 729)
    lines = gzip.decompress((tmp_path / "rank-0.json.gz").read_bytes()).splitlines()
    first = next(n for n, line in enumerate(lines) if b'"cat": "kernel"' in line)
    lines[first] = re.sub(rb'"kernel", "name": "[^"]*"', b'"gpu_memset", "name": "X"', lines[first])
    (tmp_path / "changed.json").write_bytes(b"\n".join(lines))
    run = attributed(tmp_path / "changed.json")
    assert run.part is not None
    elsewhere = {row.id for row in run.causes()} - {row.id for row in run.detail.causes()}
    assert "copy.memset" in elsewhere
    saving = recoverable_of(run)
    assert {saving[name].step_ns for name in elsewhere} == {None}
    assert "the replay covers" in str(saving["copy.memset"].reason)
    said = render(run, "txt")
    assert "Memset" in said


def test_a_stretch_is_replayed_as_it_was(tmp_path: Path) -> None:
    write_ranks(tmp_path, 1, STEPS * 729)  # whose device is several steps behind the host
    run = attributed(tmp_path / "rank-0.json.gz")
    assert run.part is not None
    found = chopper.whatif(run, fix="communication")
    assert found.predicted_step_ns == found.observed_step_ns
    predicted, recorded = (
        answer.all_steps.windows.drop_columns(["step_index"])
        for answer in (found.attribution, run.detail)
    )
    assert predicted.equals(recorded)


def test_sql_joins_no_rows_of_a_stretch_with_rows_of_the_whole(ranks: Path) -> None:
    pytest.importorskip("duckdb", reason="DuckDB is not installed (chopper-profiler[query])")
    run = attributed(ranks / "rank-0.json.gz")
    assert chopper.query(run, "SELECT count(*) AS n FROM event_link").arrow()["n"][0].as_py() > 0
    with pytest.raises(InputError, match="too large to be held: rows are counted in the stretch"):
        chopper.query(run, "FROM event_link JOIN device_event USING (rank, row)")
    with pytest.raises(InputError, match="in critical_path_timeline, and in the whole trace in"):
        chopper.query(run, "FROM critical_path_timeline c JOIN device_event d ON event_row = d.row")
    by_time = (
        "FROM host_span h LEFT JOIN gap g ON h.rank = g.rank AND h.start_ns < g.end_ns LIMIT 9"
    )
    assert chopper.query(run, by_time).arrow().num_rows == 9


def test_sql_scans_the_files_of_a_large_import(imported: tuple[Path, Path]) -> None:
    pytest.importorskip("duckdb", reason="DuckDB is not installed (chopper-profiler[query])")
    spans = "SELECT (SELECT count(*) FROM host_span) AS spans, count(*) AS pieces FROM piece"
    with all_large():
        [found] = chopper.query(imported[1], spans).arrow().to_pylist()
    assert found["spans"] == pipeline.read(imported[0]).rows_count(0, "host_span") * 2
    assert found["pieces"]


def test_steps_choose_what_is_attributed(ranks: Path, tmp_path: Path) -> None:
    file = ranks / "rank-0.json.gz"
    both = [pipeline.attribute(file, steps=[4, 5]), attributed(file, steps=[4, 5])]
    for run in both:
        assert run.all_steps.windows["number"].to_pylist() == [4, 5]
    whole, cut = (run.all_steps.windows for run in both)
    assert cut.equals(whole)
    of_all = pipeline.attribute(file).all_steps.windows.slice(4)
    assert cut["start_ns"].to_pylist() == of_all["start_ns"].to_pylist()
    with pytest.raises(UsageError, match=r"no step 7,9 was traced: it has 0-5"):
        pipeline.attribute(file, steps=[9, 7])
    out = command.run("analyze", file, "--steps", "2-3", "--json").out
    assert json.loads(out)["steps"] == 2


def test_a_recorded_run_is_read_in_stretches(ranks: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "rank-00000"
    folder.mkdir(parents=True)
    shutil.copy(ranks / "rank-0.json.gz", folder / "trace.json.gz")
    part = m.RankManifest(rank=0, status="complete", traces=("trace.json.gz",))
    run = m.RunManifest(chopper_version="0", kind="recorded", name="run", ranks=[part])
    (folder / "manifest.json").write_bytes(msgspec.json.encode(part))
    (tmp_path / "run" / "manifest.json").write_bytes(msgspec.json.encode(run))
    whole, cut = pipeline.attribute(tmp_path / "run"), attributed(tmp_path / "run")
    assert whole.all_steps.windows.num_rows == STEPS
    assert cut.all_steps.windows.equals(whole.all_steps.windows)
    assert times(cut) == times(whole)


def test_what_has_no_steps_is_read_whole(ranks: Path, tmp_path: Path) -> None:
    text = gzip.decompress((ranks / "rank-0.json.gz").read_bytes())
    file = tmp_path / "rank-0.json"
    file.write_bytes(text.replace(b"ProfilerStep#", b"Iteration#"))
    with all_large():
        run = pipeline.read(file)
        assert not run.tables.stretches(0)
        cut = chunked.read_or_cut(file, tmp_path / "rows")
    assert isinstance(cut, list)
    [whole] = read_trace(file)
    for name, table in whole.tables.items():
        assert cut[0].tables[name].equals(table), name
        assert run.table(0, name).equals(table), name
    assert not [*(tmp_path / "rows").iterdir()]


def test_damaged_text_is_read_whole(ranks: Path, tmp_path: Path) -> None:
    packed = (ranks / "rank-0.json.gz").read_bytes()
    file = tmp_path / "rank-0.json.gz"
    file.write_bytes(packed[: len(packed) * 2 // 3])
    with all_large():
        read = chunked.read_or_cut(file, tmp_path / "rows")
    assert isinstance(read, list)
    [cut], [whole] = read, read_trace(file)
    assert {finding.code for finding in cut.findings} == {f.code for f in whole.findings}
    assert "trace.truncated" in {finding.code for finding in cut.findings}
    assert cut.tables["host_span"].equals(whole.tables["host_span"])


def test_damaged_events_are_counted_once(ranks: Path, tmp_path: Path) -> None:
    text = gzip.decompress((ranks / "rank-0.json.gz").read_bytes()).decode()
    head, events = text.split('"traceEvents": [\n')
    lines = events.split(",\n")
    lines[5::1000] = [line.replace('"dur": ', '"dur": -') for line in lines[5::1000]]
    lines[7::1000] = [line.replace('"ts": ', '"nots": ') for line in lines[7::1000]]
    operators = [i for i, line in enumerate(lines) if '"cpu_op"' in line]
    for i in operators[9::300]:
        lines[i] = lines[i].replace('"name": "', '"name": "a "')
    for i in operators[11::300]:
        lines[i] = lines[i].replace('"dur": ', '"dur" ')
    kernels = [i for i, line in enumerate(lines) if '"kernel"' in line and "nccl" not in line]
    for i in kernels[50::400]:
        lines[i] = re.sub(r'"dur": [\d.]+', '"dur": 3000000.000', lines[i])
    for i in kernels[51::400]:
        lines[i] = re.sub(r'"(ts|dur)": [\d.]+', r'"\1": 0', lines[i])
    file = tmp_path / "rank-0.json"
    file.write_text(head + '"traceEvents": [\n' + ",\n".join(lines))
    [whole] = read_trace(file)
    cut, together = cut_in_files(file, Folder(tmp_path))
    counted = [{f.code: f.count for f in trace.findings} for trace in (cut.trace, whole)]
    assert counted[0] == counted[1]
    assert {
        "event.negative_duration",
        "event.without_ts",
        "event.repaired",
        "event.not_json",
        "event.overrun",
        "event.without_time",
    } <= set(counted[0])
    assert plain(together["device_event"]).equals(plain(whole.tables["device_event"]))


def test_a_folder_without_room_is_one_line(ranks: Path, tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("a file")
    with all_large(), pytest.raises(OutputError, match="a temporary file cannot be written"):
        chunked.read_or_cut(ranks / "rank-0.json.gz", tmp_path / "rows")


def test_rows_go_with_the_run(ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with all_large():
        run = pipeline.read(ranks / "rank-0.json.gz")
    assert [*tmp_path.glob(".chopper-spill-*/tables/host_span.parquet")]
    del run
    assert not [*tmp_path.iterdir()]


@pytest.fixture(scope="module")
def imported(ranks: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The two ranks as run directories: imported whole, and by stretches."""
    whole, cut = (tmp_path_factory.mktemp("imported") / name for name in ("run", "run"))
    files = sorted(ranks.iterdir())
    whole.mkdir()
    write_run(files, whole)
    cut.mkdir()
    with all_large():
        write_run(files, cut)
    return whole, cut


def test_stretches_are_imported_as_the_whole_is(imported: tuple[Path, Path]) -> None:
    whole, cut = imported
    names = [sorted(p.name for p in (run / "rank-00000").iterdir()) for run in imported]
    assert names[0] == names[1]
    assert {"collective.parquet", "memory_event.parquet", "synchronization.parquet"} <= {*names[0]}
    assert {*pipeline.read(whole).table(0, "collective")["source"].to_pylist()} == {
        "device_event",
        "host_span",
    }
    for file in whole.glob("rank-*/*.parquet"):
        there = cut / file.parent.name / file.name
        assert pq.read_table(there).equals(pq.read_table(file)), file
        assert pq.read_schema(there).equals(pq.read_schema(file), check_metadata=True)
    rows = pq.read_metadata(cut / "rank-00000" / "host_span.parquet")
    assert rows.row_group(0).column(2).statistics.has_min_max
    parts = [json.loads((run / "manifest.json").read_text()) for run in imported]
    for part in parts:
        del part["created_ns"], part["name"]
    assert parts[0] == parts[1]


def test_what_was_imported_of_a_host_alone_is_read_in_stretches(
    ranks: Path, tmp_path: Path
) -> None:
    lines = gzip.decompress((ranks / "rank-0.json.gz").read_bytes()).splitlines()
    file = tmp_path / "rank-0.json"
    file.write_bytes(b"\n".join(x for x in lines if b'"kernel"' not in x and b'"gpu_' not in x))
    whole = pipeline.attribute(file)
    (tmp_path / "run").mkdir()
    with all_large():
        write_run([file], tmp_path / "run")
    assert not (tmp_path / "run" / "rank-00000" / "device_event.parquet").exists()
    run = attributed(tmp_path / "run")
    assert run.all_steps.windows.equals(whole.all_steps.windows)
    assert run.coverage == whole.coverage


def test_what_was_imported_is_attributed_as_its_trace(
    imported: tuple[Path, Path], ranks: Path
) -> None:
    files = sorted(ranks.iterdir())
    whole, cut, run = pipeline.attribute(files), attributed(files), attributed(imported[1])
    assert run.all_steps.windows.equals(whole.all_steps.windows)
    assert times(run) == times(whole)
    leaves = {row.id: row.time_ns for row in cut.all_steps.leaves()}
    assert {row.id: row.time_ns for row in run.all_steps.leaves()} == leaves
    assert {f.code for f in run.findings} == {f.code for f in cut.findings}
    assert run.coverage == cut.coverage
