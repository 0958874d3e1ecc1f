"""``chopper gate``: its files, exit codes and JUnit XML; the GitHub Action."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import msgspec.yaml
import pytest

from chopper import pipeline
from chopper.analyzers.compare.history import PastRun, past_run
from chopper.cli.compare_ import add_run, read_history
from tests.command import Outcome, run
from tests.kineto_writer import Trace
from tests.waiting import PATIENCE_S

ACTION = Path(__file__).resolve().parents[2] / ".ci/compare/action.yml"
NOISE = (0, 30, -20, 10, -30, 20, 0, 10, -10, -10)
"""Of ten steps of 100 µs, in ns: a standard deviation of 0.02 %."""


def trace(path: Path, *, at: int, slower_ns: int = 0, width: int = 64) -> Path:
    """Eight steps of 100 µs: products of half of that, then the host's Python."""
    made = Trace(rank=None)
    period = 100_000 + NOISE[at % 10] + slower_ns
    for s in range(8):
        t = at * 10**9 + period * s
        made.step(s, t, period)
        op = made.op("aten::mm", t + 1_000, 1_000, shapes=[[64, 32], [32, width]])
        made.launch("gemm", t + 1_200, 200, kernel_at=t + 2_000, kernel_for=50_000, op=op)
    path.write_bytes(made.encode())
    return path


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> list[PastRun]:
    place = tmp_path_factory.mktemp("earlier") / "run.json"
    return [past_run(pipeline.attribute(trace(place, at=at))) for at in range(10)]


