"""A run beside its history: a page, the documented JSON form, and JUnit XML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal
from xml.etree import ElementTree as ET

from chopper import wording as fmt
from chopper.analyzers.compare.gate import Verdict
from chopper.analyzers.compare.history import Judgement
from chopper.analyzers.compare.result import percent, signed, signed_duration
from chopper.causes import CAUSES
from chopper.errors import printable
from chopper.reports.page import Block, Cell, Item, Items, Page, Table

_MOST_CAUSES = 8


def page(judgement: Judgement, *, outcome: str) -> Page:
    """Return the page of a judgement, short enough for a comment on a pull request.

    Args:
        judgement: what to show.
        outcome: what became of the run: added to the history or not.
    """
    items = [Item(outcome, "info")]
    items += [
        Item(f"{c.label}: {c.shown('a')} in the latest earlier run, {c.shown('b')} here", "info")
        for c in judgement.checks
    ]
    items += [Item(note, "info") for note in judgement.notes]
    return Page(
        title=f"{judgement.run.name} and its history",
        headline=judgement.sentence,
        summary=[*_times(judgement), *_causes(judgement), Items(items=items)],
    )


def _times(judgement: Judgement) -> list[Block]:
    if judgement.reference_ns is None:
        return []
    of = fmt.plural(len(judgement.reference), "earlier run")
    row: list[str | Cell] = [
        fmt.duration(judgement.reference_ns),
        fmt.duration(judgement.step_ns),
        Cell(text=signed(judgement.change_ratio), strong=judgement.failed),
        *(
            fmt.UNKNOWN if value is None else percent(value)
            for value in (
                judgement.spread_ratio,
                judgement.limit_ratio,
                judgement.detectable_ratio,
            )
        ),
    ]
    columns = ("Step", "This run", "Change", "Runs vary by", "Noise limit", "Found in 90 %")
    note = f"Step: of {of}, {judgement.statistic} over steps; without a trace where known."
    return [Table(columns=columns, rows=[row], note=note)]


def _causes(judgement: Judgement) -> list[Block]:
    listed_causes = [c for c in judgement.causes if c.told or c.difference_ns < -c.limit_ns]
    if not listed_causes:
        return []
    rows = [
        [
            CAUSES[c.id].label,
            fmt.duration(c.reference_ns),
            fmt.duration(c.run_ns),
            signed_duration(c.difference_ns),
            fmt.duration(c.limit_ns),
        ]
        for c in listed_causes[:_MOST_CAUSES]
    ]
    columns = ("Cause, per traced step", "Earlier runs", "This run", "Change", "Noise limit")
    return [Table(columns=columns, rows=rows, title="Causes beyond their own noise")]


@dataclass(frozen=True, slots=True)
class Case:
    """One test case of a JUnit file."""

    name: str
    outcome: Literal["passed", "failed", "skipped"]
    message: str
    seconds: float = 0.0


def cases(judgement: Judgement) -> list[Case]:
    """Return the cases of a judgement: whether the work is the same, and the step time."""
    changed = judgement.verdict == "changed work"
    seconds = judgement.step_ns / 1e9
    step: Literal["passed", "failed", "skipped"] = "passed"
    if changed or judgement.undecided:
        step = "skipped"
    elif judgement.failed:
        step = "failed"
    if changed:
        work = Case("same work", "failed", judgement.sentence)
    elif not judgement.reference:
        work = Case("same work", "skipped", "No earlier run to compare with.")
    else:
        work = Case("same work", "passed", "")
    return [work, Case("step time", step, judgement.sentence, seconds)]


def cases_of_gate(gate: Verdict) -> list[Case]:
    """Return the cases of ``--fail-on``: one of each condition."""
    if gate.refused is not None:
        return [Case("same work", "failed", gate.refused)]
    outcomes: dict[str, Literal["passed", "failed", "skipped"]] = {
        "beyond": "failed",
        "within": "passed",
        "undecided": "skipped",
    }
    return [Case(d.condition.text, outcomes[d.outcome], d.reason) for d in gate.decisions]


def junit(name: str, cases: Sequence[Case], time_ns: int) -> str:
    """Return JUnit XML as GitHub's actions, GitLab and Jenkins read it.

    Args:
        name: of the run.
        cases: in order.
        time_ns: Unix time of the run.
    """
    counted = {
        "tests": str(len(cases)),
        "failures": str(sum(c.outcome == "failed" for c in cases)),
        "errors": "0",
    }
    skipped = {"skipped": str(sum(c.outcome == "skipped" for c in cases))}
    time = {"time": f"{sum(c.seconds for c in cases):.6f}"}
    root = ET.Element("testsuites", {"name": "chopper compare", **counted, **time})
    when = datetime.fromtimestamp(time_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    suite = ET.SubElement(
        root, "testsuite", {"name": _xml(name), **counted, **skipped, **time, "timestamp": when}
    )
    for case in cases:
        attributes = {"name": _xml(case.name), "classname": f"chopper.{_xml(name)}"}
        element = ET.SubElement(suite, "testcase", attributes | {"time": f"{case.seconds:.6f}"})
        message = _xml(case.message)
        if case.outcome == "failed":
            failure = ET.SubElement(element, "failure", {"message": message, "type": "chopper"})
            failure.text = message
        elif case.outcome == "skipped":
            ET.SubElement(element, "skipped", {"message": message})
        elif message:
            ET.SubElement(element, "system-out").text = message
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=False) + "\n"


def _xml(text: str) -> str:
    """Return a text that XML 1.0 can hold."""
    return "".join(c if c >= " " and c not in "\ufffe\uffff" else " " for c in printable(text))
