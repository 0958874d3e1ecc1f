"""Every finding is a declared check, and what a check withholds is withheld."""

from __future__ import annotations

import ast
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import pyarrow as pa
import pytest

from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.causes import CAUSES
from chopper.claims import CLAIMS, withheld
from chopper.reports import render
from chopper.storage.findings import checks
from chopper.storage.manifest import CollectorReport, Finding
from chopper.storage.parts import RunWriter
from chopper.tables import TABLES
from tests.kineto_writer import BASE_NS, Trace, small_trace
from tests.made_runs import put_table

ROOT = Path(__file__).resolve().parent.parent
_PRODUCT = ("chopper", "collectors", "analyzers", "reports", "workloads")


def calls() -> Iterator[tuple[Path, str, ast.Call]]:
    """Every call in the product: its file, the name of what is called, and the call."""
    for folder in _PRODUCT:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    yield path, getattr(node.func, "attr", getattr(node.func, "id", "")), node


def declared_messages() -> dict[tuple[str, str | None], str]:
    """The message of each check, and those of its cases, by code and case."""
    return {
        (code, case): text
        for code, check in checks().items()
        for case, text in ((None, check.message), *check.cases.items())
    }


def names_in(message: str) -> set[str]:
    """Names that a message shows, without what is taken of them: ``ranks`` of ``{ranks[0]}``."""
    fields = (field for _, field, _, _ in Formatter().parse(message) if field is not None)
    return {re.split(r"[.\[]", field)[0] for field in fields}


def test_findings_are_made_in_one_place():
    makers = {path.relative_to(ROOT).as_posix() for path, name, _ in calls() if name == "Finding"}
    assert makers == {"chopper/storage/findings.py"}


def test_every_finding_has_its_check_and_gets_what_the_message_shows():
    messages = declared_messages()
    made: set[tuple[str, str | None]] = set()
    given_to_any: list[set[str]] = []
    for path, name, call in calls():
        given = {str(keyword.arg) for keyword in call.keywords if keyword.arg is not None}
        is_forwarded = len(given) < len(call.keywords)
        if name not in ("finding", "note") or not call.args or is_forwarded:
            continue
        code, case = (*(getattr(arg, "value", None) for arg in call.args), None)[:2]
        if not isinstance(code, str):
            given_to_any.append(given)
            continue
        if "." not in code:  # a note of a hooked process
            continue
        where = f"{path.relative_to(ROOT)}:{call.lineno}: {code} {case}"
        assert (code, case) in messages, where
        made.add((code, case))
        shown = names_in(messages[code, case])
        assert shown <= given, where
        assert given - shown <= {"rank", "count", "share", "severity", "withholds"}, where
    assert len(made) > 100
    # The code of the others is a variable: it has what some such call gives.
    for key in messages.keys() - made:
        assert any(names_in(messages[key]) <= given for given in given_to_any), key


def test_declared_checks_are_made_somewhere():
    files = (path for folder in _PRODUCT for path in (ROOT / folder).rglob("*.py"))
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    assert [code for code in checks() if f'"{code}"' not in text] == []