@pytest.fixture
def job(tmp_path: Path, earlier: list[PastRun], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a history of ten runs; later ones at 11 … are made in it."""
    monkeypatch.chdir(tmp_path)
    for one in earlier:
        add_run(tmp_path / "history", one)
    return tmp_path


def compare(*options: str | Path) -> Outcome:
    return run("gate", "new.json", "--history", "history", *options)


@pytest.mark.parametrize(
    ("made", "options", "code", "verdict", "count"),
    [
        ({}, (), 0, "same", 10),
        ({}, ("--add",), 0, "same", 11),
        ({"slower_ns": 2_000}, ("--add",), 1, "regression", 10),
        ({"slower_ns": 2_000}, ("--accept",), 0, "regression", 11),
        ({"slower_ns": -2_000}, ("--add",), 0, "improvement", 11),
        ({"slower_ns": -2_000}, ("--accept",), 0, "improvement", 11),
        ({"width": 640}, ("--add",), 1, "changed work", 10),
        ({"width": 640}, ("--accept",), 0, "changed work", 11),
        ({}, ("--find", "0.1"), 0, "noisy machine", 10),
        ({}, ("--find", "0.1", "--strict"), 1, "noisy machine", 10),
    ],
)
def test_verdict_exit_code_and_what_is_added(
    made: dict[str, int], options: tuple[str, ...], code: int, verdict: str, count: int, job: Path
) -> None:
    trace(job / "new.json", at=11, **made)
    shown = compare(*options, "--json")
    assert shown.code == code, shown.err
    document = json.loads(shown.out)
    assert (document["schema"], document["verdict"]) == ("chopper.judgement/1", verdict)
    assert len(read_history(job / "history")) == count
    assert document["run"]["schema"] == "chopper.history/1"
    accepted = [one for one in read_history(job / "history") if one.accepted]
    assert len(accepted) == ("--accept" in options)
    compare("--add")
    assert [one for one in read_history(job / "history") if one.accepted] == accepted


def test_compare_with_a_history_or_a_condition_is_this_gate(job: Path) -> None:
    trace(job / "new.json", at=11, slower_ns=2_000)
    former = run("compare", "new.json", "--history", "history")
    assert (former.code, former.out) == (1, compare().out)
    condition = ("new.json", "new.json", "--fail-on=median<+1%")
    assert run("compare", *condition).out == run("gate", *condition).out
    assert "the gate failed" in run("gate", *condition).out


def test_a_history_needs_no_package_of_an_extra(job: Path, monkeypatch) -> None:
    for name in ("pandas", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    trace(job / "new.json", at=11)
    assert "Same: " in compare().out


def test_a_history_begins_with_its_first_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    trace(tmp_path / "new.json", at=0)
    first = compare("--add", "--junit", "j.xml")
    assert (first.code, "Too few runs: 0 earlier runs" in first.out) == (0, True)
    assert [kind for _, kind, _ in junit(tmp_path / "j.xml")] == ["skipped", "skipped"]
    again = compare("--add")
    assert "0 earlier runs" in again.out  # one recording counts once
    [kept] = (tmp_path / "history").iterdir()
    trace(tmp_path / "new.json", at=1)
    shutil.copy(kept, tmp_path / "history" / "copy.json")
    assert "1 earlier run of" in compare().out
    assert compare("--strict").code == 1


def test_other_work_is_named_in_one_line(job: Path) -> None:
    trace(job / "new.json", at=11, width=640)
    shown = compare("-o", "verdict.md")
    assert shown.code == 1
    assert shown.lines[0] == (
        "✗ Changed work: none of 10 earlier runs did it (FLOP per step: 262 kFLOP there, "
        "2.62 MFLOP here)."
    )
    assert "Changed work: none of 10 earlier runs" in (job / "verdict.md").read_text()


def test_bad_input_is_one_line(job: Path) -> None:
    trace(job / "new.json", at=11)
    trace(job / "b.json", at=12)
    for options, code, words in (
        (("b.json",), 2, "--history judges one run; leave b.json out"),
        (("--fail-on", "step>0"), 2, "--fail-on: of two runs"),
        (("--junit", "none/j.xml"), 1, "none does not exist"),
        (("--junit", "new.json"), 1, "is an input"),
        (("--find", "nan"), 2, "nan is no number of percent"),
        (("-o", "v.pdf"), 2, ".html, .md, .json, .txt"),
    ):
        shown = compare(*options)
        assert (shown.code, words in shown.line) == (code, True), shown.err
    for arguments, words in (
        (("new.json",), "give RUN and --history DIR, or BASE, RUN and --fail-on EXPR"),
        (("new.json", "--fail-on", "step>0"), "or BASE, RUN and --fail-on EXPR"),
        (("new.json", "b.json", "--add"), "--add: needs --history"),
        (("new.json", "b.json", "--junit", "j.xml"), "give RUN and --history DIR"),
    ):
        shown = run("gate", *arguments)
        assert (shown.code, words in shown.line) == (2, True), shown.err
    assert "is not a run of a history" in run("gate", "new.json", "--history", ".").line
    damaged = job / "history/0-damaged.json"
    kept = next(job.glob("history/*.json")).read_bytes()
    for text, words in (
        ('{"schema": "chopper.history/9"}', "has schema 'chopper.history/9', expected"),
        ('{"schema": "chopper.history/1", "id": 3}', "Expected `str`, got `int`"),
        ("{", "is not a run of a history"),
        (kept.replace(b'"median_ns":', b'"median_ns":-').decode(), "Expected `int` >= 1"),
    ):
        damaged.write_text(text)
        shown = compare("--add")
        assert (shown.code, words in shown.line) == (1, True), shown.err
        assert "remove the file" in shown.line
    damaged.unlink()
    assert len(read_history(job / "history")) == 10


# What https://github.com/jenkinsci/xunit-plugin (junit-10.xsd) allows, and of it what is required.
ELEMENTS = {
    "testsuites": ({"testsuite"}, {"name", "time", "tests", "failures", "errors"}, set()),
    "testsuite": (
        {"testcase", "properties", "system-out", "system-err"},
        {"name", "tests", "failures", "errors", "time", "skipped", "timestamp", "hostname", "id"},
        {"name", "tests", "failures", "errors"},
    ),
    "testcase": (
        {"skipped", "error", "failure", "system-out", "system-err"},
        {"name", "time", "classname"},
        {"name"},
    ),
    "failure": (set(), {"type", "message"}, set()),
    "skipped": (set(), {"type", "message"}, set()),
    "system-out": (set(), set(), set()),
}


def junit(file: Path) -> list[tuple[str, str, str]]:
    """Check a file by the schema's rules and its counts; its cases: name, outcome, message."""
    root = ET.fromstring(file.read_bytes())
    assert root.tag == "testsuites"
    for element in root.iter():
        children, known, required = ELEMENTS[element.tag]
        assert {child.tag for child in element} <= children
        assert required <= {*element.keys()} <= known
        if "time" in element.keys():  # noqa: SIM118
            assert re.fullmatch(r"[0-9]{1,3}\.[0-9]+", element.attrib["time"])
    [suite] = root
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", suite.attrib["timestamp"])
    found = []
    for case in suite:
        [kind, message] = next(
            ((c.tag, c.attrib["message"]) for c in case if c.tag != "system-out"), ("passed", "")
        )
        found.append((case.attrib["name"], kind, message))
    for counted, kind in (("failures", "failure"), ("skipped", "skipped")):
        assert int(suite.attrib[counted]) == sum(k == kind for _, k, _ in found)
    assert int(suite.attrib["tests"]) == int(root.attrib["tests"]) == len(found)
    return found


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ({}, ["passed", "passed"]),
        ({"slower_ns": 2_000}, ["passed", "failure"]),
        ({"width": 640}, ["failure", "skipped"]),
        ({"slower_ns": 2_000, "name": 'a<b>&"\x1b.json'}, ["passed", "failure"]),
    ],
)
def test_junit(made: dict[str, Any], expected: list[str], job: Path) -> None:
    name = made.pop("name", "new.json")
    trace(job / "new.json", at=11, **made)
    (job / "new.json").rename(job / name)
    shown = run("gate", name, "--history", "history", "--junit", "junit.xml")
    assert shown.code == ("failure" in expected), shown.err
    cases = junit(job / "junit.xml")
    assert [kind for _, kind, _ in cases] == expected
    if expected[1] == "failure":
        assert cases[1][2].startswith("Regression: 100 µs to 102 µs per step (+2.0")


