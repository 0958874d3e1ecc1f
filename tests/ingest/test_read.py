"""From trace files to a run: which files, which ranks, and tables kept for the next time."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from chopper import ingest, pipeline, reports
from chopper.errors import InputError
from chopper.storage.manifest import encode as encode_manifest
from chopper.storage.parts import RunWriter
from chopper.storage.run import Run
from chopper.storage.streams import StreamWriter
from chopper.tables import TABLES
from tests.kineto_writer import BASE_NS, Trace, encode, merged, small_trace


def write(path: Path, trace: Trace) -> Path:
    path.write_bytes(trace.encode_gzip() if path.suffix == ".gz" else trace.encode())
    return path


def totals(run: Run) -> dict[str, Any]:
    """Everything the attribution says but the source's name."""
    found = pipeline.attribute(run)
    assert sum(c.time_ns for c in found.leaves()) == found.observed_ns
    said = reports.document(found)
    return {k: said[k] for k in ("observed_ns", "ideal_ns", "steps", "ranks", "causes", "coverage")}


# ---------------------------------------------------------------- which files


def test_sources_come_in_order_and_once(tmp_path: Path) -> None:
    for name in ("b.json", "a.json.gz", ".hidden.json", "notes.txt", "c.jsonl"):
        (tmp_path / name).write_bytes(b"{}")
    a, b = tmp_path / "a.json.gz", tmp_path / "b.json"
    assert ingest.find_sources([tmp_path]) == [a, b]
    assert ingest.find_sources([b, tmp_path, str(tmp_path / "*.json*")]) == [
        b,
        a,
        tmp_path / "c.jsonl",
    ]
    assert ingest.find_sources([str(tmp_path / "**" / "*.json")]) == [b]
    # A file that is named like a pattern is the file.
    odd = tmp_path / "t[1].json"
    odd.write_bytes(b"{}")
    assert ingest.find_sources([odd]) == [odd]


def test_nothing_named_is_an_error() -> None:
    with pytest.raises(InputError, match="nothing to load"):
        pipeline.read([])


# ---------------------------------------------------------------- which ranks


def ranks_of(*files: Path) -> dict[int, str | None]:
    run = pipeline.read(list(files))
    return {p.rank: p.label for p in run.manifest.ranks}


def test_recorded_ranks_come_first(tmp_path: Path) -> None:
    files = [
        write(tmp_path / "rank7.json", small_trace(rank=1, world=2, pid=1)),
        write(tmp_path / "rank5.json", small_trace(rank=0, world=2, pid=2)),
    ]
    assert ranks_of(*files) == {0: None, 1: None}


def test_the_members_of_a_group_are_kept_once(tmp_path: Path) -> None:
    """A job's 10 000 ranks list all 10 000 each."""
    for rank in range(2):
        groups = [{"pg_name": "0", "pg_size": 2, "ranks": [0, 1]}]
        info = {"rank": rank, "world_size": 2, "pg_config": groups}
        how: dict[str, Any] = {"rank": rank, "pid": rank, "header": {"distributedInfo": info}}
        write(tmp_path / f"rank{rank}.json", small_trace(**how))
    run = pipeline.read(tmp_path)
    first, second = (run.part(rank).process_groups[0]["ranks"] for rank in run.ranks)
    assert first is second
    assert first == [0, 1]
    of_first, of_second = (pipeline.rank_facts(run, rank).process_groups["0"] for rank in run.ranks)
    assert of_first is of_second
    assert of_first == (0, 1)


def test_ranks_from_file_names(tmp_path: Path) -> None:
    names = ["worker2_step_12.1694128201545.pt.trace.json", "worker10.json", "x_rank-0.json.gz"]
    files = [write(tmp_path / n, small_trace(pid=i)) for i, n in enumerate(names)]
    assert ranks_of(*files) == {0: names[2], 2: names[0], 10: names[1]}


