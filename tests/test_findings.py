"""Every finding is a declared check, and what a check withholds is withheld."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pyarrow as pa
import pytest

from chopper import pipeline
from chopper.analyzers.attribution import Attribution
from chopper.causes import CAUSES
from chopper.claims import CLAIMS, withheld
from chopper.reports import render
from chopper.storage.manifest import CollectorReport, Finding
from chopper.tables import TABLES
from tests.declared_checks import CHECKS
from tests.kineto_writer import BASE_NS, Trace, small_trace
from tests.made_runs import put_table

ROOT = Path(__file__).resolve().parent.parent
_CODE = re.compile(
    r"(trace|event|run|steps|telemetry|host|device|compute|counters|communication)\.[a-z_0-9]+$"
)
_TAKES_A_CODE = {"add", "finding", "note", "Finding", "_finding", "_note", "append"}


def findings_in_source() -> set[str]:
    """Codes that the program gives to findings: ``Finding(code=…)``, ``note("…")`` and tables."""
    found: set[str] = set()
    for folder in ("chopper", "collectors", "analyzers"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name == "causes.py" or "validation" in path.parts:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call):
                    continue
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                values = [k.value for k in node.keywords if k.arg == "code"]
                values += node.args[:1] if name in _TAKES_A_CODE else []
                found |= {
                    v.value
                    for v in values
                    if isinstance(v, ast.Constant)
                    and isinstance(v.value, str)
                    and _CODE.match(v.value)
                }
    return found


def test_every_finding_is_a_declared_check():
    found = findings_in_source()
    assert len(found) > 50
    assert sorted(found - set(CHECKS)) == []


def test_declared_checks_are_made_somewhere():
    text = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("chopper", "collectors", "analyzers")
        for path in (ROOT / folder).rglob("*.py")
    )
    assert [code for code in CHECKS if f'"{code}"' not in text] == []


def test_claims_are_declared_and_about_causes_that_exist():
    for code, check in CHECKS.items():
        assert set(check.get("withholds", ())) <= set(CLAIMS), code
        assert check["title"]
        assert check["doc"].endswith(".")
    for name, claim in CLAIMS.items():
        assert set(claim.causes) <= set(CAUSES), name
    assert set(CLAIMS) == {
        claim for check in CHECKS.values() for claim in check.get("withholds", ())
    }


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
    for finding in found.findings:
        assert set(finding.withholds) <= set(CHECKS[finding.code].get("withholds", ()))
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
