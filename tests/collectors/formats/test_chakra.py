"""Execution traces of Chakra: laid out where no times are told, written and read back."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from chopper import pipeline
from chopper.collectors.formats.chakra import Node, decode, encode
from chopper.errors import InputError
from chopper.reports.export import export
from tests.golden.own import OWN


def node(number: int, runtime: int, *deps: int, on_host: bool = False, tid: int = 7) -> Node:
    return Node(
        id=number,
        name=f"aten::op{number}" if on_host else f"kernel{number}",
        kind=4,
        data_deps=[*deps],
        runtime=runtime,
        is_cpu_op=on_host,
        tid=tid,
    )


NODES = [
    node(1, 50, on_host=True, tid=1),
    node(2, 10, 1),
    # On another stream: at once, while the first one runs.
    node(3, 30, 1, tid=20),
    # On the first stream, after what both streams did, through an operator.
    node(4, 5, 2, 3, on_host=True, tid=1),
    node(5, 7, 4),
    # It depends on nothing, but on its stream it comes last.
    node(6, 2),
]


def write(folder: Path, nodes: list[Node]) -> Path:
    path = folder / "trace.0.et"
    path.write_bytes(b"".join(encode(nodes)))
    return path


def as_json(folder: Path, nodes: list[Node]) -> Path:
    path = folder / "trace.json.gz"
    rows = [
        {
            "Id": n.id,
            "Name": n.name,
            "NodeType": n.kind,
            "data_deps": n.data_deps,
            "runtime": n.runtime,
            "is_cpu_op": n.is_cpu_op,
            "tid": n.tid,
        }
        for n in nodes
    ]
    path.write_bytes(gzip.compress(json.dumps({"workload_graph": rows}).encode()))
    return path


def events(path: Path) -> list[tuple[Any, ...]]:
    """Name, start and end in µs, and stream of each device event."""
    table = pipeline.read(path).table(0, "device_event").to_pylist()
    return [
        (r["name"], r["start_ns"] // 1000, (r["start_ns"] + r["dur_ns"]) // 1000, r["stream_id"])
        for r in table
    ]


@pytest.mark.parametrize("make", [write, as_json])
def test_events_are_laid_out_by_their_dependencies_and_streams(tmp_path: Path, make: Any) -> None:
    path = make(tmp_path, NODES)
    assert events(path) == [
        ("kernel3", 0, 30, 20),
        ("kernel2", 0, 10, 7),
        ("kernel5", 30, 37, 7),
        ("kernel6", 37, 39, 7),
    ]
    (said,) = (
        f.message for f in pipeline.read(path).part(0).findings if f.code == "trace.not_recorded"
    )
    assert "laid out as early as their dependencies and streams allow" in said


def test_what_depends_on_itself_and_what_is_cut_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"node 2 depends on itself; expected no circles"):
        pipeline.read(write(tmp_path, [node(1, 1), node(2, 1, 3), node(3, 1, 2)]))
    path = write(tmp_path, NODES)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(InputError, match=r"not a whole execution trace of Chakra \(it ends within"):
        pipeline.read(path)
    path = tmp_path / "pytorch.json"
    path.write_text('{"schema": "1.0.2-chakra.0.0.4", "nodes": []}')
    with pytest.raises(InputError, match=r"has no durations; link it with its Kineto trace"):
        pipeline.read(path)


def test_a_run_without_a_device_is_written_as_operators_that_follow_each_other(
    tmp_path: Path,
) -> None:
    run = pipeline.attribute(OWN / "fsdp2")
    files = export(run, "chakra", tmp_path / "out")
    assert [f.name for f in files] == [f"trace.{r.rank}.et" for r in run.ranks]
    nodes = [*decode(files[0].read_bytes())]
    assert [n.name for n in nodes] == run.all_steps.joined[0].device_event["name"].to_pylist()
    assert all(n.is_cpu_op for n in nodes)
    last: dict[int, int] = {}
    for one in nodes:
        assert one.data_deps == ([last[one.tid]] if one.tid in last else [])
        last[one.tid] = one.id
    # Operators of less than a microsecond are none any more; the rest is work again.
    assert pipeline.attribute(files[0]).joined[0].host_only


measured = pytest.mark.skipif(
    "CHOPPER_MEASURED" not in os.environ, reason="CHOPPER_MEASURED: no published traces"
)


@measured
@pytest.mark.parametrize("suffix", ["et.gz", "json.gz"])
def test_a_published_trace_is_read_and_written(tmp_path: Path, suffix: str) -> None:
    folder = Path(os.environ["CHOPPER_MEASURED"]) / "chakra-et"
    run = pipeline.attribute(folder / f"chakra-rank0.{suffix}")
    (path,) = export(run, "chakra", tmp_path / "out")
    first = run.joined[0].device_event
    assert first.num_rows == 1216
    again = pipeline.attribute(path).joined[0].device_event
    columns = ["start_ns", "dur_ns", "stream_id", "name"]
    assert again.select(columns).to_pylist() == first.select(columns).to_pylist()