def test_junit_of_a_gate_between_two_runs(job: Path) -> None:
    trace(job / "a.json", at=1)
    trace(job / "b.json", at=2, slower_ns=9_000)
    shown = run("gate", "a.json", "b.json", "--fail-on", "median>+5%", "--junit", "j.xml")
    assert shown.code == 1
    [(name, kind, message)] = junit(job / "j.xml")
    assert (name, kind) == ("median>+5%", "failure")
    assert message.startswith("+8.95 %, from 100 µs to 109 µs")


# ---------------------------------------------------------------- the GitHub Action

GH = """
#!{python}
# GitHub's side of `gh`: answers from files, and a record of every call.
import json, os, pathlib, shutil, subprocess, sys
hub = pathlib.Path(os.environ["STAND_IN"])
arguments = sys.argv[1:]
with (hub / "calls").open("a") as calls:
    calls.write(json.dumps(arguments) + "\\n")
if arguments[:2] == ["run", "download"]:
    asked = dict(zip(arguments[3::2], arguments[4::2]))
    shutil.copytree(hub / "artifacts" / asked["--name"], asked["--dir"])
elif "--method" in arguments:
    if os.environ["GH_TOKEN"] == "of a fork":
        sys.exit("gh: Resource not accessible by integration (HTTP 403)")
    body = pathlib.Path(arguments[arguments.index("-F") + 1].removeprefix("body=@")).read_text()
    comments = json.loads((hub / "comments").read_text())
    number = int(arguments[3].rsplit("/", 1)[1]) if arguments[2] == "PATCH" else 77
    kept = [c for c in comments if c["id"] != number]
    written = {{"id": number, "body": body, "user": {{"type": "Bot"}}}}
    (hub / "comments").write_text(json.dumps([*kept, written]))
else:
    answer = (hub / ("comments" if "/comments" in arguments[1] else "artifacts.json")).read_text()
    jq = ["jq", "-r", arguments[arguments.index("--jq") + 1]]
    sys.exit(subprocess.run(jq, input=answer, text=True).returncode)
"""


OF_A_STRANGER = {
    "id": 5,
    "body": "<!-- chopper compare: train -->",
    "user": {"type": "User"},
    "author_association": "NONE",
}


