"""The stages of the pipeline: pure, each value can be written and read back, none joined twice."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import chopper
from chopper import pipeline, reports
from chopper.analyzers.attribution import Attribution
from chopper.analyzers.trace.rank_join import join_rank
from chopper.analyzers.trace.totals import merged
from chopper.errors import InputError
from chopper.storage import results
from chopper.storage.results import Folder
from chopper.storage.run import Run
from tests.known_causes.model.job import simulate
from tests.known_causes.model.plan import Plan
from tests.known_causes.model.writer import write


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks that wait for each other, with clocks, shapes and two kinds of steps."""
    folder = tmp_path_factory.mktemp("runs") / "model"
    write(simulate(Plan(ranks=2)), folder)
    return pipeline.read(folder)


@pytest.fixture(scope="module")
def attributed(run: Run) -> Attribution:
    return pipeline.attribute(run)


def plain(answer: Attribution) -> dict[str, Any]:
    """The fields of an attribution that are not of one rank each, tables as rows."""
    found = {}
    apart = {"recording", "joined", "matched", "work", "factors", "part"}
    for field in (field for field in fields(Attribution) if field.name not in apart):
        value = getattr(answer, field.name)
        if isinstance(value, pa.Table):
            value = value.to_pylist()
        elif field.name == "links":
            value = {rank: table.to_pylist() for rank, table in value.items()}
        elif field.name == "superset":
            value = None if value is None else plain(value)
        found[field.name] = value
    return found


def again(value: Any) -> Any:
    """A value written and read back."""
    return results.decode(results.encode(value))


def test_every_value_of_the_pipeline_can_be_written_and_read_back(
    run: Run, attributed: Attribution, tmp_path: Path
) -> None:
    folder = Folder(tmp_path)
    facts = {rank: again(pipeline.rank_facts(run, rank)) for rank in run.ranks}
    joint = {rank: pipeline.join_task(run, one, folder.path) for rank, one in facts.items()}
    parts = [again(own).part for own, _ in joint.values()]
    matched = again(pipeline.match_ranks(run.manifest, parts))
    shares, totals, closely = {}, [], {}
    for rank in run.ranks:
        share, own, left = pipeline.attribute_task(
            run, facts[rank], joint[rank][1], matched.get(rank), True, folder.path
        )
        assert left is not None
        shares[rank], closely[rank] = again(share), left.get()
        totals.append(again(own))
    answer = pipeline.aggregate(run, shares, merged(totals), matched, closely)
    assert plain(answer) == plain(attributed)


def test_attribution_leaves_the_run_as_it_was(run: Run) -> None:
    before = dict(run.store)
    manifest = results.encode(run.manifest)
    pipeline.attribute(run)
    assert dict(run.store) == before
    assert results.encode(run.manifest) == manifest


def test_a_host_timeline_is_not_put_into_the_run(traced_host: Run) -> None:
    attributed = pipeline.attribute(traced_host)
    assert attributed.joined[0].device_event.num_rows
    assert not traced_host.table(0, "device_event").num_rows
    assert plain(pipeline.attribute(traced_host)) == plain(attributed)


@pytest.fixture
def traced_host(run: Run) -> Run:
    """The same run as if it had no device, and so no launches."""
    tables = {(r, n): run.table(r, n).slice(0, 0) for r in run.ranks for n in _OF_DEVICE}
    for rank in run.ranks:
        host = run.table(rank, "host_span")
        calls = pc.is_in(host["category"].cast("string"), pa.array(["runtime", "driver"]))
        tables[rank, "host_span"] = host.filter(pc.invert(calls))
    return run.with_tables(tables)


_OF_DEVICE = ("device_event", "collective")


def test_what_looks_at_an_attribution_joins_nothing_again(
    attributed: Attribution, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[str] = []

    def counted(given: Any) -> Any:
        joined.append(str(given.rank))
        return join_rank(given)

    monkeypatch.setattr("chopper.pipeline.join_rank", counted)
    chopper.report(attributed, tmp_path / "report.html")
    chopper.compare(attributed, attributed)
    reports.document(attributed)
    assert joined == []
    # Only the changed run of a what-if is joined: its ranks, each once.
    chopper.whatif(attributed, fix="idle.preparation")
    assert joined == ["0", "1"]


def test_bytes_that_are_no_value_are_refused(run: Run) -> None:
    with pytest.raises(InputError, match="not a value of the pipeline"):
        results.decode(b"\x00nonsense")
    with pytest.raises(TypeError, match="is not a value of the pipeline"):
        results.encode(run.source.encode())
    with pytest.raises(InputError, match="not a value of the pipeline"):
        results.decode(results.encode(["x"]).replace(b"list", b"evil"))


def test_numbers_that_many_values_repeat_are_written_once() -> None:
    members = tuple(range(1000))
    once, often = (results.encode([members] * count) for count in (1, 100))
    assert len(often) < len(once) + 2000
    read = results.decode(often)
    assert read == [members] * 100
    assert read[0] is read[99]
    # Truth values and what is no whole number stay as they are.
    mixed = [(True,) * 20, (1.5,) * 20, tuple("abcdefghijklmnopqrst")]
    assert str(again(mixed)) == str(mixed)
    with pytest.raises(InputError, match="not a value of the pipeline"):
        results.decode(once.replace(bytes([0, 1, 2, 3, 4]), bytes([0, 1, 0xC0, 3, 4])))