def test_ranks_in_order_where_nothing_tells(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{n}.json", small_trace(pid=i)) for i, n in enumerate("xyz")]
    assert ranks_of(*files) == {0: "x.json", 1: "y.json", 2: "z.json"}


def test_further_devices_come_after_all_ranks(tmp_path: Path) -> None:
    files = []
    for rank in range(2):
        trace = Trace(rank=rank, world=4, pid=50 + rank, device=rank)
        for i in range(4):
            for device in (rank, rank + 4):
                trace.launch("k", 1_000 * i, 50, kernel_at=1_000 * i + 100, kernel_for=700,
                             device=device)  # fmt: skip
        files.append(write(tmp_path / f"{rank}.json", trace))
    run = pipeline.read(files)
    assert [(p.rank, p.label, p.device_id) for p in run.manifest.ranks] == [
        (0, None, 0),
        (1, None, 1),
        (4, "rank 0 device 4", 4),
        (5, "rank 1 device 5", 5),
    ]
    # Ranks 2 and 3 are missing; the further devices are not taken for them.
    assert [f.count for f in run.manifest.findings if f.code == "run.ranks_missing"] == [2]
    found = pipeline.attribute(run)
    assert [r.label for r in found.ranks] == [
        "rank 0",
        "rank 1",
        *["rank 0 device 4", "rank 1 device 5"],
    ]
    # Each timeline from the first launch at 0 to 3 800, 4 × 700 ns of it at work.
    assert [r.observed_ns for r in found.ranks] == [3_800] * 4


def test_merged_ranks_are_named_by_their_process(tmp_path: Path) -> None:
    documents = [small_trace(pid=10 + r, device=r).document() for r in range(2)]
    path = tmp_path / "all.json"
    path.write_bytes(encode(merged(*documents)))
    assert ranks_of(path) == {0: "all.json process 10", 1: "all.json process 11"}
    found = pipeline.attribute(path)
    alone = pipeline.attribute(write(tmp_path / "one.json", small_trace()))
    assert found.observed_ns == 2 * alone.observed_ns
    assert [(c.id, c.time_ns) for c in found.causes()] == [
        (c.id, 2 * c.time_ns) for c in alone.causes()
    ]


# ---------------------------------------------------------------- kept tables of a run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A recorded run of one rank, never analyzed."""
    writer = RunWriter(tmp_path / "run", 0)
    writer.manifest.traces = ("trace.json.gz",)
    writer.manifest.status = "complete"
    writer.manifest.pid = 4711
    write(writer.directory / "trace.json.gz", small_trace())
    writer.save()
    return tmp_path / "run"


def load_totals(source: Path) -> dict[str, Any]:
    return totals(pipeline.read(source))


def test_a_changed_trace_is_read_again(run_dir: Path) -> None:
    first = load_totals(run_dir)
    longer = small_trace()
    longer.launch("late", 17_000, 10, kernel_at=30_000, kernel_for=5_000)
    write(run_dir / "rank-00000" / "trace.json.gz", longer)
    assert load_totals(run_dir)["observed_ns"] == first["observed_ns"] + 16_000


def test_what_was_read_is_not_changed_by_its_use(run_dir: Path) -> None:
    run = pipeline.read(run_dir)
    manifest, store = encode_manifest(run.manifest), dict(run.store)
    reports.document(pipeline.attribute(run))
    assert encode_manifest(run.manifest) == manifest
    assert dict(run.store) == store
    with pytest.raises(AttributeError):
        run.source = "another"  # type: ignore[misc]
    more = run.with_tables({(0, "pause"): TABLES["pause"].empty()})
    assert (0, "pause") in more.store
    assert (0, "pause") not in run.store


def test_reading_writes_nothing(run_dir: Path) -> None:
    before = {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file()}
    pipeline.attribute(run_dir)
    gc.collect()
    assert {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file()} == before


def test_findings_of_a_trace_name_the_rank(run_dir: Path) -> None:
    path = run_dir / "rank-00000" / "trace.json.gz"
    path.write_bytes(small_trace().encode()[:-200])
    findings = pipeline.attribute(run_dir).findings
    # All ranks' files have one name: the rank tells them apart.
    assert [f.rank for f in findings if f.code == "trace.truncated"] == [0]


def test_recorded_steps_are_not_replaced_by_the_trace(run_dir: Path) -> None:
    """The recorder saw steps 0 to 3; the trace's window holds 10 and 11."""
    stream = StreamWriter(run_dir / "rank-00000" / "step.arrow", "step")
    stream.write(
        {
            "number": [0, 1],
            "start_ns": [BASE_NS, BASE_NS + 10_000],
            "end_ns": [BASE_NS + 10_000, BASE_NS + 20_000],
            "source": ["mark", "mark"],
            "traced": [True, True],
            "profiled": [True, True],
            "micro_steps": [None, None],
        }
    )
    stream.close()
    run = pipeline.read(run_dir)
    assert run.table(0, "step")["number"].to_pylist() == [0, 1]


def test_the_rank_of_a_recorded_run_is_its_own_process(run_dir: Path) -> None:
    documents = [small_trace(pid=p, device=p % 2).document() for p in (4710, 4711)]
    (run_dir / "rank-00000" / "trace.json.gz").write_bytes(encode(merged(*documents)))
    run = pipeline.read(run_dir)
    assert set(run.table(0, "host_span")["pid"].to_pylist()) == {4711}


# ---------------------------------------------------------------- hosts


def two_ranks_apart(**header: str) -> list[Trace]:
    """An all-reduce each; rank 1 leaves it 90 µs after rank 0, in its own trace's time."""
    traces = []
    for rank in range(2):
        trace = Trace(rank=rank, world=2, pid=60 + rank, header=dict(header))
        for i in range(5):
            trace.launch(
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
                *(1_000_000 * i, 50),
                kernel_at=1_000_000 * i + 1_000,
                kernel_for=100_000 + 90_000 * rank,
            )
        traces.append(trace)
    return traces


def clocks_corrected(traces: list[Trace], *paths: Path) -> list[str]:
    for path, trace in zip(paths, traces, strict=True):
        write(path, trace)
    found = pipeline.attribute(pipeline.read(list(paths))).findings
    return [f.message for f in found if f.code == "run.clock_offset"]


def test_ranks_of_one_host_share_a_clock(tmp_path: Path) -> None:
    files = tmp_path / "a.json", tmp_path / "b.json"
    assert clocks_corrected(two_ranks_apart(), *files)
    assert not clocks_corrected(two_ranks_apart(host_name="node-1"), *files)


@pytest.mark.parametrize(("pids", "known"), [((60, 61), True), ((60, 7), False)])
def test_the_name_that_torch_gives_a_file_tells_its_host(
    tmp_path: Path, pids: tuple[int, int], known: bool
) -> None:
    files = [tmp_path / f"node_a_{pid}.1694128201545.pt.trace.json" for pid in pids]
    assert bool(clocks_corrected(two_ranks_apart(), *files)) != known


def test_the_order_of_the_ranks_in_a_manifest_changes_nothing(tmp_path: Path) -> None:
    files = [tmp_path / "rank0.json", tmp_path / "rank1.json"]
    for rank, path in enumerate(files):
        trace = small_trace(rank=rank, world=2, pid=rank + 1)
        trace.events[rank]["dur"] = -5  # of different events: findings differ by rank
        write(path, trace)
    forth, back = pipeline.read(files), pipeline.read(files)
    back.manifest.ranks.reverse()
    assert [p.rank for p in back.manifest.ranks] == [1, 0]
    found, other = pipeline.attribute(forth), pipeline.attribute(back)
    assert reports.document(found)["ranks"] == reports.document(other)["ranks"]
    assert [(f.rank, f.message) for f in found.findings] == [
        (f.rank, f.message) for f in other.findings
    ]
    assert found.pieces.equals(other.pieces)