class Workflow:
    """Runs the action's steps as a runner does, with a stand-in for ``gh`` and for artifacts."""

    def __init__(self, place: Path) -> None:
        self.place, self.hub = place, place / "hub"
        self.steps = msgspec.yaml.decode(ACTION.read_bytes())
        programs = place / "programs"
        programs.mkdir()
        (programs / "gh").write_text(textwrap.dedent(GH).format(python=sys.executable).lstrip())
        (programs / "gh").chmod(0o755)
        chopper_script = programs / "chopper"
        chopper_script.write_text(f'#!/bin/sh\nexec {sys.executable} -m chopper "$@"\n')
        chopper_script.chmod(0o755)
        self.path = f"{programs}:{os.environ['PATH']}"
        (self.hub / "artifacts").mkdir(parents=True)
        (self.hub / "comments").write_text(json.dumps([OF_A_STRANGER]))
        self.offer()

    def offer(self) -> None:
        """List the artifacts; those of forks and of other branches must not be taken."""
        own = {"head_branch": "main", "head_repository_id": 1, "repository_id": 1}
        there = (self.hub / "artifacts/train-history").exists()
        listed = [
            {"expired": False, "created_at": "2026-01-02", "workflow_run": own | {"id": 22}},
            {"expired": False, "created_at": "2026-01-01", "workflow_run": own | {"id": 11}},
            {"expired": True, "created_at": "2026-01-03", "workflow_run": own | {"id": 33}},
        ] * there
        for foreign in ({"head_branch": "feature"}, {"head_repository_id": 2}):
            run_ = own | {"id": 44} | foreign
            listed.append({"expired": False, "created_at": "2026-01-04", "workflow_run": run_})
        (self.hub / "artifacts.json").write_text(json.dumps({"artifacts": listed}))

    def start(
        self, event: str, token: str = "own", **inputs: str
    ) -> tuple[int, dict[str, str], str]:
        """Run the action: exit code of its last step, outputs and log."""
        values = {
            "github.event.repository.default_branch": "main",
            "github.event.pull_request.number": "9" if event == "pull_request" else "",
            "runner.temp": str(self.place / "temp"),
        }
        declared = self.steps["inputs"]
        given = {name: str(one["default"]) for name, one in declared.items()}
        given |= {"name": "train", "token": token, "run": "new.json"} | inputs
        assert given.keys() == declared.keys()
        if "${{" in given["add"]:
            assert "github.event_name == 'push'" in given["add"]
            given["add"] = str(event == "push").lower()
        values |= {f"inputs.{name}": value for name, value in given.items()}
        wanted = {
            "inputs.command != ''": bool(given["command"]),
            "github.event_name == 'pull_request'": event == "pull_request",
            "inputs.add == 'true' || inputs.accept == 'true'": "true"
            in (given["add"], given["accept"]),
        }
        shutil.rmtree(self.place / "temp", ignore_errors=True)
        output, log, code = self.place / "output", "", 0
        output.write_text("")

        def filled(text: str) -> str:
            return re.sub(r"\$\{\{ (.*?) \}\}", lambda m: values[m[1]], str(text))

        for step in self.steps["runs"]["steps"]:
            if not wanted[step["if"]] if "if" in step else False:
                continue

            if "uses" in step:
                assert step["uses"] == "actions/upload-artifact@v4"
                self.upload({key: filled(value) for key, value in step["with"].items()})
                continue
            own = {name: filled(value) for name, value in step.get("env", {}).items()}
            done = subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
                cwd=self.place,
                env={
                    "PATH": self.path,
                    "HOME": str(self.place),
                    "STAND_IN": str(self.hub),
                    "GITHUB_ACTION_PATH": str(ACTION.parent),
                    "GITHUB_REPOSITORY": "us/train",
                    "GITHUB_OUTPUT": str(output),
                    "GITHUB_STEP_SUMMARY": str(self.place / "summary"),
                    "RUNNER_TEMP": values["runner.temp"],
                    **own,
                },
                capture_output=True,
                text=True,
                check=False,
                timeout=PATIENCE_S,
            )
            log, code = f"{log}{done.stdout}{done.stderr}", done.returncode
            if code:
                break
            if "id" in step:
                pairs = (line.split("=", 1) for line in output.read_text().splitlines())
                values |= {f"steps.{step['id']}.outputs.{name}": value for name, value in pairs}
        outputs = {
            name: values.get(one["value"][4:-3], "") for name, one in self.steps["outputs"].items()
        }
        return code, outputs, log

    def upload(self, options: dict[str, str]) -> None:
        target = self.hub / "artifacts" / options["name"]
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for path in map(Path, options["path"].split()):
            for file in path.iterdir() if path.is_dir() else [path]:
                shutil.copy2(file, target)
        self.offer()

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.hub / "calls").read_text().splitlines()]

    def comments(self) -> dict[int, str]:
        return {c["id"]: c["body"] for c in json.loads((self.hub / "comments").read_text())}


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed: gh has its own")
def test_the_action_keeps_a_history_and_judges_pull_requests_by_it(job: Path) -> None:
    workflow = Workflow(job)
    store = workflow.hub / "artifacts/train-history"
    shutil.move(job / "history", store)
    trace(job / "new.json", at=11)
    workflow.offer()
    # A push to the default branch takes the newest history of this branch and adds its run.
    code, outputs, log = workflow.start("push")
    assert (code, outputs) == (0, {"verdict": "same"}), log
    assert len([*store.iterdir()]) == 11
    downloads = [call for call in workflow.calls() if call[:2] == ["run", "download"]]
    assert [call[2] for call in downloads] == ["22"]
    # A pull request that is slower fails and says so in one comment; it is not added.
    trace(job / "new.json", at=12, slower_ns=2_000)
    code, outputs, log = workflow.start("pull_request")
    assert (code, outputs) == (1, {"verdict": "regression"}), log
    assert workflow.comments().keys() == {5, 77}
    body = workflow.comments()[77]
    assert body.startswith("<!-- chopper compare: train -->\n# new.json and its history")
    assert "| 100 µs | 102 µs | **+1.98 %** |" in body
    assert "| Cause, per traced step | Earlier runs | This run | Change | Noise limit |" in body
    assert "Regression: " in (job / "summary").read_text()
    assert [k for _, k, _ in junit(workflow.hub / "artifacts/train-verdict/junit.xml")] == [
        "passed",
        "failure",
    ]
    # Mended, the same comment is written anew.
    trace(job / "new.json", at=13)
    code, outputs, log = workflow.start("pull_request")
    assert (code, outputs) == (0, {"verdict": "same"}), log
    assert workflow.comments().keys() == {5, 77}
    assert "Same: " in workflow.comments()[77]
    assert len([*store.iterdir()]) == 11
    methods = [call[2] for call in workflow.calls() if "--method" in call]
    assert methods == ["POST", "PATCH"]


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed: gh has its own")
def test_the_action_records_a_command_and_survives_a_fork_and_an_empty_history(
    job: Path,
) -> None:
    workflow = Workflow(job)
    program = job / "train.py"
    program.write_text("for step in range(3):\n    print(step)\n")
    code, _, log = workflow.start(
        "push", run="recorded", command=f"{sys.executable} train.py && exit 3"
    )
    assert code == 3, log  # the training's own exit code ends the job
    trace(job / "new.json", at=11)
    code, outputs, log = workflow.start("pull_request", token="of a fork")
    assert (code, outputs) == (0, {"verdict": "too few runs"}), log
    assert "::notice::train: no earlier run on main has left a history" in log
    assert "::warning::train: the comment cannot be written" in log
    code, outputs, log = workflow.start("pull_request", strict="true")
    assert (code, outputs["verdict"]) == (1, "too few runs"), log


def test_the_action_passes_nothing_into_the_text_of_a_script() -> None:
    # `${{ }}` in a script would run what a pull request's title or branch says.
    action = msgspec.yaml.decode(ACTION.read_bytes())
    scripts = [step["run"] for step in action["runs"]["steps"] if "run" in step]
    assert len(scripts) == 5
    assert not any("${{" in script for script in scripts)
    assert all(step.get("shell") == "bash" for step in action["runs"]["steps"] if "run" in step)
    assert msgspec.json.encode(action["runs"])
