"""What an installation is made of, and what works without what Linux and extras give."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

import chopper
from chopper.errors import CaptureError, UsageError
from tests import command
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent
TRACES = [str(ROOT / f"tests/golden/own/fsdp2/rank-0000{rank}/trace.json.gz") for rank in range(2)]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
INSTALL = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=; ]", requirement)[0]


@dataclass
class Elsewhere:
    folder: Path
    by_name: dict[str, tuple[Any, str, str]]
    """Exit code, stdout and stderr."""


@pytest.fixture(scope="module", params=["win32", "darwin"])
def elsewhere(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Elsewhere:
    """What commands do in a Python of another system, by their first word."""
    folder = tmp_path_factory.mktemp(request.param)
    count = "SELECT count(*) AS events FROM device_event"
    commands = [
        ["--version"],
        ["doctor"],
        ["report", *TRACES, "-o", "report.html"],
        ["analyze", *TRACES, "--json"],
        ["compare", *TRACES],
        ["whatif", TRACES[0]],
        ["import", *TRACES, "-o", "run"],
        ["query", "run", count, "--format", "csv"],
        ["export", "run", "--to", "csv"],
        ["estimate", "memory", "llama3-8b"],
        ["record", "--", "python", "train.py"],
        ["calibrate"],
        ["workloads"],
    ]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "elsewhere.py"), request.param],
        input=json.dumps(commands),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    return Elsewhere(folder, {c[0]: r for c, r in zip(commands, results, strict=True)})


def test_all_that_does_not_record_works_elsewhere(elsewhere: Elsewhere) -> None:
    refused = {"record", "calibrate"}
    failed = {k: v for k, v in elsewhere.by_name.items() if k not in refused and v[0] != 0}
    assert failed == {}
    for name in refused:
        code, out, err = elsewhere.by_name[name]
        assert (code, out) == (1, "")
        assert re.fullmatch(rf"chopper: {name}: recording and measuring need Linux, .*\n", err), err
    assert "recording needs Linux" in elsewhere.by_name["doctor"][1]
    assert (elsewhere.folder / "report.html").stat().st_size > 1_000_000
    assert list(elsewhere.folder.glob("run-csv/**/*.csv"))


def test_figures_are_the_same_elsewhere(elsewhere: Elsewhere) -> None:
    here = json.loads(command.run("analyze", *TRACES, "--json").out)
    there = json.loads(elsewhere.by_name["analyze"][1])
    assert there["causes"] == here["causes"]
    assert there["causes"]
    assert int(elsewhere.by_name["query"][1].split()[-1]) > 100


def test_a_recording_elsewhere_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(CaptureError, match="recording needs Linux, this is darwin"):
        chopper.profile("run")


def test_a_polars_frame_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(UsageError, match=r"pip install 'chopper-profiler\[polars\]'"):
        chopper.load(TRACES[0]).scan("step").pl()


def test_core_dependencies_are_thirteen_at_most() -> None:
    assert len(PROJECT["dependencies"]) <= 13


def test_each_extra_says_what_it_brings() -> None:
    rows = re.findall(r"^\| `([a-z0-9]+)` \| (.*?) \|", INSTALL, flags=re.MULTILINE)
    users = set(PROJECT["optional-dependencies"]) - {"dev", "docs"}
    assert {name for name, _ in rows} == users
    for name, text in rows:
        for requirement in PROJECT["optional-dependencies"][name]:
            package = name_of(requirement)
            assert package == "chopper-profiler" or f"`{package}`" in text, (name, package)


def test_install_page_names_the_core() -> None:
    for requirement in PROJECT["dependencies"]:
        assert f"`{name_of(requirement)}`" in INSTALL


def test_version_says_how_it_was_built() -> None:
    shown = command.process("--version").out.splitlines()
    assert shown[0] == f"chopper, version {chopper.__version__}"
    form = r"(editable install|source tree|wheel \S+), commit (unknown|[0-9a-f]{40}(-dirty)?)"
    assert re.fullmatch(rf"{form}, [0-3] of 3 C extensions", shown[1]), shown[1]
    assert shown[2].startswith(f"Python {sys.version.split()[0]} on ")


def test_release_builds_checks_and_signs() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}
    assert set(jobs["wheels"]["strategy"]["matrix"]["runner"]) == {
        "ubuntu-24.04",
        "ubuntu-24.04-arm",
    }
    assert "verification.verified" in str(jobs["tag"])
    writing = {name for name, job in jobs.items() if "id-token" in job.get("permissions", {})}
    assert writing == {"publish"}
    for tool in ("cibuildwheel", "abi3audit", "build", "cyclonedx-bom"):
        assert re.search(rf"\b{tool}==[0-9.]+", text), tool
    for named in re.findall(r"\btests/[\w./-]+", text):
        assert (ROOT / named).is_file(), named
    builds = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]["build"]
    versions = {f"3.{build[3:5]}" for build in builds}
    named = [c for c in PROJECT["classifiers"] if c.startswith("Programming Language :: Python ::")]
    assert versions == {c.rpartition(" ")[2] for c in named}