def test_a_rank_notes_findings_where_no_file_can_be_opened(tmp_path, monkeypatch):
    def refuse(path: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    checks.cache_clear()
    part = RunWriter(tmp_path / "run", 0)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    part.note("run.forked", step=3)
    part.note("run.forked", step=4)
    (found,) = part.manifest.findings
    assert found.message.startswith("the trace ended in step 3: the program forked")


def test_claims_are_declared_and_about_causes_that_exist():
    for code, check in checks().items():
        assert set(check.withholds) <= set(CLAIMS), code
        assert check.title
        assert check.doc.endswith(".")
    for name, claim in CLAIMS.items():
        assert set(claim.causes) <= set(CAUSES), name
    assert set(CLAIMS) == {claim for check in checks().values() for claim in check.withholds}


def test_reasons_and_ranks_of_a_withheld_claim():
    def finding(rank: int | None, message: str, *withholds: str) -> Finding:
        return Finding(code="c", severity="info", message=message, rank=rank, withholds=withholds)

    held = withheld(
        [
            finding(1, "one", "compute.clock"),
            finding(0, "two", "compute.clock", "compute.ideal"),
            finding(0, "nothing"),
            finding(None, "all", "compute.ideal"),
        ]
    )
    assert [(h.id, h.reason, h.ranks) for h in held] == [
        ("compute.ideal", "two; all", None),
        ("compute.clock", "one; two", (0, 1)),
    ]


def attributed(trace: Trace, tmp_path: Path) -> Attribution:
    path = tmp_path / "trace.json"
    path.write_bytes(trace.encode())
    found = pipeline.attribute(path)
    for one in found.findings:
        assert set(one.withholds) <= set(checks()[one.code].withholds)
    return found


def test_gaps_without_launches_have_flagged_causes(tmp_path):
    trace = Trace()
    for step in range(2):
        trace.step(step, 10_000 * step, 10_000)
        op = trace.op("aten::mm", 10_000 * step + 1_000, 3_000)
        trace.launch(
            "gemm",
            10_000 * step + 2_000,
            500,
            kernel_at=10_000 * step + 4_000,
            kernel_for=1_000,
            op=op,
        )
        trace.work("kernel", "orphan", 10_000 * step + 7_000, 1_000, 900 + step)
    found = attributed(trace, tmp_path)
    assert "idle.causes" in {h.id for h in found.withheld}
    rows = {row.id: row for row in found.causes()}
    assert rows["idle"].withheld is None
    flagged = [i for i, row in rows.items() if row.withheld]
    assert flagged
    assert all(i.startswith("idle.") for i in flagged)
    assert all(rows[i].ci95_ns is None for i in flagged)
    text, page = render(found, "txt"), render(found, "html")
    assert "? not supported by the data" in text
    assert "Withheld (see findings): " in page
    assert ">not supported</span>" in page
    leaves = sum(row.time_ns for row in found.leaves())
    assert leaves == found.observed_ns


def test_dropped_samples_are_said(tmp_path):
    path = tmp_path / "trace.json"
    path.write_bytes(small_trace().encode())
    run = pipeline.read(path)
    run.part(0).collectors = [
        CollectorReport(name="host", status="obtained", samples_count=90, dropped_count=10),
        CollectorReport(name="nvml", status="obtained", samples_count=90, dropped_count=0),
    ]
    (found,) = [f for f in pipeline.attribute(run).findings if f.code == "telemetry.dropped"]
    assert (found.severity, found.count) == ("warning", 10)
    assert "10 of 100 samples (10.0 %)" in found.message


def test_clocks_that_are_far_apart_are_said_and_all_are_in_the_report(tmp_path):
    path = tmp_path / "trace.json"
    path.write_bytes(small_trace().encode())
    run = pipeline.read(path)
    run.part(0).collectors = [
        CollectorReport(name="torch_trace", status="obtained", clock_alignment_error_ns=6_860),
        CollectorReport(name="nvml", status="obtained", clock_alignment_error_ns=7_000_000),
        CollectorReport(name="host", status="obtained", absent={"host_energy": "no RAPL domain"}),
    ]
    attribution = pipeline.attribute(run)
    (found,) = [f for f in attribution.findings if f.code == "telemetry.clock_apart"]
    assert found.message.startswith("nvml: its clock may differ by 7.00 ms from that of")
    page = render(attribution, "html")
    assert '<td class="num">± 6.86 µs</td>' in page
    assert "1 not read: host_energy: no RAPL domain" in page


@pytest.mark.parametrize(("delay_ns", "said"), [(500, False), (9_000, True)])
def test_a_rank_that_waited_for_a_core_is_named(tmp_path, delay_ns, said):
    path = tmp_path / "rank0.json"
    path.write_bytes(small_trace(rank=0, world=1).encode())
    run = pipeline.read(path)
    rows = [
        {"time_ns": BASE_NS + at, "span_ns": 0, "rank": 0, "pid": 1, "run_delay_ns": delay}
        for at, delay in ((2_000, 0), (18_000, delay_ns))
    ]
    put_table(run, 0, "process", pa.Table.from_pylist(rows, schema=TABLES["process"].arrow))
    found = [f.message for f in pipeline.attribute(run).findings if f.code == "host.cores_taken"]
    assert bool(found) == said
    assert not said or "a core 56.2 % of the time" in found[0]
