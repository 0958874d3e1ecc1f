"""The stages of the pipeline: pure, each value can be written and read back, none joined twice."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import chopper
from chopper import pipeline
from chopper.analyzers.causes.attribute import attribute_rank
from chopper.analyzers.trace.joined import join_rank
from chopper.api import AttributedRun
from chopper.attribution import Attribution
from chopper.errors import InputError, UsageError
from chopper.storage import values
from chopper.storage.run import Run
from chopper.validation.model.job import simulate
from chopper.validation.model.plan import Plan
from chopper.validation.model.writer import write


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks that wait for each other, with clocks, shapes and two kinds of steps."""
    folder = tmp_path_factory.mktemp("runs") / "model"
    write(simulate(Plan(ranks=2)), folder)
    return chopper.load(folder)


@pytest.fixture(scope="module")
def attributed(run: Run) -> AttributedRun:
    return chopper.attribute(run)


def plain(answer: Attribution) -> dict[str, Any]:
    """The fields of an attribution, tables as rows."""
    found = {}
    for field in fields(Attribution):
        value = getattr(answer, field.name)
        if isinstance(value, pa.Table):
            value = value.to_pylist()
        elif field.name == "links":
            value = {rank: table.to_pylist() for rank, table in value.items()}
        elif field.name == "all_kinds":
            value = None if value is None else plain(value)
        found[field.name] = value
    return found


def again(value: Any) -> Any:
    """A value written and read back."""
    return values.decode(values.encode(value))


def test_every_value_of_the_pipeline_can_be_written_and_read_back(
    run: Run, attributed: AttributedRun
) -> None:
    given = {rank: again(pipeline.rank_input(run, rank)) for rank in run.ranks}
    joined = {rank: again(join_rank(one)) for rank, one in given.items()}
    matched = again(pipeline.match_ranks(run.manifest, joined))
    results = {r: again(attribute_rank(j, matched.get(r))) for r, j in joined.items()}
    answer = pipeline.aggregate(run, joined, matched, results)
    assert plain(answer) == plain(attributed)
    # An attribution alone: what was joined stays behind.
    alone = Attribution(**{f.name: getattr(answer.whole, f.name) for f in fields(Attribution)})
    read = again(alone)
    assert plain(read) == plain(answer.whole)
    assert [row.time_ns for row in read.leaves()] == [r.time_ns for r in answer.whole.leaves()]
    with pytest.raises(UsageError, match="without the run"):
        chopper.whatif(read)


def test_a_rank_can_be_attributed_in_another_process(
    run: Run, attributed: AttributedRun, tmp_path: Path
) -> None:
    source, target = tmp_path / "given", tmp_path / "result"
    source.write_bytes(values.encode((attributed.joined[1], attributed.matched[1])))
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from chopper.analyzers.causes.attribute import attribute_rank\n"
        "from chopper.storage import values\n"
        "joined, matched = values.decode(Path(sys.argv[1]).read_bytes())\n"
        "Path(sys.argv[2]).write_bytes(values.encode(attribute_rank(joined, matched)))\n"
    )
    subprocess.run([sys.executable, "-c", script, source, target], check=True, timeout=120)
    results = {
        0: attribute_rank(attributed.joined[0], attributed.matched[0]),
        1: values.decode(target.read_bytes()),
    }
    answer = pipeline.aggregate(run, attributed.joined, attributed.matched, results)
    assert plain(answer) == plain(attributed)


def test_attribution_leaves_the_run_as_it_was(run: Run) -> None:
    before = dict(run.store)
    manifest = values.encode(run.manifest)
    chopper.attribute(run)
    assert dict(run.store) == before
    assert values.encode(run.manifest) == manifest


def test_a_host_timeline_is_not_put_into_the_run(traced_host: Run) -> None:
    attributed = chopper.attribute(traced_host)
    assert attributed.joined[0].device_event.num_rows
    assert not traced_host.table(0, "device_event").num_rows
    assert plain(chopper.attribute(traced_host)) == plain(attributed)


@pytest.fixture
def traced_host(run: Run) -> Run:
    """The same run as if it had no device."""
    names = ("device_event", "collective")
    return run.with_tables({(r, n): run.table(r, n).slice(0, 0) for r in run.ranks for n in names})


def test_what_looks_at_an_attribution_joins_nothing_again(
    attributed: AttributedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[str] = []

    def counted(given: Any) -> Any:
        joined.append(str(given.rank))
        return join_rank(given)

    monkeypatch.setattr("chopper.pipeline.join_rank", counted)
    chopper.report(attributed, tmp_path / "report.html")
    chopper.compare(attributed, attributed)
    attributed.to_dict()
    assert joined == []
    # Only the changed run of a what-if is joined: its ranks, each once.
    chopper.whatif(attributed, fix="idle.preparation")
    assert joined == ["0", "1"]


def test_bytes_that_are_no_value_are_refused(run: Run) -> None:
    with pytest.raises(InputError, match="not a value of the pipeline"):
        values.decode(b"\x00nonsense")
    with pytest.raises(TypeError, match="is no value of the pipeline"):
        values.encode(run.source.encode())
    with pytest.raises(InputError, match="not a value of the pipeline"):
        values.decode(values.encode(["x"]).replace(b"list", b"evil"))
