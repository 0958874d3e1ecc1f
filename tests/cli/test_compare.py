from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import Outcome, process, run
from tests.comparing import trace
from tests.kineto_writer import Trace


def chopper(*arguments: str, cwd: Path) -> Outcome:
    return run(*arguments, cwd=cwd)


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    trace(tmp_path / "a.json", steps=6, matmul_ns=(4_000, 4_100))
    trace(tmp_path / "b.json", steps=6, matmul_ns=(8_000, 8_100))
    trace(tmp_path / "other.json", steps=6, width=128)
    return tmp_path


def test_text_says_what_changed(pair) -> None:
    shown = chopper("compare", "a.json", "b.json", cwd=pair)
    assert shown.code == 0, shown.err
    # The next addition waits for its own launch: a longer product leaves less idle time.
    assert "No significant difference" in shown.out
    assert "Compute" in shown.out
    assert "+4.00 µs" in shown.out
    assert "aten::mm" in shown.out
    assert all(len(line) <= 100 for line in shown.out.splitlines())


def test_the_gate_sets_the_exit_code(pair) -> None:
    assert chopper("gate", "a.json", "b.json", "--fail-on", "step>+50%", cwd=pair).code == 0
    failed = process("gate", "a.json", "b.json", "--fail-on", "compute>+1us", cwd=pair)
    assert failed.code == 1
    assert "the gate failed" in failed.out
    better = chopper("gate", "b.json", "a.json", "--fail-on", "compute>+1us", cwd=pair)
    assert better.code == 0
    assert "the gate passed" in better.out
    refused = chopper("gate", "a.json", "other.json", "--fail-on", "step>+900%", cwd=pair)
    assert refused.code == 1
    assert "gate refused: A and B do not do the same work (FLOP per step" in refused.out
    forced = chopper(
        "gate", "a.json", "other.json", "--fail-on", "step>+900%", "--allow-different", cwd=pair
    )
    assert forced.code == 0


def test_a_rank_without_a_step_in_its_trace_is_left_out_and_said(tmp_path) -> None:
    for run_name, seconds in (("a", (0, 0)), ("b", (0, 1))):
        (tmp_path / run_name).mkdir()
        for rank, later in enumerate(seconds):
            made = Trace(rank=rank, world=2, pid=100 + rank, tid=100 + rank)
            for step in range(6):
                at = 40_000 * step
                # The marks of rank 1 of b come a second after its work.
                made.step(step, at + later * 10**9, 40_000)
                op = made.op("aten::mm", at + 1_000, 1_000, shapes=[[64, 32], [32, 64]])
                took = 3_900 + 100 * (step % 3)
                made.launch("gemm", at + 1_200, 200, kernel_at=at + 2_000, kernel_for=took, op=op)
            (tmp_path / run_name / f"rank{rank}.json").write_bytes(made.encode())
    for options in ((), ("--all-steps",)):
        for first, second in (("a", "b"), ("b", "a"), ("b", "b")):
            shown = chopper("compare", first, second, *options, "--json", cwd=tmp_path)
            assert shown.code == 0, shown.err
            document = json.loads(shown.out)
            assert document["step"]["difference_ns"] == 0
            said = [n for n in document["notes"] if "rank 1 excluded" in n]
            assert len(said) == (first, second).count("b")
            assert all(c["status"] != "differs" for c in document["checks"])


def test_what_is_wrong_is_one_line(pair) -> None:
    for arguments, code, words in (
        (("--fail-on", "step>>5%"), 2, "at character 6 of 'step>>5%'"),
        (("--fail-on-point",), 2, "BASE, RUN and --fail-on EXPR"),
        (("-o", "c.pdf"), 2, ".html, .md, .json, .txt"),
        (("-o", "a.json", "--force"), 1, "is an input of the report"),
        (("-o", "none/c.html"), 1, "does not exist"),
    ):
        shown = chopper("compare", "a.json", "b.json", *arguments, cwd=pair)
        assert shown.code == code, arguments
        assert words in shown.line
    missing = chopper("compare", "a.json", "gone.json", cwd=pair)
    assert missing.code == 1
    assert "gone.json" in missing.err.splitlines()[-1]


def test_json_is_the_documented_form(pair) -> None:
    shown = chopper("gate", "a.json", "b.json", "--json", "--fail-on", "step>0", cwd=pair)
    document = json.loads(shown.out)
    assert document["schema"] == "chopper.comparison/2"
    assert list(document) == [
        "schema",
        "verdict",
        "comparable",
        "a",
        "b",
        "checks",
        "step",
        "median",
        "untraced",
        "outcomes",
        "causes",
        "kernels",
        "operations",
        "notes",
        "actions",
        "predictions",
        "gate",
    ]
    leaves = {c["id"] for c in document["causes"]} - {c["parent"] for c in document["causes"]}
    total = sum(c["difference_ns"] for c in document["causes"] if c["id"] in leaves)
    assert total == document["step"]["difference_ns"]
    assert document["gate"]["conditions"][0]["text"] == "step>0"
    assert set(document["checks"][0]) >= {"id", "label", "status", "a", "b", "unit", "note"}


def test_the_extension_chooses_the_format(pair) -> None:
    for name, start in (
        ("c.md", "# "),
        ("c.txt", "a.json and b.json"),
        ("c.html", "<!doctype html>"),
    ):
        shown = chopper("compare", "a.json", "b.json", "-o", name, cwd=pair)
        assert shown.code == 0, shown.err
        assert shown.out == f"{name}\n"
        assert (pair / name).read_text().startswith(start)
    again = chopper("compare", "a.json", "b.json", "-o", "c.md", cwd=pair)
    assert again.code == 1
    assert "pass --force" in again.err
    failed = chopper(
        "gate", "a.json", "b.json", "-o", "c.json", "--fail-on", "compute>+1us", cwd=pair
    )
    assert failed.code == 1
    assert "the gate failed" in failed.err
    assert json.loads((pair / "c.json").read_text())["gate"]["failed"] is True
    both = chopper("compare", "a.json", "b.json", "-o", "d.md", "--json", cwd=pair)
    assert json.loads(both.out)["schema"] == "chopper.comparison/2"
    assert "written: d.md" in both.err
